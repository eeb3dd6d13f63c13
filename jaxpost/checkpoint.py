"""Checkpoints: one save, one restore, and a commit protocol that survives being killed anywhere.

A checkpoint is a folder `step_00000020` holding `state/` (Orbax), `position.<process>.json` (data
position and counters, one a process), `config.json`, `manifest.json` (sha256 and size of each file;
name, shape and type of each array) and `COMMITTED` (sha256 of the manifest). All of it is written
in `tmp.step_…`, flushed to disk and renamed, in this order, so that a folder named `step_…` is
complete; only then are older ones pruned. Orbax does not notice a flipped bit, hence the manifest.

Restoring lists the folders (nothing remembers a "latest"), checks every digest, sets a damaged one
aside as `bad.step_…` (nothing is ever deleted) and walks back to the one before, saying so.

Several processes share one folder, on a file system that all of them see.
"""

import concurrent.futures
import dataclasses
import datetime
import errno
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxpost.options import check_ranges, option

log = logging.getLogger(__name__)

MARKER = "COMMITTED"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d{8,})")
_PACKAGES = ("jaxpost", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = option(
        100, "save after this many updates; 0 saves only at the end", "updates", least=0
    )
    keep_last: int = option(2, "how many of the newest checkpoints to keep", least=1)
    keep_best: int = option(0, "how many of the best by `metric` to keep besides", least=0)
    metric: str = option("eval/loss", "the metric that says which checkpoint is best")
    mode: Literal["min", "max"] = option("min", "whether the best metric is the lowest or highest")
    strict: bool = option(False, "stop at a damaged checkpoint instead of falling back to an older")

    def __post_init__(self):
        check_ranges(self, "checkpoint.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"checkpoint.mode is {self.mode!r}; use 'min' or 'max'")


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
            raise CheckpointError(
                f"checkpoint step {self.step} was saved by {len(self.positions)} processes and "
                f"this run has {count}; data positions do not carry over: use as many processes"
            )
        return self.positions[jax.process_index()]


class Checkpointer:
    """Saves in the background, restores, prunes. Use it as a context manager, or `close` it.

    A failed save raises at the next `check`, `save`, `wait` or `close`, whichever comes first, and
    leaves no partial folder. Every process calls every method.
    """

    def __init__(self, folder: str | os.PathLike[str], config: CheckpointConfig | None = None):
        self.folder = _local(folder)
        self.config = config or CheckpointConfig()
        self._orbax = ocp.AsyncCheckpointer(_handler())
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
        if (self.folder / _name(step)).exists():
            return
        arrays = _leaves(state)
        self._preflight(step, arrays)
        self._attempts += 1
        partial = self.folder / f"tmp.{_name(step)}.{self._attempts}"
        manifest = self._describe(step, arrays, metrics or {})
        try:
            if _primary():
                self._clear_partial(but=partial.name)
            partial.mkdir(parents=True, exist_ok=True)
            # Orbax's barriers order these writes of all processes before the commit of process 0.
            _write_json(partial / f"position.{jax.process_index()}.json", position)
            if _primary():
                _write_json(partial / "config.json", config)
            self._orbax.save(partial / "state", args=ocp.args.PyTreeSave(_nested(arrays)))
        except Exception as error:
            self._fail(step, partial, error)
        self._pending = self._pool.submit(self._commit, step, partial, manifest)

    def restore(self, abstract_state: Any) -> Restored | None:
        """The newest undamaged checkpoint, or None where nothing was ever saved.

        `abstract_state` is a state, or the same tree of `jax.ShapeDtypeStruct` with shardings.

        Raises:
          CheckpointError: every checkpoint is damaged (never a silent start from step 0), or the
            arrays have other names, shapes or types than `abstract_state`.
        """
        self.wait()
        step = _agree(self._newest_sound)
        return None if step is None else _load(self.folder / _name(step), abstract_state)

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
        except CheckpointError as failure:
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

    def _preflight(self, step: int, arrays: Mapping[tuple[str, ...], Any]) -> None:
        if not _primary() or not self.folder.exists():
            return
        free, need = shutil.disk_usage(self.folder).free, _bytes(arrays)
        if free < need:
            log.warning(
                "checkpoint step %d needs %s and %s has %s free",
                step,
                _size(need),
                self.folder,
                _size(free),
            )

    def _describe(
        self, step: int, arrays: Mapping[tuple[str, ...], Any], metrics: Mapping[str, float]
    ) -> dict[str, Any]:
        """The manifest, but for the files."""
        if self.config.keep_best and self.config.metric not in metrics and not self._told:
            self._told = True
            log.warning(
                "checkpoint.metric=%s is not among the metrics of step %d (%s), so that checkpoint "
                "cannot be kept as a best one",
                self.config.metric,
                step,
                ", ".join(sorted(metrics)) or "none",
            )
        return {
            "format": 1,
            "step": step,
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "processes": jax.process_count(),
            "made_by": _made_by(),
            "best_by": {"metric": self.config.metric, "mode": self.config.mode},
            "metrics": {name: float(value) for name, value in metrics.items()},
            "bytes": _bytes(arrays),
            "leaves": {"/".join(path): _shape_and_type(leaf) for path, leaf in arrays.items()},
        }

    def _commit(self, step: int, partial: Path, manifest: dict[str, Any]) -> None:
        """Runs in the background: finish the write, digest, mark, rename, prune."""
        start = time.monotonic()
        try:
            self._orbax.wait_until_finished()
            if not _primary():
                return
            manifest["files"] = _digests(partial, _files(partial))
            _write_json(partial / MANIFEST, manifest)
            (partial / MARKER).write_bytes(_marker(partial))
            for path in (MANIFEST, MARKER, *_folders(partial)):
                _flush(partial / path)
            partial.rename(self.folder / _name(step))
            _flush(self.folder)
            log.info(
                "saved checkpoint step %d (%s in %.1f s)",
                step,
                _size(manifest["bytes"]),
                time.monotonic() - start,
            )
        except Exception as error:
            self._fail(step, partial, error)
        self._prune()

    def _fail(self, step: int, partial: Path, error: Exception) -> NoReturn:
        """Leave no partial folder, and raise one line that says what happened and what remains."""
        if _primary():
            shutil.rmtree(partial, ignore_errors=True)
        kept = list_steps(self.folder)
        kept_text = f"the newest saved is step {kept[-1]}" if kept else "none is saved yet"
        if _disk_full(error):
            free = shutil.disk_usage(self.folder).free
            reason = f"the disk is full ({_size(free)} free)"
            remedy = "free some space and run the same command again"
        else:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            remedy = "put that right and run the same command again"
        raise CheckpointError(
            f"checkpoint step {step} could not be written to {self.folder}: {reason}; "
            f"{kept_text}. To go on, {remedy}"
        ) from error

    def _prune(self) -> None:
        """Delete what is neither among the newest nor among the best."""
        scored = [(step, _metric(self.folder / _name(step))) for step in list_steps(self.folder)]
        kept = to_keep(scored, self.config)
        for step, _ in scored:
            if step in kept:
                continue
            # Renamed first: what a kill leaves half-deleted must not look like a checkpoint.
            doomed = self.folder / f"tmp.pruned.{_name(step)}"
            try:
                (self.folder / _name(step)).rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                log.warning("could not delete the old checkpoint step %d: %s", step, error)

    def _clear_partial(self, but: str = "") -> None:
        """Remove what saves that never finished, or prunings, left behind."""
        for path in self.folder.glob("tmp.*"):
            if path.name != but:
                shutil.rmtree(path, ignore_errors=True)

    def _newest_sound(self) -> int | None:
        """The newest step whose digests hold; damaged ones are renamed out of the way."""
        reasons = []
        for step in reversed(list_steps(self.folder)):
            path = self.folder / _name(step)
            reason = damage(path)
            if reason is None:
                return step
            if self.config.strict:
                raise CheckpointError(
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
        aside = sorted(path.name for path in self.folder.glob("bad.*"))
        if not reasons and not aside:
            return None
        why = "; ".join(reasons) or "set aside by an earlier start"
        raise CheckpointError(
            f"every checkpoint in {self.folder} is damaged ({why}); set aside: {', '.join(aside)}. "
            f"To start afresh from step 0, move that folder away (mv {self.folder} "
            f"{self.folder}.damaged) and run the same command, or choose another run folder"
        )


def list_steps(folder: str | os.PathLike[str]) -> list[int]:
    """Steps of the checkpoints in the folder, rising; read from the disk each time."""
    names = (_STEP.fullmatch(path.name) for path in Path(folder).glob("step_*"))
    return sorted(int(match.group(1)) for match in names if match)


def find_checkpoint(folder: str | os.PathLike[str], which: str | int = "latest") -> Path:
    """The folder of one checkpoint of a run.

    `folder` is a run's folder, its `checkpoints` folder, or already a checkpoint; `which` is
    "latest", "best" (by the run's `checkpoint.metric`; the latest of equals) or a step.

    Raises:
      CheckpointError: there is no such checkpoint; the message lists those there are.
    """
    folder = _local(folder)
    if (folder / MARKER).is_file():
        return folder
    root = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    steps = list_steps(root)
    if not steps:
        raise CheckpointError(f"{folder} holds no checkpoint; give a run's folder")
    if which == "best":
        return root / _name(_best(root, steps))
    step = steps[-1] if which == "latest" else int(which)
    if step not in steps:
        raise CheckpointError(f"{root} has no step {step}; it has {steps}")
    return root / _name(step)


def load_params(
    folder: str | os.PathLike[str], abstract_params: Any, *, field: str = "params"
) -> Any:
    """Only one field of the saved state (`params`, or `ema`), digests checked, nothing changed.

    `folder` is what `find_checkpoint` returns; `abstract_params` as in `Checkpointer.restore`.

    Raises:
      CheckpointError: the checkpoint is damaged, or holds other arrays under that field.
    """
    path = find_checkpoint(folder)
    reason = damage(path)
    if reason is not None:
        others = [step for step in list_steps(path.parent) if _name(step) != path.name]
        raise CheckpointError(f"{path} is damaged: {reason}. Other steps there: {others or 'none'}")
    return _read_arrays(path, {field: abstract_params}, partial=True)[field]


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The resolved configuration of the run that wrote the checkpoint."""
    return _read_json(find_checkpoint(folder) / "config.json")


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words, or None when every digest holds."""
    try:
        if not (path / MARKER).exists():
            return f"it has no {MARKER} file, so its save never finished"
        if not (path / MANIFEST).exists():
            return f"{MANIFEST} is missing"
        if (path / MARKER).read_bytes() != _marker(path):
            return f"{MANIFEST} and {MARKER} do not agree"
        manifest = _read_json(path / MANIFEST)
        if _name(manifest["step"]) != path.name:
            return f"its manifest is that of step {manifest['step']}"
        return _file_damage(path, manifest["files"])
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"


def to_keep(scored: Iterable[tuple[int, float | None]], config: CheckpointConfig) -> set[int]:
    """Which of the (step, metric) stay: the newest and the best; of equals, the latest."""
    scored = sorted(scored)
    newest = {step for step, _ in scored[-config.keep_last :]}
    return newest | set(_ranked(scored, config.mode)[: config.keep_best])


def _load(path: Path, abstract_state: Any) -> Restored:
    manifest = _read_json(path / MANIFEST)
    _note_changes(manifest)
    return Restored(
        step=manifest["step"],
        state=_read_arrays(path, abstract_state),
        positions=tuple(
            _read_json(path / f"position.{process}.json")
            for process in range(manifest["processes"])
        ),
        config=_read_json(path / "config.json"),
        metrics=manifest["metrics"],
    )


def _read_arrays(path: Path, abstract: Any, *, partial: bool = False) -> Any:
    """The arrays of the checkpoint in the structure and on the shardings of `abstract`."""
    wanted = {name: _abstract(leaf) for name, leaf in _leaves(abstract).items()}
    _check_fit(path, wanted, partial=partial)
    item = _nested(wanted)
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=partial,
    )
    with ocp.Checkpointer(_handler()) as reader:
        arrays = _leaves(reader.restore(path / "state", args=arguments))
    leaves = [arrays[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _check_fit(path: Path, wanted: Mapping[tuple[str, ...], Any], *, partial: bool) -> None:
    """Names, shapes and types must be those of the checkpoint: Orbax would cast in silence."""
    held = _read_json(path / MANIFEST)["leaves"]
    asked = {"/".join(name): _shape_and_type(leaf) for name, leaf in wanted.items()}
    wrong = [f"{name} is not in it" for name in asked if name not in held]
    wrong += [
        f"{name} is {_said(held[name])} there and {_said(asked[name])} here"
        for name in asked
        if name in held and held[name] != asked[name]
    ]
    if not partial:
        wrong += [f"{name} is only there" for name in held if name not in asked]
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"{path} does not fit this configuration: {'; '.join(wrong[:5])}{more}. Use the "
            "configuration it was saved with, or another run folder"
        )


def _note_changes(manifest: Mapping[str, Any]) -> None:
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


def _agree(decide: Callable[[], int | None]) -> int | None:
    """What process 0 decides, on all processes; its error on all of them too."""
    if jax.process_count() == 1:
        return decide()
    none, failed = -1, -2
    choice, error = none, None
    if _primary():
        try:
            step = decide()
            choice = none if step is None else step
        except CheckpointError as caught:
            choice, error = failed, caught
    choice = int(multihost_utils.broadcast_one_to_all(np.int32(choice)))
    if error is not None:
        raise error
    if choice == failed:
        raise CheckpointError("process 0 found no usable checkpoint; its message says why")
    return None if choice == none else choice


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Weights hardly compress (8 %), and compressing made a save four times as long.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    """Path → leaf. NamedTuples go by field, sequences by index; empty nodes vanish."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in flat
    }


def _nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """Plain nested dicts, which any Orbax reader understands without our classes."""
    root: dict[str, Any] = {}
    for (*parents, last), leaf in leaves.items():
        node = root
        for name in parents:
            node = node.setdefault(name, {})
        # A NumPy array is copied: the caller may change it while it is being written.
        node[last] = np.array(leaf) if isinstance(leaf, np.ndarray | int | float) else leaf
    return root


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else None
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shape, dtype = _shape(leaf)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _shape(leaf: Any) -> tuple[tuple[int, ...], Any]:
    if isinstance(leaf, int | float):
        leaf = np.asarray(leaf)
    return tuple(leaf.shape), leaf.dtype


def _shape_and_type(leaf: Any) -> list[Any]:
    shape, dtype = _shape(leaf)
    return [list(shape), np.dtype(dtype).name]


def _said(leaf: list[Any]) -> str:
    return f"{leaf[1]}{leaf[0]}"


def _bytes(arrays: Mapping[tuple[str, ...], Any]) -> int:
    shapes = (_shape(leaf) for leaf in arrays.values())
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)


def _files(folder: Path) -> list[str]:
    """All files under the folder, relative; dot files are the file system's own business."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def _folders(folder: Path) -> list[str]:
    """All folders under the folder, deepest first, itself last."""
    inner = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
    return [*sorted(inner, key=lambda path: -path.count("/")), "."]


def _digests(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of each file, after flushing it to disk; in parallel (the GIL is let go)."""

    def digest(name: str) -> tuple[str, dict[str, Any]]:
        _flush(folder / name)
        return name, {"size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}

    with concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
        return dict(pool.map(digest, names))


def _file_damage(folder: Path, expected: Mapping[str, Mapping[str, Any]]) -> str | None:
    found = set(_files(folder)) - {MANIFEST, MARKER}
    for name in sorted(set(expected) - found):
        return f"{name} is missing"
    for name in sorted(found - set(expected)):
        return f"{name} is not in its manifest"
    for name, entry in expected.items():
        size = (folder / name).stat().st_size
        if size != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
    with concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
        digests = pool.map(lambda name: _sha256(folder / name), expected)
        for (name, entry), digest in zip(expected.items(), digests, strict=True):
            if digest != entry["sha256"]:
                return f"the content of {name} has changed (its sha256 differs)"
    return None


def _threads() -> int:
    return min(8, os.cpu_count() or 1)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _marker(folder: Path) -> bytes:
    return f"{_sha256(folder / MANIFEST)}\n".encode()


def _set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to a name that no restore looks at."""
    aside, count = path.with_name(f"bad.{path.name}"), 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"bad.{path.name}.{count}")
    path.rename(aside)
    return aside


def _metric(path: Path) -> float | None:
    """The finite value of the metric that ranks this checkpoint, if it has one."""
    try:
        manifest = _read_json(path / MANIFEST)
        value = manifest["metrics"].get(manifest["best_by"]["metric"])
    except (OSError, ValueError, KeyError):
        return None  # damaged: restore will say so
    return value if value is not None and math.isfinite(value) else None


def _best(root: Path, steps: list[int]) -> int:
    """The best step by the metric that the newest checkpoint names."""
    newest = root / _name(steps[-1])
    try:
        best_by = _read_json(newest / MANIFEST)["best_by"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{newest} is damaged: {damage(newest)}; name a step") from error
    scored = [(step, _metric(root / _name(step))) for step in steps]
    ranked = _ranked(scored, best_by["mode"])
    if not ranked:
        raise CheckpointError(
            f"no checkpoint in {root} has the metric {best_by['metric']}; use the latest instead"
        )
    return ranked[0]


def _ranked(scored: Iterable[tuple[int, float | None]], mode: str) -> list[int]:
    """Steps that have the metric, best first; of equals, the latest first."""
    sign = 1 if mode == "min" else -1
    return [s for _, _, s in sorted((sign * v, -step, step) for step, v in scored if v is not None)]


def _made_by() -> dict[str, str]:
    installed = {}
    for package in _PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    return {**installed, "devices": f"{len(devices)} x {devices[0].device_kind}"}


def _disk_full(error: BaseException) -> bool:
    """ENOSPC, or quota, as Python or TensorStore say it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "No space left on device"))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(content, indent=1)
    except TypeError as error:
        raise TypeError(f"{path.name} must hold plain JSON values: {error}") from error
    path.write_text(text + "\n", encoding="utf-8")
    _flush(path)


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _local(folder: str | os.PathLike[str]) -> Path:
    if "://" in str(folder):
        raise CheckpointError(
            f"{folder}: checkpoints need a file system with atomic renames; mount the bucket "
            "(gcsfuse, s3fs) or use a local folder"
        )
    return Path(folder).absolute()


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _primary() -> bool:
    return jax.process_index() == 0
