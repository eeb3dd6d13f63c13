"""A run's folder: who holds it, what its configuration was, how far it got, and how it is stopped.

The folder holds `config.yaml` (resolved), `log.txt`, `lock.json` while a job runs,
`finished.json` once one got to its end, and what the other modules write: `checkpoints/`,
`metrics.jsonl`, `samples.jsonl`. Running the same command again resumes:

    with runs.open_run(folder, config, steps=config.steps) as run:
        if run.finished:
            return run.exit_code
        restored = ...                                    # from checkpoint.Checkpointer
        run.resume(restored.step if restored else 0)      # cuts metrics written after that step
        for step in ...:
            ...
            if run.should_stop(step):
                ...                                       # save
                break
        else:
            run.finish(step)
    return run.exit_code

Stopping. SIGTERM, SIGHUP and the first Ctrl-C ask the loop to save at the end of its update and
exit with code 75 ("run the same command again"); further SIGTERMs change nothing; a second Ctrl-C
exits at once, and the last committed checkpoint stands. With `jax.distributed` JAX owns SIGTERM
and tells all processes at which step to stop; no handler is put over it, and Ctrl-C just ends one.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: stopped on request, state saved, run again to go on
FREE_KEYS = ("checkpoint", "log", "eval", "steps", "run", "resume_anyway")
RECORDS = ("metrics.jsonl", "samples.jsonl")
_HEARTBEAT = 15.0  # seconds between touches of the lock
_SILENT = 90.0  # seconds after which a lock of another machine counts as left behind


class RunError(RuntimeError):
    """The folder cannot be used for this run; the message says why and what to do."""


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The dotted keys whose values differ, as lines `optimizer.learning_rate: 1e-05 -> 2e-05`."""
    before, after = _flat(_plain(old)), _flat(_plain(new))
    return [
        f"{key}: {_shown(before, key)} -> {_shown(after, key)}"
        for key in sorted({*before, *after})
        if key not in before or key not in after or before[key] != after[key]
    ]


