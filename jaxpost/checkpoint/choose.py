"""Which checkpoints stay, and which one is meant by latest, best or a step."""

import logging
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from jaxpost.checkpoint import disk, layout, settings

log = logging.getLogger(__name__)


def prune(folder: Path, config: settings.CheckpointConfig) -> None:
    """Delete what is neither among the newest nor among the best."""
    scored = [
        (step, _metric(folder / layout.step_name(step))) for step in layout.list_steps(folder)
    ]
    kept = to_keep(scored, config)
    for step, _ in scored:
        if step in kept:
            continue
        # Renamed first: what a kill leaves half-deleted must not look like a checkpoint.
        doomed = folder / f"tmp.pruned.{layout.step_name(step)}"
        try:
            (folder / layout.step_name(step)).rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            log.warning("could not delete the old checkpoint step %d: %s", step, error)


def find_checkpoint(folder: str | os.PathLike[str], which: str | int = "latest") -> Path:
    """The folder of one checkpoint of a run.

    `folder` is a run's folder, its `checkpoints` folder, or already a checkpoint; `which` is
    "latest", "best" (by the run's `checkpoint.metric`; the latest of equals) or a step.

    Raises:
      CheckpointError: there is no such checkpoint; the message lists those there are.
    """
    folder = disk.local(folder)
    if (folder / layout.MARKER).is_file():
        return folder
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    steps = layout.list_steps(root)
    if not steps:
        raise settings.CheckpointError(f"{folder} holds no checkpoint; give a run's folder")
    if which == "best":
        return root / layout.step_name(_best(root, steps))
    step = steps[-1] if which == "latest" else int(which)
    if step not in steps:
        raise settings.CheckpointError(f"{root} has no step {step}; it has {steps}")
    return root / layout.step_name(step)


def to_keep(
    scored: Iterable[tuple[int, float | None]], config: settings.CheckpointConfig
) -> set[int]:
    """Which of the (step, metric) stay: the newest and the best; of equals, the latest."""
    scored = sorted(scored)
    newest = {step for step, _ in scored[-config.keep_last :]}
    return newest | set(_ranked(scored, config.mode)[: config.keep_best])


def _metric(path: Path) -> float | None:
    """The finite value of the metric that ranks this checkpoint, if it has one."""
    try:
        manifest = disk.read_json(path / layout.MANIFEST)
        value = manifest["metrics"].get(manifest["best_by"]["metric"])
    except (OSError, ValueError, KeyError):
        return None  # damaged: restore will say so
    return value if value is not None and math.isfinite(value) else None


def _best(root: Path, steps: list[int]) -> int:
    """The best step by the metric that the newest checkpoint names."""
    newest = root / layout.step_name(steps[-1])
    try:
        best_by = disk.read_json(newest / layout.MANIFEST)["best_by"]
    except (OSError, ValueError, KeyError) as error:
        raise settings.CheckpointError(
            f"{newest} is damaged: {layout.damage(newest)}; name a step"
        ) from error
    scored = [(step, _metric(root / layout.step_name(step))) for step in steps]
    ranked = _ranked(scored, best_by["mode"])
    if not ranked:
        raise settings.CheckpointError(
            f"no checkpoint in {root} has the metric {best_by['metric']}; use the latest instead"
        )
    return ranked[0]


def _ranked(scored: Iterable[tuple[int, float | None]], mode: str) -> list[int]:
    """Steps that have the metric, best first; of equals, the latest first."""
    sign = 1 if mode == "min" else -1
    return [s for _, _, s in sorted((sign * v, -step, step) for step, v in scored if v is not None)]
