"""What makes a folder a checkpoint: name, manifest, marker; and what may be wrong with it."""

import concurrent.futures
import datetime
import importlib.metadata
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpost.checkpoint import disk, settings, tree

log = logging.getLogger(__name__)

MARKER = "COMMITTED"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{8,})")
_PACKAGES = ("jaxpost", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def describe(
    step: int,
    arrays: Mapping[tuple[str, ...], Any],
    metrics: Mapping[str, float],
    config: settings.CheckpointConfig,
) -> dict[str, Any]:
    """The manifest, but for the files."""
    return {
        "format": 1,
        "step": step,
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processes": jax.process_count(),
        "made_by": _made_by(),
        "best_by": {"metric": config.metric, "mode": config.mode},
        "metrics": {name: float(value) for name, value in metrics.items()},
        "bytes": tree.byte_count(arrays),
        "leaves": {"/".join(path): tree.shape_and_type(leaf) for path, leaf in arrays.items()},
    }


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Steps of the checkpoints in the folder, rising; read from the disk each time."""
    names = (_STEP.fullmatch(path.name) for path in Path(folder).glob("step_*"))
    return sorted(int(match.group(1)) for match in names if match)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words, or None when every digest holds."""
    try:
        if not (path / MARKER).exists():
            return f"it has no {MARKER} file, so its save never finished"
        if not (path / MANIFEST).exists():
            return f"{MANIFEST} is missing"
        if (path / MARKER).read_bytes() != marker(path):
            return f"{MANIFEST} and {MARKER} do not agree"
        manifest = disk.read_json(path / MANIFEST)
        if step_name(manifest["step"]) != path.name:
            return f"its manifest is that of step {manifest['step']}"
        return _file_damage(path, manifest["files"])
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"


def note_changes(manifest: Mapping[str, Any]) -> None:
    """Say which versions and devices changed: the same steps may then differ in their last bits."""
    then, now = manifest["made_by"], _made_by()
    changed = [
        f"{key} {then.get(key, 'absent')} -> {now.get(key, 'absent')}"
        for key in sorted({*then, *now})
        if then.get(key) != now.get(key)
    ]
    if changed:
        log.warning(
            "checkpoint step %d was written elsewhere (%s); later steps may differ in their last "
            "bits from those of an uninterrupted run",
            manifest["step"],
            ", ".join(changed),
        )


def _file_damage(folder: Path, expected: Mapping[str, Mapping[str, Any]]) -> str | None:
    found = set(disk.files(folder)) - {MANIFEST, MARKER}
    for name in sorted(set(expected) - found):
        return f"{name} is missing"
    for name in sorted(found - set(expected)):
        return f"{name} is not in its manifest"
    for name, entry in expected.items():
        size = (folder / name).stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
    with concurrent.futures.ThreadPoolExecutor(disk.threads()) as pool:
        digests = pool.map(lambda name: disk.sha256(folder / name), expected)
        for (name, entry), digest in zip(expected.items(), digests, strict=True):
            if digest != entry["sha256"]:
                return f"the content of {name} has changed (its sha256 differs)"
    return None


def marker(folder: Path) -> bytes:
    return f"{disk.sha256(folder / MANIFEST)}\n".encode()


def _made_by() -> dict[str, str]:
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    return {**installed, "devices": f"{len(devices)} x {devices[0].device_kind}"}


def step_name(step: int) -> str:
    return f"step_{step:08d}"
