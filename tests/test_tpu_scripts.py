"""The scripts for Cloud TPUs, against a stand-in for gcloud that records its calls and can fail."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPTS = HERE.parent / "tpu_scripts"
COMMAND = [
    "jaxpost",
    "train",
    "my run.yaml",
    "a.b=[1, 2]",
    'say=it\'s "so" $HOME `x` \\ !',
    "",
    "*",
]
HEAD = ["gcloud", "compute", "tpus"]
PLACE = ["--quiet", "--zone=us-west4-a", "--project=my-project"]
LAYOUTS = {
    "single host": {"ACCELERATOR_TYPE": "v5litepod-8", "WORKERS": "1"},
    "hosts": {"ACCELERATOR_TYPE": "v5litepod-16", "WORKERS": "4"},
    "slices": {"ACCELERATOR_TYPE": "v5litepod-16", "WORKERS": "4", "NUM_SLICES": "2"},
}
NOTE = "# the next line once for every host it counts; --workers N says how many\n"
CAPACITIES = {"on demand": {}, "spot": {"SPOT": "1"}, "queued": {"QUEUED": "1", "SPOT": "1"}}
ARGUMENTS = {
    "create": ["--", "--network=my net"],
    "setup": ["my data.jsonl"],
    "launch": ["--bucket", "gs://b/x", "--", *COMMAND],
    "logs": [],
    "fetch": ["runs/my run", "my results"],
    "delete": ["--yes"],
    "run_until_done": ["--bucket", "gs://b/x", "my data.jsonl", "--", *COMMAND],
}


class Place:
    """A checkout's scripts and a stand-in for gcloud, in a folder of their own."""

    def __init__(self, folder: Path):
        self.folder, self.stand_in = folder, folder / "stand-in"
        (folder / "bin").mkdir()
        self.stand_in.mkdir()
        for name in ("gcloud", "xpk", "kubectl"):
            (folder / "bin" / name).symlink_to(HERE / "gcloud_stand_in.sh")
        checkout = folder / "my checkout"
        shutil.copytree(SCRIPTS, checkout / "tpu_scripts")
        (checkout / "jaxpost").mkdir()
        for name in ("pyproject.toml", "README.md", "LICENSE", "jaxpost/a.py"):
            (checkout / name).touch()
        self.scripts = checkout / "tpu_scripts"
        (folder / "my data.jsonl").touch()
        self.environment = {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "STAND_IN": str(self.stand_in),
            "TPU_NAME": "my-tpu",
            "ZONE": "us-west4-a",
            "PROJECT_ID": "my-project",
            "ACCELERATOR_TYPE": "v5litepod-8",
            "POLL_SECONDS": "0",
        }
        self.tell(states=["READY"], statuses=["exited 0"], hosts=["1"])

    def tell(self, **files: list[str]) -> None:
        for name, lines in files.items():
            (self.stand_in / name).write_text("".join(f"{line}\n" for line in lines))

    def run(self, script: str, *arguments: str, stdin: str = "", **environment: str):
        (self.stand_in / "calls").unlink(missing_ok=True)
        return subprocess.run(
            ["bash", str(self.scripts / f"{script}.sh"), *arguments],
            input=stdin,
            env={**self.environment, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[list[str]]:
        path = self.stand_in / "calls"
        records = path.read_text().split("\x1e")[:-1] if path.exists() else []
        return [record.split("\x1f")[:-1] for record in records]

    def verbs(self) -> list[str]:
        """Each call in a word: create, describe, delete, scp; of a worker, what it is asked."""
        return [word_for(call) for call in self.calls()]


def word_for(call: list[str]) -> str:
    if call[4] != "ssh":
        return call[4]
    _, script, asked = call[-1].rpartition("on_worker.sh ")
    return asked.split()[0].strip("'\"") if script else "mkdir"


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def test_shellcheck_finds_nothing():
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("there is no shellcheck here; it comes with jaxpost[test]")
    files = [*sorted(SCRIPTS.glob("*.sh")), HERE / "gcloud_stand_in.sh"]
    assert len(files) == 12
    done = subprocess.run([program, *map(str, files)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("script", ARGUMENTS)
def test_a_dry_run_prints_the_calls_and_makes_none(place, script, layout, capacity):
    settings = LAYOUTS[layout] | CAPACITIES[capacity]
    states = {"create": ["NOT_FOUND", "READY"], "run_until_done": ["NOT_FOUND"] * 2 + ["ACTIVE"]}
    place.tell(states=states.get(script, ["READY"]))
    dry = place.run(script, "--dry-run", *ARGUMENTS[script], **settings)
    assert (dry.returncode, dry.stderr, place.calls()) == (0, "", [])
    printed = [shlex.split(line) for line in dry.stdout.splitlines()]
    done = place.run(script, *ARGUMENTS[script], **settings)
    assert done.returncode == 0, done.stderr
    of_gcloud = [words for words in printed if words[0] == "gcloud"]
    assert sorted(of_gcloud) == sorted(place.calls()) != []
    assert {words[0] for words in printed} <= {"gcloud", "mkdir", "tar"}


@pytest.mark.parametrize(
    ("kind", "runtime"),
    {
        "v5litepod-8": "v2-alpha-tpuv5-lite",
        "v5p-8": "v2-alpha-tpuv5",
        "v6e-8": "v2-alpha-tpuv6e",
        "v4-8": "tpu-ubuntu2204-base",
    }.items(),
)
def test_what_creates_a_tpu(place, kind, runtime):
    def creation(*flags: str) -> list[str]:
        lines = place.run("create", "--dry-run", "--type", kind, *flags).stdout.splitlines()
        (line,) = [shlex.split(line) for line in lines if " create " in line]
        return line

    vm, queue = [*HEAD, "tpu-vm", "create"], [*HEAD, "queued-resources", "create"]
    what = ["my-tpu", *PLACE, f"--accelerator-type={kind}"]
    assert creation() == [*vm, *what, f"--version={runtime}"]
    assert creation("--spot") == [*vm, *what, f"--version={runtime}", "--spot"]
    node = [f"--runtime-version={runtime}", "--node-id=my-tpu"]
    assert creation("--queued") == [*queue, *what, *node]
    nodes = [f"--runtime-version={runtime}", "--node-count=2", "--node-prefix=my-tpu"]
    assert creation("--slices=2", "--spot") == [*queue, *what, *nodes, "--spot"]
    assert creation("--runtime=mine") == [*vm, *what, "--version=mine"]


def test_v5e_is_googles_v5litepod_and_tpu7x_is_for_gke(place):
    dry = ["--dry-run", "--type"]
    assert "--accelerator-type=v5litepod-8" in place.run("create", *dry, "v5e-8").stdout
    refused = place.run("create", *dry, "tpu7x-8")
    assert refused.returncode == 1
    assert "gke.sh" in refused.stderr


def test_what_exists_is_not_created_again(place):
    done = place.run("create")
    assert (done.returncode, place.verbs()) == (0, ["describe"])
    assert "exists already" in done.stderr
    place.tell(states=["CREATING", "CREATING", "READY"])
    assert place.run("create").returncode == 0
    assert place.verbs() == ["describe"] * 3
    place.tell(states=["PREEMPTED"])
    done = place.run("create")
    assert (done.returncode, place.verbs()) == (1, ["describe"])
    assert "delete.sh" in done.stderr


def test_a_queue_is_waited_for_and_what_fails_in_it_stops(place):
    place.tell(states=["NOT_FOUND", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"])
    assert place.run("create", "--queued").returncode == 0
    assert place.verbs() == ["describe", "create", "describe", "describe", "describe"]
    place.tell(states=["NOT_FOUND", "WAITING_FOR_RESOURCES", "FAILED"])
    done = place.run("create", "--queued")
    assert done.returncode == 1
    assert "my-tpu is FAILED" in done.stderr


def test_a_failure_names_the_command_and_the_way_out(place):
    place.tell(states=["NOT_FOUND"], failures=["tpu-vm create|1|3|no more capacity"])
    done = place.run("create", "--", "--network=my net")
    assert done.returncode == 1
    line = shlex.join(place.calls()[-1])
    assert f"failed with exit status 3: {line}" in done.stderr
    assert "no more capacity" in done.stderr
    assert "--queued waits in line" in done.stderr


def test_a_state_is_asked_for_again_when_gcloud_stumbles(place):
    place.tell(failures=["describe|4|1|the network is down"])
    assert place.run("create").returncode == 0
    place.tell(failures=["describe|5|1|the network is down"])
    done = place.run("create")
    assert done.returncode == 1
    assert "the network is down" in done.stderr


@pytest.mark.parametrize("script", ["setup", "launch"])
def test_one_failing_worker_is_named_and_the_others_go_on(place, script):
    said = "##### Command execution on worker 3 failed with exit status 7. Continuing."
    place.tell(failures=[f"SLICE=1 bash|1|7|{said}"])
    done = place.run(script, *ARGUMENTS[script], NUM_SLICES="3")
    assert done.returncode == 1
    assert "slice 1: worker 3 failed with exit status 7, of: gcloud" in done.stderr
    assert "slice 0:" not in done.stderr
    asked = "start" if script == "launch" else "install"
    assert place.verbs().count(asked) == 3
    assert place.run(script, *ARGUMENTS[script], "--help").returncode == 0


def test_a_worker_out_of_reach_is_named(place):
    """gcloud tries ten times, and at the end does not say which worker it was."""
    tried = "".join("SSH: Attempting to connect to worker 2...\\n" for _ in range(10))
    place.tell(failures=[f"mkdir|1|255|SSH: Attempting to connect to worker 1...\\n{tried}"])
    done = place.run("setup")
    assert "slice 0: worker 2 could not be reached, of: gcloud" in done.stderr
    assert "worker 1 could" not in done.stderr


def test_setup_sends_the_checkout_and_the_files(place):
    assert place.run("setup", "my data.jsonl", EXTRAS="rewards").returncode == 0
    copied = place.calls()[1]
    package = place.scripts.parent / "build" / "jaxpost.tar.gz"
    sources = [str(place.scripts / "on_worker.sh"), "my data.jsonl", str(package)]
    assert copied[4:10] == ["scp", "--recurse", *sources, "my-tpu:jaxpost/"]
    names = subprocess.run(["tar", "-tf", package], capture_output=True, text=True).stdout.split()
    assert names == ["pyproject.toml", "README.md", "LICENSE", "jaxpost/", "jaxpost/a.py"]
    assert shlex.split(place.calls()[2][-1])[-1] == "./jaxpost.tar.gz[tpu,rewards]"
    done = place.run("setup", "not there.yaml")
    assert (done.returncode, place.calls()) == (2, [])
    assert "there is no not there.yaml" in done.stderr


def test_words_arrive_as_they_were(place):
    """Through our quoting, gcloud (which splits at blanks and joins again), ssh and two shells."""
    (place.folder / "jaxpost").mkdir()
    words = 'printf \'%s\\x1f\' "$SLICE" "$@"'
    (place.folder / "jaxpost" / "on_worker.sh").write_text(words)
    for bucket, kept in (([], ""), (["--bucket=gs://b/x/"], "gs://b/x/my-tpu")):
        assert place.run("launch", "--slices=2", *bucket, "--", *COMMAND).returncode == 0
        remote = sorted(place.calls())[1][-1].removeprefix("--command=")
        heard = subprocess.run(
            ["bash", "-c", " ".join(remote.split(" "))],
            cwd=place.folder,
            capture_output=True,
            text=True,
        ).stdout
        assert heard.split("\x1f")[:-1] == ["1", "start", kept, *COMMAND]


def test_a_line_of_a_dry_run_can_be_pasted(place):
    dry = place.run("launch", "--dry-run", "--", *COMMAND).stdout
    place.run("launch", "--", *COMMAND)
    (call,) = place.calls()
    (place.stand_in / "calls").unlink()
    subprocess.run(["bash", "-c", dry], env=place.environment, cwd=place.folder, check=True)
    assert place.calls() == [call]


def test_logs_come_line_by_line_with_slice_and_worker(place):
    place.tell(hosts=["2"])
    done = place.run("logs", "--slices=2")
    assert done.returncode == 0, done.stderr
    said = [(node, worker) for node in ("my-tpu-0", "my-tpu-1") for worker in (0, 1)]
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[slice {node[-1]} worker {worker}] {line}"
        for node, worker in said
        for line in [*(f"line {n} of {node} {worker}" for n in (1, 2, 3)), "no newline"]
    )
    done = place.run("logs", "--slices=2", "--worker=1")
    assert len(place.calls()) == 2


def test_a_log_that_breaks_off_is_named(place):
    place.tell(failures=["worker=1|1|255|the connection was closed"])
    done = place.run("logs", WORKERS="3")
    assert done.returncode == 1
    assert "[slice 0 worker 1] the connection was closed" in done.stderr
    assert "[slice 0 worker 1] failed with exit status 255: gcloud" in done.stderr
    assert "[slice 0 worker 2] no newline" in done.stdout


def test_delete_asks_first(place):
    for answer in ("", "y\n", "my-tp\n"):
        done = place.run("delete", stdin=answer)
        assert (done.returncode, place.verbs()) == (1, ["describe"])
        assert "--yes" in done.stderr
    assert place.run("delete", stdin="my-tpu\n").returncode == 0
    assert place.calls()[-1] == [*HEAD, "tpu-vm", "delete", "my-tpu", *PLACE]
    assert place.run("delete", "--yes", "--slices=2").returncode == 0
    assert place.calls()[-1] == [*HEAD, "queued-resources", "delete", "my-tpu", *PLACE, "--force"]
    place.tell(states=["NOT_FOUND"])
    done = place.run("delete")
    assert (done.returncode, place.verbs()) == (0, ["describe"])


def test_what_was_fetched_last_is_asked_of_the_bucket(place):
    flags = ["--bucket=gs://b/x", "--from-bucket"]
    assert place.run("fetch", *flags, "log.txt").returncode == 2
    place.tell(failures=["rsync|1|1|no such object"])
    done = place.run("fetch", *flags, "runs/my run", "my results")
    assert place.calls() == [
        ["gcloud", "storage", "rsync", "--recursive", "gs://b/x/my-tpu/my run", "my results/my run"]
    ]
    assert "gcloud storage ls gs://b/x/my-tpu/" in done.stderr


UNTIL = ["--bucket=gs://b/x", "--", *COMMAND]
UP = ["describe", "create", "describe", "mkdir", "scp", "install", "start"]


def test_a_run_goes_on_after_preemption_until_it_is_done(place):
    """Made, preempted, gone while it is made anew, stopped on request, done."""
    up = ["NOT_FOUND", "NOT_FOUND", "READY"]
    place.tell(
        states=[*up, "READY", "READY", "PREEMPTED", "PREEMPTED", *up[1:], "READY", *["READY"] * 4],
        statuses=["running", "running", "running", "exited 75", "running", "exited 0"],
    )
    done = place.run("run_until_done", *UNTIL)
    assert done.returncode == 0, done.stderr
    look = ["describe", "status"]
    anew = ["describe", "describe", "delete"]
    relaunch = ["describe", "status", "stop", "start"]
    assert place.verbs() == [
        *("describe", *UP, *look, *look),
        *(*anew, *UP, *look, *relaunch, *look, *look),
    ]
    started = {call[-1] for call in place.calls() if "on_worker.sh start" in call[-1]}
    assert len(started) == 1


def test_another_creation_is_tried_until_there_is_one(place):
    place.tell(
        states=["PREEMPTED", "PREEMPTED", *["NOT_FOUND"] * 8, "READY"],
        failures=["tpu-vm create|3|1|no more capacity"],
    )
    done = place.run("run_until_done", *UNTIL)
    assert done.returncode == 0, done.stderr
    assert place.verbs().count("create") == 4


def test_what_ends_a_run_for_good(place):
    def ends(**told: list[str]) -> str:
        place.tell(**({"states": ["READY"], "statuses": ["running"], "failures": []} | told))
        done = place.run("run_until_done", *UNTIL)
        assert done.returncode == 1
        return done.stderr

    assert "the command failed (failed: exited 1)" in ends(statuses=["running", "exited 1"])
    assert "killed five times (killed: exited 137)" in ends(statuses=["running", "exited 137"] * 5)
    assert "5 times in a row" in ends(statuses=["exited 75"])
    assert place.verbs().count("start") == 5
    assert "it was not running, 5 times" in ends(
        statuses=["idle"], failures=["install|99|1|no space"]
    )
    assert "be asked how the command is, 20 times" in ends(failures=["status|99|255|no route"])
    assert "the TPU was not created" in ends(
        states=["NOT_FOUND"], failures=["tpu-vm create|1|1|quota"]
    )
    assert "tpu-vm start my-tpu" in ends(states=["STOPPED"])
    done = place.run("run_until_done", "--", *COMMAND)
    assert done.returncode == 2
    assert "without --bucket" in done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("delete", ["--type", "v6e-8"], "there is no --type here"),
        ("create", ["--spto"], "there is no --spto here"),
        ("create", ["--zone"], "--zone wants a value"),
        ("create", ["--name", "my tpu"], "'my tpu' is no name"),
        ("create", ["--slices=0"], "--slices is '0'"),
        ("create", ["my-tpu"], "what is my-tpu for?"),
        ("launch", ["--bucket=b", "--", "x"], "--bucket is 'b'"),
        ("launch", [], "say what to run"),
        ("launch", ["--stop", "--", "x"], "either --stop or a command"),
        ("logs", ["--", "x"], "it takes no command"),
        ("fetch", [], "say what"),
        ("setup", ["--package=x", "--extras=y"], "write them into it: 'jaxpost[tpu,y]'"),
        ("gke", ["status"], "--workload NAME"),
        ("gke", ["nothing"], "not 'nothing'"),
    ],
)
def test_wrong_usage_says_what_is_wrong(place, script, arguments, message):
    done = place.run(script, *arguments)
    assert (done.returncode, place.calls()) == (2, [])
    assert message in done.stderr


def test_switches_in_the_environment_are_1_or_0(place):
    assert "SPOT is 'true'" in place.run("create", SPOT="true").stderr
    assert place.run("create", SPOT="0", DRY_RUN="1").stdout.count("--spot") == 0


@pytest.mark.parametrize("script", [*ARGUMENTS, "gke"])
def test_help_explains_every_flag(place, script):
    done = place.run(script, "--help")
    text = (place.scripts / f"{script}.sh").read_text()
    (line,) = [line for line in text.replace("\\\n", "").splitlines() if 'read_settings "' in line]
    flags = shlex.split(line)[1].split() if script != "gke" else ["workload", "restarts", "bucket"]
    told = [f"--{flag}" for flag in flags if flag.islower() and flag != "$known"]
    assert done.returncode == 0
    assert [flag for flag in told if flag not in done.stdout] == []


def test_gke_goes_through_xpk(place):
    where = ["--cluster=my-tpu", "--zone=us-west4-a", "--project=my-project"]
    run = "--workload=my-run"
    kind = ["--tpu-type=v5litepod-8", "--num-slices=2"]
    image = str(place.scripts.parent / "build" / "gke")
    for arguments, calls in {
        ("create", "--slices=2", "--spot", "--bucket=gs://b"): [
            ["xpk", "cluster", "create", *kind, "--spot", "--enable-gcsfuse-csi-driver", *where],
            [
                *("xpk", "storage", "attach", "jaxpost-runs", "--type=gcsfuse", "--bucket=b"),
                *("--mount-point=/runs", "--readonly=false", "--auto-mount=true", *where),
            ],
        ],
        ("launch", "--slices=2", run, "my data.jsonl", "--", *COMMAND): [
            [
                *("xpk", "workload", "create", run, *kind, "--base-docker-image=python:3.12"),
                *(f"--script-dir={image}", "--max-restarts=20", "--restart-on-exit-codes=75"),
                "--command=pip install --quiet '.[tpu]' && exec " + quoted(*COMMAND),
                *where,
            ]
        ],
        ("status", run): [["xpk", "workload", "list", "--filter-by-job=my-run", *where]],
        ("stop", run): [["xpk", "workload", "delete", run, "--force", *where]],
        ("logs", run): [
            [
                *("gcloud", "container", "clusters", "get-credentials", "my-tpu"),
                *("--location=us-west4", "--project=my-project"),
            ],
            [
                *("kubectl", "logs", "--follow", "--prefix", "--max-log-requests=64"),
                *("--tail=200", "--selector=jobset.sigs.k8s.io/jobset-name=my-run"),
            ],
        ],
        ("delete", "--yes"): [["xpk", "cluster", "delete", "--force", *where]],
    }.items():
        done = place.run("gke", *arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert place.calls() == calls
        dry = place.run("gke", *arguments, DRY_RUN="1")
        printed = [shlex.split(line) for line in dry.stdout.splitlines()]
        assert [words for words in printed if words[0] not in ("rm", "mkdir", "cp")] == calls
        assert place.calls() == []
    assert sorted(os.listdir(image)) == [
        *("LICENSE", "README.md", "jaxpost", "my data.jsonl", "pyproject.toml")
    ]
    assert place.run("gke", "delete", stdin="yes\n").returncode == 1
    assert place.calls() == []


def quoted(*words: str) -> str:
    script = f'. "{SCRIPTS}/calls.sh"; quoted "$@"'
    return subprocess.check_output(["bash", "-c", script, "bash", *words], text=True).rstrip("\n")


def test_the_commands_of_the_readme_are_understood(place):
    blocks = (HERE.parent / "README.md").read_text().split("```bash\n")[1:]
    blocks = [block.partition("```")[0] for block in blocks]
    blocks = [block for block in blocks if "tpu_scripts/" in block]
    (place.folder / "tpu_scripts").symlink_to(place.scripts)
    for name in ("my_run.yaml", "my_data.jsonl"):
        (place.folder / name).touch()
    assert len(blocks) == 3
    for block in blocks:
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            env=place.environment | {"DRY_RUN": "1"},
            cwd=place.folder,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr.replace(NOTE, "")) == (0, "")
    assert place.calls() == []


def test_quoting_is_undone_by_a_shell():
    words = [*COMMAND, "two\nlines", "'", "''", '"', "a'b", "it's 50%", "~", "#", "=x", "-n"]
    assert shlex.split(quoted(*words)) == words
    echoed = subprocess.check_output(["bash", "-c", f"printf '%s\\0' {quoted(*words)}"], text=True)
    assert echoed.split("\0")[:-1] == words


class Host:
    """A host of a TPU, as a folder, with on_worker.sh in it."""

    def __init__(self, place: Place, name: str):
        self.place, self.home = place, place.folder / name / "jaxpost"
        self.home.mkdir(parents=True)
        shutil.copy(SCRIPTS / "on_worker.sh", self.home)
        self.name = name

    def ask(self, *words: str, **environment: str):
        told = {"HOSTNAME": self.name, "SLICE": "0", "SYNC_SECONDS": "0.1"} | environment
        return subprocess.run(
            ["bash", "jaxpost/on_worker.sh", *words],
            env=self.place.environment | told,
            cwd=self.home.parent,
            capture_output=True,
            text=True,
            timeout=30,
        )

    def state(self) -> str:
        return self.ask("status").stdout.partition(": ")[2].strip()

    def wait(self, state: str) -> None:
        until(lambda: self.state() == state)


def until(holds) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Saves how often it was run; at SIGTERM it saves once more and leaves, as `jaxpost train` does.
RUN = """
mkdir -p runs/a/old; echo more >>runs/a/count; touch runs/a/lock.json "$0"
trap 'echo saved >>runs/a/count; exit 75' TERM
echo "here: $1"; while [ ! -e "$1" ]; do sleep 0.05; done; exit 3
"""


def test_a_command_on_a_host_runs_on_and_is_stopped(place):
    host = Host(place, "t1v-n-12ab-w-3")
    command = ["bash", "-c", RUN, "its name", "go on"]
    assert host.state() == "idle"
    assert "nothing was launched" in host.ask("follow").stderr
    assert host.ask("start", "", *command).stdout == "slice 0 worker 3: started\n"
    assert host.state() == "running"
    assert host.ask("start", "", *command).stdout == "slice 0 worker 3: running already\n"
    other = host.ask("start", "", "true")
    assert (other.returncode, "another command is running" in other.stderr) == (1, True)
    until(lambda: (host.home / "log.txt").read_text())
    assert host.ask("stop").stdout == "slice 0 worker 3: exited 75\n"
    assert host.ask("stop").stdout == "slice 0 worker 3: exited 75\n"
    assert (host.home / "runs/a/count").read_text() == "more\nsaved\n"
    (host.home / "go on").touch()
    host.ask("start", "", *command)
    assert host.ask("follow").stdout.splitlines()[-2:] == ["here: go on", "exited 3"]
    (host.home / "exit_code.txt").unlink()  # as when the host went down under it
    assert host.state() == "interrupted"


def test_runs_outlive_their_host_in_a_bucket(place):
    """What one host wrote, the next goes on from; what it removed goes in the bucket too."""
    first, bucket = Host(place, "t1v-n-1-w-0"), place.stand_in / "bucket/b/my-tpu"
    command = ["bash", "-c", RUN, "its name", "go on"]
    first.ask("start", "gs://b/my-tpu", *command)
    until(lambda: (bucket / "a/count").exists())
    (first.home / "runs/a/checkpoint 1").touch()
    until(lambda: (bucket / "a/checkpoint 1").exists())
    (first.home / "runs/a/checkpoint 1").rename(first.home / "runs/a/checkpoint 2")
    until(lambda: not (bucket / "a/checkpoint 1").exists())
    assert (bucket / "a/checkpoint 2").exists()
    first.ask("stop")
    assert (bucket / "a/count").read_text() == "more\nsaved\n"
    assert not (bucket / "a/lock.json").exists()

    second = Host(place, "t1v-n-2-w-0")
    (second.home / "go on").touch()
    second.ask("start", "gs://b/my-tpu", *command)
    second.wait("exited 3")
    assert (bucket / "a/count").read_text() == "more\nsaved\nmore\n"
    assert (second.home / "runs/a/checkpoint 2").exists()


def test_what_a_host_has_is_not_overwritten_from_the_bucket(place):
    """And nothing in the bucket goes because a host had never seen it."""
    bucket = place.stand_in / "bucket/b/my-tpu"
    bucket.mkdir(parents=True)
    (bucket / "x").write_text("theirs")
    (bucket / "y").write_text("theirs")
    host = Host(place, "t1v-n-1-w-0")
    (host.home / "runs").mkdir()
    (host.home / "runs/x").write_text("mine")
    host.ask("start", "gs://b/my-tpu", "true")
    host.wait("exited 0")
    assert [(bucket / name).read_text() for name in "xy"] == ["mine", "theirs"]


def test_only_the_first_host_writes_runs_to_the_bucket(place):
    bucket = place.stand_in / "bucket/b/my-tpu"
    for name, slice_number in (("t1v-n-1-w-1", "0"), ("t1v-n-2-w-0", "1")):
        host = Host(place, name)
        host.ask("start", "gs://b/my-tpu", "touch", f"runs/{name}", SLICE=slice_number)
        host.wait("exited 0")
        assert (host.home / f"runs/{name}").exists()
    assert os.listdir(bucket) == ["launched"]


def test_a_bucket_that_cannot_be_written_shows_at_once(place):
    place.tell(failures=["storage cp|1|1|403"])
    host = Host(place, "t1v-n-1-w-0")
    done = host.ask("start", "gs://b/my-tpu", "true")
    assert done.returncode == 1
    assert "gs://b/my-tpu cannot be written" in done.stderr
    assert host.state() == "idle"