def refused_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Those of `config_changes` that would change what is trained."""
    return [line for line in config_changes(old, new) if not _is_free(line.split(":")[0])]


def check_finite(step: int, metrics: Mapping[str, float]) -> None:
    """Stop at a loss or gradient norm that is not finite.

    Raises:
      FloatingPointError: it names the step, the values, and what usually helps.
    """
    bad = {
        name: metrics[name]
        for name in ("loss", "grad_norm")
        if name in metrics and not math.isfinite(metrics[name])
    }
    if bad:
        values = ", ".join(f"{name} is {value}" for name, value in bad.items())
        raise FloatingPointError(
            f"step {step}: {values}. That update was not applied and the checkpoints before it are "
            "sound; a lower learning rate or gradient clipping usually helps"
        )


@dataclasses.dataclass
class Run:
    """A run's folder that this job holds; made by `open_run`, and a context manager.

    Attributes:
      folder: the run's folder.
      finished: whether an earlier job got to the end, so that there is nothing to do.
      stopped: the signal that asked to stop, or None.
    """

    folder: Path
    steps: int
    finished: bool = False
    stopped: signal.Signals | None = None
    _done: int | None = None
    _undo: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def exit_code(self) -> int:
        """0 when the run is finished, 75 when it was stopped and can go on."""
        return EXIT_PREEMPTED if self.stopped is not None and self._done is None else 0

    def should_stop(self, step: int) -> bool:
        """Whether to save and leave after this step; ask at every step, on every process."""
        if jax.distributed.is_initialized() and multihost_utils.reached_preemption_sync_point(step):
            self.stopped = signal.SIGTERM
        return self.stopped is not None

    def resume(self, step: int) -> None:
        """Start from `step` (0: afresh): cut the records written after it, so none comes twice.

        Raises:
          RunError: the run was finished once, and there is no checkpoint of it any more.
        """
        done = _finished_step(self.folder)
        if step == 0 and done > 0:
            raise RunError(
                f"{self.folder} was finished at step {done}, but it holds no checkpoint to go on "
                "from; put them back, or choose another run folder"
            )
        if _primary():
            last = step if step > 0 else -1  # afresh: what was measured before step 1 comes again
            for name in RECORDS:
                count = _truncate(self.folder / name, last)
                if count:
                    log.info("%s: cut %d records that come after step %d", name, count, step)
        if step:
            log.info("resuming from step %d of %d", step, self.steps)

    def finish(self, step: int) -> None:
        """The run got to its end: running it again does nothing."""
        self._done = step
        if _primary():
            _write(self.folder / "finished.json", json.dumps({"step": step}) + "\n")
        log.info("finished at step %d", step)

    def close(self) -> None:
        """Give up the lock, the signal handlers and the log file."""
        self._undo.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self.finished and _primary():
            lines = traceback.format_exception(kind, error, trace)
            with (self.folder / "log.txt").open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        elif self.stopped is not None and self._done is None:
            log.info("stopped by %s; run the same command again to go on", self.stopped.name)
        self.close()


def open_run(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    steps: int,
    resume_anyway: bool = False,
) -> Run:
    """Take the run's folder: create or resume it, or find that it is finished.

    Args:
      folder: made if it does not exist.
      config: the resolved configuration, plain values only; written to `config.yaml`.
      steps: how many updates the run has; one that got there is `finished`.
      resume_anyway: go on although the configuration changed in what is trained.

    Raises:
      RunError: another job holds the folder, or the configuration changed (the changes are listed;
        `checkpoint.*`, `log.*`, `eval.*` and `steps` may change freely).
    """
    run = Run(Path(folder).absolute(), steps)
    try:
        with _on_primary_first():
            if _primary():
                _take(run, config, resume_anyway)
        if not _primary():
            run.finished = _finished_step(run.folder) >= steps
        if not run.finished:
            _own_signals(run)
    except BaseException:
        run.close()
        raise
    return run


def _take(run: Run, config: Mapping[str, Any], resume_anyway: bool) -> None:
    """What process 0 does on opening; nothing is written before every check has passed."""
    run.folder.mkdir(parents=True, exist_ok=True)
    run._undo.enter_context(_lock(run.folder / "lock.json"))
    changes = _check_config(run.folder, config, resume_anyway)
    done = _finished_step(run.folder)
    run.finished = done >= run.steps
    if run.finished:
        _say(
            f"{run.folder} is finished (step {done} of {run.steps}); nothing to do. "
            "Raise steps to train on, or choose another run folder to train anew"
        )
        return
    _write(run.folder / "config.yaml", yaml.safe_dump(_plain(config), sort_keys=False))
    run._undo.enter_context(_logging_to(run.folder / "log.txt"))
    log.info("run %s, process %d on %s", run.folder, os.getpid(), socket.gethostname())
    for line in changes:
        log.info("changed since the last job: %s", line)


def _check_config(folder: Path, config: Mapping[str, Any], resume_anyway: bool) -> list[str]:
    """Changes since the last job, if they are allowed; they do not matter before a checkpoint."""
    path = folder / "config.yaml"
    if not path.exists() or not _has_checkpoints(folder):
        return []
    try:
        old = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise RunError(f"{path} cannot be read ({error}); restore or remove it") from error
    refused = refused_changes(old, config)
    if refused and not resume_anyway:
        raise RunError(
            f"{folder} was trained with another configuration:\n  "
            + "\n  ".join(refused)
            + "\nUse that configuration, choose another run folder, or add resume_anyway=true"
        )
    return config_changes(old, config)


def _has_checkpoints(folder: Path) -> bool:
    return any(not path.name.startswith("tmp.") for path in folder.glob("checkpoints/*"))


def _finished_step(folder: Path) -> int:
    """The last step of a job that got to its end, or -1."""
    try:
        return int(json.loads((folder / "finished.json").read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return -1


@contextlib.contextmanager
def _on_primary_first() -> Iterator[None]:
    """Process 0 runs the body before the others go on; where it fails, they fail too."""
    if jax.process_count() == 1:
        yield
        return
    failed = 0
    try:
        yield
    except BaseException:
        failed = 1
        raise
    finally:
        failed = int(multihost_utils.broadcast_one_to_all(np.int32(failed)))
    if failed:
        raise RunError("process 0 could not open the run; its message says why")


# The lock ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the folder, by a file that names who holds it.

    A holder on this machine is alive if a process with its id and start time is; one on another
    machine, while it touches the file. So a lock that a killed job left behind never needs a hand.
    """
    with _guarded(path.parent):
        holder = _holder(path)
        if holder is not None:
            raise RunError(
                f"{path.parent} is in use by process {holder['pid']} on {holder['host']} since "
                f"{holder['since']}; wait for it, stop it, or choose another run folder"
            )
        _write(path, json.dumps(_identity()) + "\n")
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, ended), name="lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        with _guarded(path.parent), contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
                path.unlink()


