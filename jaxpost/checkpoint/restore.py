"""From a folder back to a state: the newest sound checkpoint, or one that is named."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpost.checkpoint import choose, disk, layout, settings, tree

log = logging.getLogger(__name__)


class Restored(NamedTuple):
    """What a checkpoint held.

    Attributes:
      step: updates done.
      state: the state, bit for bit, on the shardings asked for.
      positions: data position and counters of every process that took part in the save.
      config: the resolved configuration of the run that saved it.
      metrics: the metrics given to `save`.
    """

    step: int
    state: Any
    positions: tuple[dict[str, Any], ...]
    config: dict[str, Any]
    metrics: dict[str, float]

    @property
    def position(self) -> dict[str, Any]:
        """This process's own data position.

        Raises:
          CheckpointError: another number of processes saved it, so positions do not carry over.
        """
        count = jax.process_count()
        if len(self.positions) != count:
            raise settings.CheckpointError(
                f"checkpoint step {self.step} was saved by {len(self.positions)} processes and "
                f"this run has {count}; data positions do not carry over: use as many processes"
            )
        return self.positions[jax.process_index()]


def newest_sound(folder: Path, strict: bool) -> int | None:
    """The newest step whose digests hold; damaged ones are renamed out of the way."""
    reasons = []
    for step in reversed(layout.list_steps(folder)):
        path = folder / layout.step_name(step)
        reason = layout.damage(path)
        if reason is None:
            return step
        if strict:
            raise settings.CheckpointError(
                f"checkpoint step {step} is damaged: {reason} ({path}). Run with "
                "checkpoint.strict=false to go on from the one before"
            )
        aside = _set_aside(path)
        reasons.append(f"step {step}: {reason}")
        log.warning(
            "checkpoint step %d is damaged: %s. It was set aside as %s; trying the one before",
            step,
            reason,
            aside,
        )
    aside = sorted(path.name for path in folder.glob("bad.*"))
    if not reasons and not aside:
        return None
    why = "; ".join(reasons) or "set aside by an earlier start"
    raise settings.CheckpointError(
        f"every checkpoint in {folder} is damaged ({why}); set aside: {', '.join(aside)}. "
        f"To start afresh from step 0, move that folder away (mv {folder} "
        f"{folder}.damaged) and run the same command, or choose another run folder"
    )


def load_params(
    folder: str | os.PathLike[str], abstract_params: Any, *, field: str = "params"
) -> Any:
    """Only one field of the saved state (`params`, or `ema`), digests checked, nothing changed.

    `folder` is what `find_checkpoint` returns; `abstract_params` as in `Checkpointer.restore`.

    Raises:
      CheckpointError: the checkpoint is damaged, or holds other arrays under that field.
    """
    path = choose.find_checkpoint(folder)
    reason = layout.damage(path)
    if reason is not None:
        others = [
            step for step in layout.list_steps(path.parent) if layout.step_name(step) != path.name
        ]
        raise settings.CheckpointError(
            f"{path} is damaged: {reason}. Other steps there: {others or 'none'}"
        )
    return tree.read_arrays(path, {field: abstract_params}, partial=True)[field]


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The resolved configuration of the run that wrote the checkpoint."""
    return disk.read_json(choose.find_checkpoint(folder) / "config.json")


def load(path: Path, abstract_state: Any) -> Restored:
    manifest = disk.read_json(path / layout.MANIFEST)
    layout.note_changes(manifest)
    return Restored(
        step=manifest["step"],
        state=tree.read_arrays(path, abstract_state),
        positions=tuple(
            disk.read_json(path / f"position.{process}.json")
            for process in range(manifest["processes"])
        ),
        config=disk.read_json(path / "config.json"),
        metrics=manifest["metrics"],
    )


def agree(decide: Callable[[], int | None]) -> int | None:
    """What process 0 decides, on all processes; its error on all of them too."""
    if jax.process_count() == 1:
        return decide()
    none, failed = -1, -2
    choice, error = none, None
    if jax.process_index() == 0:
        try:
            step = decide()
            choice = none if step is None else step
        except settings.CheckpointError as caught:
            choice, error = failed, caught
    choice = int(multihost_utils.broadcast_one_to_all(np.int32(choice)))
    if error is not None:
        raise error
    if choice == failed:
        raise settings.CheckpointError("process 0 found no usable checkpoint; its message says why")
    return None if choice == none else choice


def _set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to a name that no restore looks at."""
    aside, count = path.with_name(f"bad.{path.name}"), 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"bad.{path.name}.{count}")
    path.rename(aside)
    return aside
