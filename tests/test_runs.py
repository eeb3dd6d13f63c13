"""A run's folder under kills, signals, second jobs and changed configurations."""

import contextlib
import dataclasses
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
import yaml

from jaxpost import checkpoint, optimizers, runs, train_step
from jaxpost.data import chat, sources
from jaxpost.recipes import setup
from jaxpost.runs import changes, lock

LOOP = Path(__file__).with_name("crash_loop.py")
STEPS = 30


def start(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(LOOP), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def loop(*arguments: object, timeout: float = 400) -> str:
    process = start(*arguments)
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err[-3000:]
    return out


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(records: list[dict]) -> list[dict]:
    clock = ("step_time", "tokens_per_second", "mfu", "compile_time", "elapsed")
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    loop("children", folder, STEPS)
    return folder


def assert_like(folder: Path, straight: Path) -> None:
    """The same bits at the end, and each step's metrics once, the same."""
    assert (folder / "digest.txt").read_text() == (straight / "digest.txt").read_text()
    records = metrics_of(folder)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert timeless(records) == timeless(metrics_of(straight))
    assert not list(folder.glob("checkpoints/tmp.*"))
    assert not (folder / "lock.json").exists()


def newest_after_each_child(out: str) -> list[int]:
    return [int(line.split()[2]) for line in out.splitlines() if line.startswith("child")]


@pytest.fixture
def small_disk(tmp_path):
    """`(name, options)` → a folder that is a file system of its own."""
    mounted = []

    def mount(name: str, options: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={options}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs root, to mount a small disk")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# Kills -----------------------------------------------------------------------------------------


def test_killed_at_random_times_the_run_ends_in_the_same_bits(straight, tmp_path):
    rng = random.Random(0)
    boots = [f"kill:{rng.uniform(0.05, 0.6):.2f}" for _ in range(3)]
    later = [f"kill:+{rng.uniform(0, 0.1):.3f}" for _ in range(5)]
    moments = boots + later
    rng.shuffle(moments)
    out = loop("children", tmp_path / "run", STEPS, *moments)
    kept = newest_after_each_child(out)
    # A moment may come after a quick child is done; the others must have been killed.
    assert out.count("child -9") >= 3
    assert kept == sorted(kept)
    assert kept[-1] == STEPS
    assert_like(tmp_path / "run", straight)


def test_killed_at_chosen_points_of_a_save_the_run_ends_in_the_same_bits(straight, tmp_path):
    # Of the file events of a fresh run: taking the lock, writing the config, the parts of the first
    # save, its manifest, marker, rename; then those of the second save, and pruning.
    points = [f"fault:{count}" for count in (2, 6, 33, 64, 68, 76, 77, 144, 214)]
    out = loop("children", tmp_path / "run", STEPS, *points)
    kept = newest_after_each_child(out)
    assert out.count("child -9") == len(points)
    assert kept == sorted(kept)
    assert_like(tmp_path / "run", straight)


@pytest.mark.slow
def test_killed_at_every_seventh_point(straight, tmp_path):
    for first in range(1, 300, 70):
        folder = tmp_path / str(first)
        points = [f"fault:{count}" for count in range(first, min(first + 70, 300), 7)]
        out = loop("children", folder, STEPS, *points)
        assert newest_after_each_child(out) == sorted(newest_after_each_child(out))
        assert_like(folder, straight)


@pytest.mark.slow
def test_killed_fifty_times(straight, tmp_path):
    for seed in range(5):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        moments = [f"kill:+{rng.uniform(0, 0.3):.3f}" for _ in range(6)]
        moments += [f"kill:{rng.uniform(0.05, 3):.2f}" for _ in range(4)]
        rng.shuffle(moments)
        loop("children", folder, STEPS, *moments)
        assert_like(folder, straight)


# Signals ---------------------------------------------------------------------------------------


def test_sigterm_and_ctrl_c_save_the_step_exit_with_75_and_the_same_command_goes_on(
    straight, tmp_path
):
    folder = tmp_path / "run"
    out = loop("children", folder, STEPS, "term:+0.05", "int:+0.05")
    codes = [int(line.split()[1]) for line in out.splitlines() if line.startswith("child")]
    assert codes == [runs.EXIT_PREEMPTED, runs.EXIT_PREEMPTED, 0]
    assert runs.EXIT_PREEMPTED == 75
    text = (folder / "log.txt").read_text()
    assert text.count("stopped by SIGTERM") == text.count("stopped by SIGINT") == 1
    for last in newest_after_each_child(out)[:2]:  # saved at the step it stopped at: none lost
        assert f"resuming from step {last} of {STEPS}" in text
    assert "cut" not in text
    assert_like(folder, straight)


def test_a_second_job_is_refused_and_a_second_ctrl_c_leaves_at_once(tmp_path):
    process = start("train", tmp_path, "9", "60")
    try:
        assert process.stdout is not None
        assert any(line.startswith("asleep") for line in process.stdout)
        with pytest.raises(runs.RunError) as error:
            runs.open_run(tmp_path, {}, steps=1)
        assert f"in use by process {process.pid} on {socket.gethostname()} since 2" in str(
            error.value
        )
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None  # it would save at the end of this long step
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == -signal.SIGINT
    finally:
        process.kill()
        process.communicate()
    # It left its lock behind, and that stops nobody.
    assert json.loads((tmp_path / "lock.json").read_text())["pid"] == process.pid
    with runs.open_run(tmp_path, {}, steps=9) as run:
        assert not run.finished


def test_of_jobs_started_together_one_gets_it(tmp_path):
    lines = loop("race", tmp_path / "run", "6").splitlines()
    assert len(lines) == 6
    assert lines.count("held") == 1
    assert sum("is in use by process" in line for line in lines) == 5


def test_a_ctrl_c_that_falls_into_a_callback_is_not_lost():
    code = """
import os, signal, time
from jaxpost import __main__ as cli
cli.keep_interrupts()
class Callback:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
try:
    Callback()
    time.sleep(20)
    print("lost")
except KeyboardInterrupt:
    print("came")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("came\n", "")


def test_handlers_are_given_back_and_an_ignored_hangup_stays_ignored(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with runs.open_run(tmp_path / "run", {}, steps=3) as run:
            assert signal.getsignal(signal.SIGTERM) not in before
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert not run.should_stop(1)
            assert run.exit_code == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert run.should_stop(2)
            assert run.exit_code == 75
            run.finish(3)
            assert run.exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


# The folder ------------------------------------------------------------------------------------


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_finished_run_says_so_and_changes_nothing(straight, capsys):
    before = snapshot(straight)
    config = yaml.safe_load((straight / "config.yaml").read_text())
    with runs.open_run(straight, config, steps=STEPS) as run:
        assert run.finished
        assert run.exit_code == 0
    assert f"is finished (step {STEPS} of {STEPS}); nothing to do" in capsys.readouterr().err
    assert snapshot(straight) == before


def test_more_steps_go_on_from_a_finished_run(tmp_path):
    with runs.open_run(tmp_path, {"steps": 3}, steps=3) as run:
        run.finish(3)
    with runs.open_run(tmp_path, {"steps": 2}, steps=2) as run:
        assert run.finished
    with runs.open_run(tmp_path, {"steps": 5}, steps=5) as run:
        assert not run.finished
        with pytest.raises(runs.RunError, match="finished at step 3, but it holds no checkpoint"):
            run.resume(0)
        run.resume(3)


def test_fewer_steps_than_were_trained_are_refused(tmp_path):
    """Else the model of step 5 would be exported as that of step 3."""
    resumed(tmp_path, {"steps": 10})
    with pytest.raises(runs.RunError, match="trained to step 5, and steps is 3 now; set steps=5"):
        resumed(tmp_path, {"steps": 3})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {"steps": 10}
    resumed(tmp_path, {"steps": 5})


def test_records_after_the_restored_step_are_cut(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 1.0}\n{"step": 2}\n{"step": 3}\n\x00\x00\n{"step": 4, "lo'
    )
    (tmp_path / "samples.jsonl").write_bytes(b'{"step": 2, "a": "x"}\n{"step": 3, "a": "y"}\n')
    with runs.open_run(tmp_path, {}, steps=9) as run:
        logging.getLogger("jaxpost").propagate = True
        with caplog.at_level(logging.INFO, "jaxpost"):
            run.resume(2)
        assert "metrics.jsonl: cut 2 records that come after step 2" in caplog.text
        assert r"metrics.jsonl line 4 is no record and was removed: b'\x00\x00'" in caplog.text
        assert (tmp_path / "metrics.jsonl").read_bytes() == (
            b'{"step": 1, "loss": 1.0}\n{"step": 2}\n'
        )
        assert (tmp_path / "samples.jsonl").read_bytes() == b'{"step": 2, "a": "x"}\n'
        stamp = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
        run.resume(2)
        assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == stamp
    assert "samples.jsonl: cut 1 records that" in (tmp_path / "log.txt").read_text()


def test_what_is_no_record_is_quoted_with_its_line_and_what_belongs_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"step": 1}\nmine\n[]\n{"step": null}\n\n{"step": 1e999}\n{"step": 1.5}\ny\n{"step": 2}'
    )
    with runs.open_run(tmp_path, {}, steps=9) as run:
        run.resume(2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    log = (tmp_path / "log.txt").read_text()
    warned = [line.split(" WARNING ")[1] for line in log.splitlines() if " WARNING " in line]
    assert warned == [
        f"{path} line 2 is no record and was removed: b'mine'",
        f"{path} line 3 is no record and was removed: b'[]'",
        f"{path} line 4 is no record and was removed: b'{{\"step\": null}}'",
        f"{path} line 5 is no record and was removed: b''",
        f"{path} line 6 is no record and was removed: b'{{\"step\": 1e999}}'",
        f"{path}: 2 more such lines were removed",
    ]
    assert "cut" not in log


def test_a_folder_that_cannot_be_one_is_refused_by_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "run" / "lock.json").mkdir(parents=True)
    for folder, words in (
        ("file", r"run: .*/file cannot be a folder \(File exists\)"),
        ("file/below", r"run: .*/file/below cannot be a folder \(Not a directory\)"),
        ("", "run is empty"),
        (" ", "run is empty"),
        ("run", r"run: .*/run/lock\.json is a folder, and a run keeps a file of that name"),
    ):
        with pytest.raises(runs.RunError, match=words):
            runs.open_run(folder, {}, steps=1)
    assert snapshot(tmp_path).keys() == {str(tmp_path / "file")}


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        (
            "finished.json",
            (b"", b"[]", b"{}", b'{"step": null}', b'{"step": 1e999}', b"\xff"),
            "remove it to go on",
        ),
        ("config.yaml", (b"", b"[]", b"3", b"a: [", b"\xff", b"a: 2024-01-01"), "restore it, or"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, contents, words):
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    for content in contents:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(runs.RunError, match=words) as error:
            runs.open_run(tmp_path, {"a": 1}, steps=3)
        assert str(error.value).startswith(str(tmp_path / name))
    assert not (tmp_path / "lock.json").exists()


def test_a_full_disk_is_named_and_hides_no_other_error(tmp_path, small_disk, capsys):
    folder = small_disk("run", "64k")

    def train():
        with runs.open_run(folder, {}, steps=9) as run:
            run.resume(0)
            with contextlib.suppress(OSError):
                (folder / "ballast").write_bytes(b"x" * 100_000)
            for _ in range(50):
                logging.getLogger("jaxpost").info("x" * 100)
            with pytest.raises(runs.RunError, match=r"finished\.json could not be written \(No"):
                run.finish(9)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert not list(folder.glob(".*.tmp"))
    said = capsys.readouterr().err
    assert said.count("log.txt cannot be written") == 1
    assert "Logging error" not in said


def test_a_read_only_folder_is_named(small_disk):
    folder = small_disk("run", "64k,ro")
    with pytest.raises(runs.RunError, match=r"lock\.json could not be written \(Read-only"):
        runs.open_run(folder, {}, steps=9)


def test_starting_afresh_keeps_no_record(tmp_path):
    (tmp_path / "samples.jsonl").write_bytes(b'{"step": 0, "a": "x"}\n{"step": 1, "a": "y"}\n')
    with runs.open_run(tmp_path, {}, steps=9) as run:
        run.resume(0)
    assert (tmp_path / "samples.jsonl").read_bytes() == b""


def test_config_and_log_are_written_and_an_error_goes_to_the_log(tmp_path, capsys):
    config = {"recipe": "sft", "optimizer": {"learning_rate": 1e-5, "betas": (0.9, 0.95)}}

    def train():
        with runs.open_run(tmp_path, config, steps=9) as run:
            run.resume(0)
            logging.getLogger("jaxpost.somewhere").info("a note")
            logging.getLogger("jaxpost.somewhere").warning("a warning")
            logging.getLogger("absl").error("chatter of a library")
            raise ZeroDivisionError("the cause")

    with pytest.raises(ZeroDivisionError):
        train()
    text = (tmp_path / "log.txt").read_text()
    assert "INFO a note\n" in text
    assert "chatter of a library" in text
    assert "ZeroDivisionError: the cause" in text
    err = capsys.readouterr().err
    assert "a note\nwarning: a warning\n" in err
    assert "chatter" not in err
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert kept["optimizer"] == {"learning_rate": 1e-5, "betas": [0.9, 0.95]}
    assert not (tmp_path / "lock.json").exists()


# Changed configuration ---------------------------------------------------------------------------

OLD = {
    "steps": 10,
    "seed": 0,
    "optimizer": {"learning_rate": 1e-5, "betas": (0.9, 0.95)},
    "checkpoint": {"every": 5},
}
NEW = {
    "steps": 20,
    "seed": 0,
    "optimizer": {"learning_rate": 2e-5, "betas": [0.9, 0.95], "decay": {}},
    "checkpoint": {"every": 7},
}


def test_changes_by_hand():
    assert runs.config_changes(OLD, OLD) == []
    found = runs.config_changes(OLD, NEW)
    assert [str(change) for change in found] == [
        "checkpoint.every: 5 -> 7",
        "optimizer.decay: (absent) -> {}",
        "optimizer.learning_rate: 1e-05 -> 2e-05",
        "steps: 10 -> 20",
    ]
    assert [change.free for change in found] == [True, False, False, True]
    assert list(map(str, runs.config_changes({"a": None}, {}))) == ["a: null -> (absent)"]
    assert [
        (str(change), change.fixed)
        for change in runs.config_changes(
            {"model": {"lora": None, "path": "a"}, "data": {"eval": None, "train": "x"}},
            {"model": {"lora": {"rank": 4}, "path": "b"}, "data": {"eval": "e", "train": "y"}},
        )
        if not change.free
    ] == [
        ('data.train: "x" -> "y"', True),
        ('model.lora: null -> {"rank": 4}', True),
        ('model.path: "a" -> "b"', False),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "lion"},
        {"name": "sgd"},
        {"learning_rate": 1.0},
        {"schedule": "constant"},
        {"warmup": 2},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "max_grad_norm": None},
        {"max_grad_norm": 2.0},
        {"b1": 0.5, "eps": 1e-3},
    ],
)
def test_a_change_of_the_optimizer_is_fixed_where_its_state_would_be_another(changed):
    """So resume_anyway is offered where the checkpoint fits, and only there."""
    configs = [optimizers.OptimizerConfig(), optimizers.OptimizerConfig(**changed)]
    params = {"embedding": jnp.ones((3, 2))}
    states = [
        jax.tree_util.tree_flatten_with_path(
            jax.eval_shape(optimizers.make_optimizer(config, 10)[0].init, params)
        )[0]
        for config in configs
    ]
    old, new = ({"optimizer": dataclasses.asdict(config)} for config in configs)
    fits = states[0] == states[1]
    assert any(change.fixed for change in runs.config_changes(old, new)) == (not fits)


def resumed(folder: Path, config: dict, **options) -> None:
    """A job that restores step 5, and resumes."""
    with runs.open_run(folder, config, steps=config["steps"], **options) as run:
        (run.checkpoints / "step_00000005").mkdir(parents=True, exist_ok=True)
        run.resume(5)


def test_a_changed_config_is_refused_with_the_changes_unless_told(tmp_path):
    resumed(tmp_path, OLD)
    before = (tmp_path / "config.yaml").read_text()
    with pytest.raises(runs.RunError) as error:
        resumed(tmp_path, NEW)
    assert "optimizer.learning_rate: 1e-05 -> 2e-05" in str(error.value)
    assert "steps" not in str(error.value)
    assert "resume_anyway=true" in str(error.value)
    assert (tmp_path / "config.yaml").read_text() == before
    assert not (tmp_path / "lock.json").exists()
    resumed(tmp_path, {**OLD, "steps": 12, "checkpoint": {"every": 1}})
    resumed(tmp_path, NEW, resume_anyway=True)
    text = (tmp_path / "log.txt").read_text()
    assert "changed since the last job: steps: 10 -> 12" in text
    assert "changed since the last job: optimizer.learning_rate: 1e-05 -> 2e-05" in text


def test_resume_anyway_is_not_offered_where_it_cannot_help(tmp_path):
    resumed(tmp_path, {**OLD, "batch_size": 8})
    with pytest.raises(runs.RunError) as error:
        resumed(tmp_path, {**OLD, "batch_size": 4, "seed": 1})
    assert "Put batch_size, seed back, or choose another run folder" in str(error.value)
    assert "resume_anyway=true" not in str(error.value)
    with pytest.raises(
        runs.RunError, match=r"Put batch_size back.*other changes would need resume"
    ):
        resumed(tmp_path, {**NEW, "batch_size": 4})


def test_a_job_that_cannot_restore_leaves_config_and_records_as_they_were(tmp_path):
    """So that the original command still goes on after `resume_anyway` was tried in vain."""
    resumed(tmp_path, OLD)
    (tmp_path / "metrics.jsonl").write_text('{"step": 6}\n')
    with (
        pytest.raises(ValueError, match="does not fit"),
        runs.open_run(tmp_path, NEW, steps=20, resume_anyway=True),
    ):
        raise ValueError("the checkpoint does not fit")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 6}\n'
    resumed(tmp_path, OLD)


TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def tiny() -> setup.Policy:
    return setup.load_policy(setup.ModelConfig(fresh=TINY, tokenizer="bytes"), jax.random.key(0))


def test_a_data_position_that_does_not_fit_leaves_the_folder_as_it_was(tmp_path, tiny):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 9)
    state = train_step.init_state(tiny.params, optax.sgd(0.1))

    def job(batch_size: int, **options) -> None:
        config = {"steps": 4, "batch_size": batch_size}
        data = sources.batches(
            sources.DataConfig(train=str(tmp_path / "rows.jsonl")),
            chat.Tokenize(tiny.tokenizer, chat.ChatOptions()),
            length=16,
            batch_size=batch_size,
            seed=0,
        )
        with (
            runs.open_run(tmp_path / "run", config, steps=4, **options) as run,
            checkpoint.Checkpointer(run.checkpoints) as saver,
        ):
            setup.resume(run, saver, state, None, data)
            (run.folder / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')
            saver.save(2, state, {"data": data.get_state(), "counters": {}}, config)

    job(2)
    with pytest.raises(ValueError, match="batch_size was 2 and is 3"):
        job(3, resume_anyway=True)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["batch_size"] == 2
    assert len(metrics_of(tmp_path / "run")) == 2
    job(2)


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path, tiny):
    for name in (".model.new-12", ".model.old-12", ".mine.new-1"):
        (tmp_path / name / "inside").mkdir(parents=True)
    setup.export(tmp_path, tiny, tiny.params, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.new-1", "model"]


def test_an_export_to_a_full_disk_says_so_and_leaves_nothing_half_written(tiny, small_disk):
    folder = small_disk("run", "200k")
    with contextlib.suppress(OSError):
        (folder / "ballast").write_bytes(b"x" * 180_000)
    with pytest.raises(OSError, match=r"model\.safetensors could not be written .*No space left"):
        setup.export(folder, tiny, tiny.params, None)
    (folder / "ballast").unlink()
    assert list(folder.iterdir()) == []
    setup.export(folder, tiny, tiny.params, None)
    assert (folder / "model" / "model.safetensors").exists()


def test_before_the_first_checkpoint_any_change_is_welcome(tmp_path):
    for config in (OLD, NEW):
        with runs.open_run(tmp_path, config, steps=10) as run:
            run.resume(0)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == changes.plain(NEW)


# The lock ----------------------------------------------------------------------------------------


def lock_of(folder: Path, **fields) -> Path:
    path = folder / "lock.json"
    path.write_text(json.dumps({**lock.identity(), **fields}))
    return path


def test_the_same_process_does_not_get_it_twice(tmp_path):
    with (
        runs.open_run(tmp_path, {}, steps=1),
        pytest.raises(runs.RunError, match=f"process {os.getpid()} on"),
    ):
        runs.open_run(tmp_path, {}, steps=1)


def test_locks_left_behind(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # The process id was given to another process since.
        lock_of(tmp_path, pid=other.pid, start="17")
        runs.open_run(tmp_path, {}, steps=1).close()
        # The machine was restarted since.
        lock_of(tmp_path, pid=other.pid, start=lock.start_of(other.pid), boot="another")
        runs.open_run(tmp_path, {}, steps=1).close()
        # It is that process.
        lock_of(tmp_path, pid=other.pid, start=lock.start_of(other.pid))
        with pytest.raises(runs.RunError, match=f"process {other.pid}"):
            runs.open_run(tmp_path, {}, steps=1)
    finally:
        other.communicate(b"\n")
    runs.open_run(tmp_path, {}, steps=1).close()
    # Cut short or bare, which atomic writing rules out, but a user's editor does not.
    whole = lock.identity()
    lacking = [json.dumps({k: v for k, v in whole.items() if k != key}) for key in whole]
    for text in ('{"pid": 1', "", "[]", *lacking):
        (tmp_path / "lock.json").write_text(text)
        runs.open_run(tmp_path, {}, steps=1).close()


def test_a_lock_of_another_machine_counts_while_it_is_touched(tmp_path):
    path = lock_of(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(runs.RunError, match="process 1 on elsewhere"):
        runs.open_run(tmp_path, {}, steps=1)
    old = time.time() - 300
    os.utime(path, (old, old))
    runs.open_run(tmp_path, {}, steps=1).close()
    assert not path.exists()


# Bad numbers -------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_and_names_the_step():
    runs.check_finite(3, {"loss": 1.0, "grad_norm": 2.0, "eval/perplexity": float("inf")})
    runs.check_finite(3, {})
    with pytest.raises(FloatingPointError, match="step 12: loss is nan, grad_norm is inf"):
        runs.check_finite(12, {"loss": float("nan"), "grad_norm": float("inf")})


# Two processes -----------------------------------------------------------------------------------


def two_processes(folder: Path, *arguments: object) -> list[tuple[int, str]]:
    """Exit code and last line of each of two processes that train together."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_process_loop.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, (rank, port, folder, *arguments))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for rank in (0, 1)
    ]
    ended = []
    for process in processes:
        out, _ = process.communicate(timeout=120)
        ended.append((process.returncode, (out.splitlines() or [""])[-1]))
    return ended


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_stops_both_at_one_step(tmp_path):
    stopped = two_processes(tmp_path / "run", 40, 12)
    assert [code for code, _ in stopped] == [75, 75]
    step = int(stopped[0][1].split()[2])
    assert 12 < step < 40
    assert stopped[1][1].startswith(f"stopped at {step} ")
    path = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
    assert {"position.0.json", "position.1.json"} <= {file.name for file in path.iterdir()}

    resumed = two_processes(tmp_path / "run", 40)
    straight = two_processes(tmp_path / "other", 40)
    assert resumed == straight
    assert [code for code, _ in straight] == [0, 0]
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "other")
    assert len(metrics_of(tmp_path / "run")) == 40