@contextlib.contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    """Only one process at a time looks at the lock and takes it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot; a race is unlikely
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock, if they are alive."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        host, pid, start = holder["host"], int(holder["pid"]), holder["start"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        log.warning("%s cannot be read and was taken over", path)
        return None
    here = _identity()
    if host == here["host"]:
        alive = holder["boot"] == here["boot"] and _start_of(pid) == start
    else:
        alive = _now_there(path.parent) - path.stat().st_mtime < _SILENT
    return holder if alive else None


def _identity() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start": _start_of(os.getpid()),
        "boot": _boot(),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _start_of(pid: int) -> str | None:
    """When a process started, in ticks since boot; None when there is none (or it is a zombie).

    Where there is no /proc (macOS), only whether it lives is known.
    """
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            return "alive"
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _now_there(folder: Path) -> float:
    """The time by the clock of the file system, which may be another machine's."""
    probe = folder / f".clock.{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_HEARTBEAT):
        with contextlib.suppress(OSError):
            os.utime(path)


# Signals -------------------------------------------------------------------------------------


def _own_signals(run: Run) -> None:
    """Install the handlers, unless JAX owns SIGTERM, or we are not in the main thread."""
    if jax.distributed.is_initialized():
        return
    if threading.current_thread() is not threading.main_thread():
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and run.stopped is not None:
            _leave_at_once(number)
        if run.stopped is None:
            run.stopped = signal.Signals(number)
            # os.write: a handler must not enter the locks of print or logging.
            os.write(2, b"\nstopping: saving after this update (Ctrl-C again exits at once)\n")

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        before = signal.getsignal(number)
        if before is not signal.SIG_IGN:  # nohup ignores SIGHUP: leave it so
            signal.signal(number, handle)
            run._undo.callback(signal.signal, number, before or signal.SIG_DFL)


def _leave_at_once(number: int) -> None:
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the progress line had hidden the cursor
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# Records and log -----------------------------------------------------------------------------


def _truncate(path: Path, step: int) -> int:
    """Keep the lines of a JSONL file with `step` at most this one; returns how many went.

    A last line that a kill cut short goes too. Written beside and renamed, so that a kill here
    leaves either file whole.
    """
    if not path.exists():
        return 0
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _belongs(line, step)]
    if len(kept) < len(lines):
        _write(path, b"".join(kept))
    return len(lines) - len(kept)


def _belongs(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send the package's log to the file and, without times, to the terminal.

    What Orbax and others say through absl goes to the file only.
    """
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours, theirs = logging.getLogger("jaxpost"), logging.getLogger("absl")
    before = ours.level, ours.propagate, theirs.propagate
    terminal = _Terminal()
    terminal.setFormatter(_Plain())
    ours.setLevel(logging.INFO)
    ours.propagate = theirs.propagate = False
    for logger, handler in ((ours, to_file), (ours, terminal), (theirs, to_file)):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, handler in ((ours, to_file), (ours, terminal), (theirs, to_file)):
            logger.removeHandler(handler)
        to_file.close()
        ours.setLevel(before[0])
        ours.propagate, theirs.propagate = before[1:]


class _Terminal(logging.Handler):
    """To whatever stderr is now: a live progress line replaces it to keep lines whole."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


# Plain values --------------------------------------------------------------------------------


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would give it back: tuples become lists, keys strings."""
    try:
        return json.loads(json.dumps(config))
    except TypeError as error:
        raise TypeError(f"the configuration must hold plain values: {error}") from error


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    parts = (_flat(value, f"{prefix}.{key}" if prefix else key) for key, value in tree.items())
    return dict(itertools.chain.from_iterable(part.items() for part in parts))


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "(absent)"


def _is_free(key: str) -> bool:
    return key.split(".")[0] in FREE_KEYS


def _write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _primary() -> bool:
    return jax.process_index() == 0
