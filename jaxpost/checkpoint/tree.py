"""The state as arrays with names, to and from Orbax."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxpost.checkpoint import disk, layout, settings


def read_arrays(path: Path, abstract: Any, *, partial: bool = False) -> Any:
    """The arrays of the checkpoint in the structure and on the shardings of `abstract`."""
    wanted = {name: _abstract(leaf) for name, leaf in named_leaves(abstract).items()}
    _check_fit(path, wanted, partial=partial)
    item = nested_dicts(wanted)
    arguments = ocp.args.PyTreeRestore(
        item=item,
        restore_args=ocp.checkpoint_utils.construct_restore_args(item),
        partial_restore=partial,
    )
    with ocp.Checkpointer(orbax_handler()) as reader:
        arrays = named_leaves(reader.restore(path / "state", args=arguments))
    leaves = [arrays[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _check_fit(path: Path, wanted: Mapping[tuple[str, ...], Any], *, partial: bool) -> None:
    """Names, shapes and types must be those of the checkpoint: Orbax would cast in silence."""
    held = disk.read_json(path / layout.MANIFEST)["leaves"]
    asked = {"/".join(name): shape_and_type(leaf) for name, leaf in wanted.items()}
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
        raise settings.CheckpointError(
            f"{path} does not fit this configuration: {'; '.join(wrong[:5])}{more}. Use the "
            "configuration it was saved with, or another run folder"
        )


def orbax_handler() -> ocp.PyTreeCheckpointHandler:
    # Weights hardly compress (8 %), and compressing made a save four times as long.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def named_leaves(tree: Any) -> dict[tuple[str, ...], Any]:
    """Path → leaf. NamedTuples go by field, sequences by index; empty nodes vanish."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in flat
    }


def nested_dicts(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
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


def shape_and_type(leaf: Any) -> list[Any]:
    shape, dtype = _shape(leaf)
    return [list(shape), np.dtype(dtype).name]


def _said(leaf: list[Any]) -> str:
    return f"{leaf[1]}{leaf[0]}"


def byte_count(arrays: Mapping[tuple[str, ...], Any]) -> int:
    shapes = (_shape(leaf) for leaf in arrays.values())
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)
