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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: stopped on request, state saved, run again to go on
FREE_KEYS = (
    "checkpoint", "log", "eval", "steps", "run", "resume_anyway", "data.eval", "data.workers",
)  # fmt: skip
# What the shapes of the state and the data position hang on: no resume_anyway gets past these,
FIXED_KEYS = (
    "recipe", "seed", "batch_size", "data", "model.fresh", "model.tokenizer", "model.dtype",
    "model.lora.rank", "model.lora.targets", "optimizer.name",
)  # fmt: skip
# nor past a change of these from none to some or back.
SWITCHES = ("ema_decay", "model.lora", "optimizer.max_grad_norm", "optimizer.weight_decay")
RECORDS = ("metrics.jsonl", "samples.jsonl")
_HEARTBEAT = 15.0  # seconds between touches of the lock
_NAMED = 5  # lines quoted in warnings, at most
_SILENT = 90.0  # seconds after which a lock of another machine counts as left behind


class RunError(RuntimeError):
    """The folder cannot be used for this run; the message says why and what to do."""


class Change(NamedTuple):
    """A dotted key whose value differs; `...` stands for an absent one."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("(absent)" if x is ... else json.dumps(x) for x in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"

    @property
    def free(self) -> bool:
        """Whether it changes nothing in what is trained."""
        return _within(self.key, FREE_KEYS)

    @property
    def fixed(self) -> bool:
        """Whether what was saved cannot go on under it."""
        some = [value not in (..., None, 0) for value in (self.old, self.new)]
        return _within(self.key, FIXED_KEYS) or (self.key in SWITCHES and some[0] != some[1])


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs; as text `optimizer.learning_rate: 1e-05 -> 2e-05`."""
    return list(_changes(_plain(old), _plain(new)))


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[Change]:
    for key in sorted({*old, *new}):
        change = Change(prefix + key, old.get(key, ...), new.get(key, ...))
        if isinstance(change.old, dict) and isinstance(change.new, dict):
            yield from _changes(change.old, change.new, f"{change.key}.")
        elif change.old != change.new:
            yield change


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
    _config: str = ""
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
        """Start from `step` (0: afresh): write the configuration, cut the records that come after.

        Call it once state and data position are restored: what fails before changes nothing.

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
            _write(self.folder / "config.yaml", self._config)
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
            with (
                contextlib.suppress(OSError),  # a full disk, say: the error itself goes on
                (self.folder / "log.txt").open("a", encoding="utf-8") as file,
            ):
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
      config: the resolved configuration, plain values only; `Run.resume` writes it.
      steps: how many updates the run has; one that got there is `finished`.
      resume_anyway: go on although the configuration changed in what is trained.

    Raises:
      RunError: another job holds the folder, or it cannot be written, or the configuration changed
        (the changes are listed; FREE_KEYS may change freely).
    """
    if not os.fspath(folder).strip():
        raise RunError("run is empty; name the folder of the run")
    text = yaml.safe_dump(_plain(config), sort_keys=False)
    run = Run(Path(folder).absolute(), steps, _config=text)
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
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"run: {run.folder} cannot be a folder ({error.strerror})") from error
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
    run._undo.enter_context(_logging_to(run.folder / "log.txt"))
    log.info("run %s, process %d on %s", run.folder, os.getpid(), socket.gethostname())
    for line in changes:
        log.info("changed since the last job: %s", line)


def _check_config(folder: Path, config: Mapping[str, Any], resume_anyway: bool) -> list[Change]:
    """Changes since the last job, if they are allowed; they do not matter before a checkpoint."""
    path = folder / "config.yaml"
    if not path.exists() or not _has_checkpoints(folder):
        return []
    try:
        old = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise TypeError("it holds no keys")
        changes = config_changes(old, config)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise RunError(
            f"{path} cannot be read ({error}); restore it, or remove it to go on without comparing "
            "configurations"
        ) from error
    refused = [change for change in changes if not change.free]
    if refused and not resume_anyway:
        raise RunError(_refusal(folder, refused))
    return changes


def _refusal(folder: Path, refused: list[Change]) -> str:
    fixed = [change.key for change in refused if change.fixed]
    way = "Use that configuration, choose another run folder, or add resume_anyway=true"
    if fixed:
        way = (
            f"Put {', '.join(fixed)} back, or choose another run folder: what was saved cannot go "
            "on otherwise"
        )
        if len(fixed) < len(refused):
            way += " (the other changes would need resume_anyway=true)"
    lines = "\n  ".join(map(str, refused))
    return f"{folder} was trained with another configuration:\n  {lines}\n{way}"


def _has_checkpoints(folder: Path) -> bool:
    return any(not path.name.startswith("tmp.") for path in folder.glob("checkpoints/*"))


def _finished_step(folder: Path) -> int:
    """The last step of a job that got to its end, or -1."""
    path = folder / "finished.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return -1
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not say at which step the run was finished; remove it to go on from the "
            "last checkpoint"
        ) from error


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
        with _guarded(path.parent), contextlib.suppress(OSError, ValueError, KeyError, TypeError):
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
    here = _identity()
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        holder = {**{key: held[key] for key in here}, "pid": int(held["pid"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        log.warning("%s cannot be read and was taken over", path)
        return None
    if holder["host"] == here["host"]:
        alive = holder["boot"] == here["boot"] and _start_of(holder["pid"]) == holder["start"]
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
    """Keep the records of a JSONL file with `step` at most this one; returns how many went.

    A last line that a kill cut short counts among them; what else is no record goes with a warning.
    Written beside and renamed, so that a kill here leaves either file whole.
    """
    if not path.exists():
        return 0
    before = path.read_bytes()
    lines = before.splitlines()
    steps = [_step_of(line) for line in lines]
    cut = 1 if before and not before.endswith(b"\n") and steps[-1] is None else 0
    strange = [n for n, found in enumerate(steps[: len(lines) - cut]) if found is None]
    for n in strange[:_NAMED]:
        log.warning("%s line %d is no record and was removed: %r", path, n + 1, lines[n][:200])
    if len(strange) > _NAMED:
        log.warning("%s: %d more such lines were removed", path, len(strange) - _NAMED)
    belong = (found is not None and found <= step for found in steps)
    after = b"".join(line + b"\n" for line in itertools.compress(lines, belong))
    if after != before:
        _write(path, after)
    return len(lines) - after.count(b"\n") - len(strange)


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for what is none."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send the package's log to the file and, without times, to the terminal.

    What Orbax and others say through absl goes to the file only.
    """
    to_file = _File(path, encoding="utf-8")
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


class _File(logging.FileHandler):
    """Training does not end for want of a log: where it cannot be written, that is said once."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.told:
            self.told = True
            _say(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still in its buffer
            super().close()


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


def _within(key: str, keys: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or part of one."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def _write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(
            f"{path} could not be written ({error.strerror}); put that right and run the same "
            "command again"
        ) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _primary() -> bool:
    return jax.process_index() == 0
