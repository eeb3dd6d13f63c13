"""The checkpoints of one run: save in the background, restore, prune."""

import concurrent.futures
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp

from jaxpost.checkpoint import choose, disk, layout, restore, settings, tree

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves in the background, restores, prunes. Use it as a context manager, or `close` it.

    A failed save raises at the next `check`, `save`, `wait` or `close`, whichever comes first, and
    leaves no partial folder. Every process calls every method.
    """

    def __init__(
        self, folder: str | os.PathLike[str], config: settings.CheckpointConfig | None = None
    ):
        self.folder = disk.local(folder)
        self.config = config or settings.CheckpointConfig()
        self._orbax = ocp.AsyncCheckpointer(tree.orbax_handler())
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._attempts = 0
        self._told = False
        if _primary():
            self._clear_partial()

    def due(self, step: int) -> bool:
        """Whether the configuration asks for a save after this step."""
        return self.config.every > 0 and step > 0 and step % self.config.every == 0

    def save(
        self,
        step: int,
        state: Any,
        position: Mapping[str, Any],
        config: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Start saving; returns once the state is on the host, so its buffers may be donated.

        Waits for the save before it, if that is still running. A step already saved is left alone.

        Raises:
          CheckpointError: the save before this one failed, or this one could not start.
        """
        self._back_pressure(step)
        if (self.folder / layout.step_name(step)).exists():
            return
        arrays = tree.named_leaves(state)
        if _primary():
            _preflight(self.folder, step, arrays)
        self._attempts += 1
        partial = self.folder / f"tmp.{layout.step_name(step)}.{self._attempts}"
        self._check_metric(step, metrics or {})
        manifest = layout.describe(step, arrays, metrics or {}, self.config)
        try:
            if _primary():
                self._clear_partial(but=partial.name)
            partial.mkdir(parents=True, exist_ok=True)
            # Orbax's barriers order these writes of all processes before the commit of process 0.
            disk.write_json(partial / f"position.{jax.process_index()}.json", position)
            if _primary():
                disk.write_json(partial / "config.json", config)
            self._orbax.save(partial / "state", args=ocp.args.PyTreeSave(tree.nested_dicts(arrays)))
        except Exception as error:
            self._fail(step, partial, error)
        self._pending = self._pool.submit(self._commit, step, partial, manifest)

    def restore(self, abstract_state: Any) -> restore.Restored | None:
        """The newest undamaged checkpoint, or None where nothing was ever saved.

        `abstract_state` is a state, or the same tree of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          CheckpointError: every checkpoint is damaged (never a silent start from step 0), or the
            arrays have other names, shapes or types than `abstract_state`.
        """
        self.wait()
        step = restore.agree(lambda: restore.newest_sound(self.folder, self.config.strict))
        if step is None:
            return None
        return restore.load(self.folder / layout.step_name(step), abstract_state)

    def check(self) -> None:
        """Raise the error of a save that failed in the background; call it once a step."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Return when the last save is committed; raise if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then let go of all threads."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()
            self._orbax.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except settings.CheckpointError as failure:
            if error is None:
                raise
            log.error("%s", failure)  # the error that is on its way says more

    def _back_pressure(self, step: int) -> None:
        start = time.monotonic()
        self.wait()
        waited = time.monotonic() - start
        if waited > 1:
            log.info(
                "step %d waited %.1f s for the save before it: saves come faster (checkpoint.every="
                "%d) than the disk takes them",
                step,
                waited,
                self.config.every,
            )

    def _check_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.config.keep_best and self.config.metric not in metrics and not self._told:
            self._told = True
            log.warning(
                "checkpoint.metric=%s is not among the metrics of step %d (%s), so that checkpoint "
                "cannot be kept as a best one",
                self.config.metric,
                step,
                ", ".join(sorted(metrics)) or "none",
            )

    def _commit(self, step: int, partial: Path, manifest: dict[str, Any]) -> None:
        """Runs in the background: finish the write, digest, mark, rename, prune."""
        start = time.monotonic()
        try:
            self._orbax.wait_until_finished()
            if not _primary():
                return
            manifest["files"] = disk.digests(partial, disk.files(partial))
            disk.write_json(partial / layout.MANIFEST, manifest)
            (partial / layout.MARKER).write_bytes(layout.marker(partial))
            for path in (layout.MANIFEST, layout.MARKER, *disk.folders(partial)):
                disk.flush(partial / path)
            partial.rename(self.folder / layout.step_name(step))
            disk.flush(self.folder)
            log.info(
                "saved checkpoint step %d (%s in %.1f s)",
                step,
                disk.size_text(manifest["bytes"]),
                time.monotonic() - start,
            )
        except Exception as error:
            self._fail(step, partial, error)
        choose.prune(self.folder, self.config)

    def _fail(self, step: int, partial: Path, error: Exception) -> NoReturn:
        """Leave no partial folder, and raise."""
        if _primary():
            shutil.rmtree(partial, ignore_errors=True)
        raise settings.CheckpointError(_failure(self.folder, step, error)) from error

    def _clear_partial(self, but: str = "") -> None:
        """Remove what saves that never finished, or prunings, left behind."""
        for path in self.folder.glob("tmp.*"):
            if path.name != but:
                shutil.rmtree(path, ignore_errors=True)


def _preflight(folder: Path, step: int, arrays: Mapping[tuple[str, ...], Any]) -> None:
    """Warn where the disk has no room for it."""
    if not folder.exists():
        return
    free, need = shutil.disk_usage(folder).free, tree.byte_count(arrays)
    if free < need:
        log.warning(
            "checkpoint step %d needs %s and %s has %s free",
            step,
            disk.size_text(need),
            folder,
            disk.size_text(free),
        )


def _failure(folder: Path, step: int, error: Exception) -> str:
    """One line that says what happened and what remains."""
    kept = layout.list_steps(folder)
    kept_text = f"the newest saved is step {kept[-1]}" if kept else "none is saved yet"
    if disk.disk_full(error):
        free = shutil.disk_usage(folder).free
        reason = f"the disk is full ({disk.size_text(free)} free)"
        remedy = "free some space and run the same command again"
    else:
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        remedy = "put that right and run the same command again"
    return (
        f"checkpoint step {step} could not be written to {folder}: {reason}; "
        f"{kept_text}. To go on, {remedy}"
    )


def _primary() -> bool:
    return jax.process_index() == 0
