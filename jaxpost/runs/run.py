"""A folder that a job holds, from opening to the end."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import yaml
from jax.experimental import multihost_utils

from jaxpost.runs import changes, disk, lock, logs, records, signals

log = logging.getLogger(__name__)

EXIT_PREEMPTED = 75  # EX_TEMPFAIL: stopped on request, state saved, run again to go on


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
      changed: what differs from the last job's configuration.
    """

    folder: Path
    steps: int
    finished: bool = False
    stopped: signal.Signals | None = None
    changed: list[changes.Change] = dataclasses.field(default_factory=list)
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

    def ask_to_stop(self, number: signal.Signals) -> bool:
        """Stop at the end of the update; returns whether nobody had asked before."""
        first = self.stopped is None
        if first:
            self.stopped = number
        return first

    def resume(self, step: int) -> None:
        """Start from `step` (0: afresh): write the configuration, cut the records that come after.

        Call it once state and data position are restored: what fails before changes nothing.

        Raises:
          RunError: the run was finished once, and there is no checkpoint of it any more; or
            training has gone on past the steps that it now has.
        """
        if step > self.steps:
            raise disk.RunError(
                f"{self.folder} has been trained to step {step}, and steps is {self.steps} now; "
                f"set steps={step} or more, or choose another run folder"
            )
        done = _finished_step(self.folder)
        if step == 0 and done > 0:
            raise disk.RunError(
                f"{self.folder} was finished at step {done}, but it holds no checkpoint to go on "
                "from; put them back, or choose another run folder"
            )
        if _primary():
            disk.write(self.folder / "config.yaml", self._config)
            records.cut_after(self.folder, step)
        if step:
            log.info("resuming from step %d of %d", step, self.steps)

    def finish(self, step: int) -> None:
        """The run got to its end: running it again does nothing."""
        self._done = step
        if _primary():
            disk.write(self.folder / "finished.json", json.dumps({"step": step}) + "\n")
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
        raise disk.RunError("run is empty; name the folder of the run")
    text = yaml.safe_dump(changes.plain(config), sort_keys=False)
    run = Run(Path(folder).absolute(), steps, _config=text)
    try:
        with _on_primary_first():
            if _primary():
                _take(run, config, resume_anyway)
        if not _primary():
            run.finished = _finished_step(run.folder) >= steps
        if not run.finished:
            run._undo.enter_context(signals.owned(run.ask_to_stop))
    except BaseException:
        run.close()
        raise
    return run


def is_finished(folder: str | os.PathLike[str], steps: int) -> bool:
    """Whether a job got to the end of so many updates in a folder; nothing is opened.

    Raises:
      RunError: its `finished.json` cannot be read.
    """
    return _finished_step(Path(folder)) >= steps


def _take(run: Run, config: Mapping[str, Any], resume_anyway: bool) -> None:
    """What process 0 does on opening; nothing is written before every check has passed."""
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk.RunError(f"run: {run.folder} cannot be a folder ({error.strerror})") from error
    _refuse_folders(run.folder)
    run._undo.enter_context(lock.held(run.folder / "lock.json"))
    run.changed = changes.check(run.folder, config, resume_anyway)
    done = _finished_step(run.folder)
    run.finished = done >= run.steps
    if run.finished:
        logs.say(
            f"{run.folder} is finished (step {done} of {run.steps}); nothing to do. "
            "Raise steps to train on, or choose another run folder to train anew"
        )
        return
    run._undo.enter_context(logs.logging_to(run.folder / "log.txt"))
    log.info("run %s, process %d on %s", run.folder, os.getpid(), socket.gethostname())
    for change in run.changed:
        log.info("changed since the last job: %s", change)


def _refuse_folders(folder: Path) -> None:
    for name in ("lock.json", "config.yaml", "finished.json", "log.txt", *records.RECORDS):
        if (folder / name).is_dir():
            raise disk.RunError(
                f"run: {folder / name} is a folder, and a run keeps a file of that name; move it "
                "away, or choose another run folder"
            )


def _finished_step(folder: Path) -> int:
    """The last step of a job that got to its end, or -1."""
    path = folder / "finished.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["step"])
    except FileNotFoundError:
        return -1
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise disk.RunError(
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
        raise disk.RunError("process 0 could not open the run; its message says why")


def _primary() -> bool:
    return jax.process_index() == 0
