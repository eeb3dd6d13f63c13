"""From a folder's tensors to parameters: checked first, then streamed into their final arrays."""

import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import models
from jaxpost.hub import tensors
from jaxpost.hub.tensors import Stored
from jaxpost.models.model import TransformerConfig
from jaxpost.typing import Array, Params

BLOCK_BYTES = 1 << 22  # a matrix without layers is read in blocks of rows of about this size
HARMLESS = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry and nobody reads
HEAD = "lm_head.weight"


def read_params(
    folder: pathlib.Path,
    hf: Mapping[str, Any],
    config: TransformerConfig,
    dtype: np.dtype[Any] | None,
) -> Params:
    """The parameters in a folder, checked against the architecture before any of them is read."""
    shapes = jax.eval_shape(models.make_model(config).init, jax.random.key(0))
    stored = tensors.stored_tensors(folder)
    templates = models.names_from_hf(hf, config)
    wanted = {
        path: [template.format(layer) for layer in range(layers_of(path, config))]
        for path, template in templates.items()
    }
    check_names(folder, stored, [name for names in wanted.values() for name in names])
    for path, names in wanted.items():
        for name in names:
            check_shape(stored[name], stored_shape(path, leaf(shapes, path).shape))
    if config.tied_embeddings and HEAD in stored:
        check_tied(stored[HEAD], stored[templates["embedding"]])
    params: dict[str, Any] = {}
    for path, names in wanted.items():
        put(params, path, streamed(path, [stored[name] for name in names], dtype))
    return params


def layers_of(path: str, config: TransformerConfig) -> int:
    return config.layers if path.startswith("layers/") else 1


def stored_shape(path: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape Hugging Face stores a parameter in (of one layer, kernels transposed)."""
    one = tuple(shape[1:] if path.startswith("layers/") else shape)
    return one[::-1] if path.endswith("kernel") else one


def leaf(tree: Mapping[str, Any], path: str) -> Any:
    return functools.reduce(lambda node, key: node[key], path.split("/"), tree)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split("/")
    functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[last] = value


def check_names(folder: pathlib.Path, stored: Mapping[str, Stored], wanted: Sequence[str]) -> None:
    """Refuses a folder that lacks a tensor of the architecture, or has one it has no use for."""
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise ValueError(f"{folder}: lacks {listed(missing)}, which its config.json asks for")
    known = {*wanted, HEAD}  # a tied head may be stored as well: check_tied compares it
    extra = [name for name in stored if name not in known and not name.endswith(HARMLESS)]
    if extra:
        raise ValueError(
            f"{stored[extra[0]].file}: holds {listed(extra)}, which the model that config.json "
            f"describes does not have"
        )


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(names[:3])}{more}"


def check_shape(tensor: Stored, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, but config.json "
            f"asks for {list(shape)}"
        )


def check_tied(head: Stored, embedding: Stored) -> None:
    """A tied head may be stored too, if it is the embedding."""
    same = head.shape == embedding.shape and all(
        np.array_equal(rows, other)
        for (_, rows), (_, other) in zip(blocks(head), blocks(embedding), strict=True)
    )
    if not same:
        raise ValueError(
            f"{head.file}: tensor {head.name} differs from {embedding.name}, but config.json says "
            f"tie_word_embeddings = true; set it to false to use both"
        )


def streamed(path: str, parts: Sequence[Stored], dtype: np.dtype[Any] | None) -> Array:
    """One parameter, filled piece by piece on the device: host memory holds one piece at a time.

    A parameter of the layers is stacked from one tensor a layer; kernels are transposed. `dtype`
    None takes the widest type among the parts.
    """
    target = dtype or np.dtype(functools.reduce(jnp.promote_types, [p.dtype for p in parts]))
    if path.startswith("layers/"):
        shape = (len(parts), *stored_shape(path, (0, *parts[0].shape)))
        pieces = ((i, one_layer(path, part)) for i, part in enumerate(parts))
    else:
        shape, pieces = parts[0].shape, blocks(parts[0])
    # XLA's CPU backend updates bfloat16 through float32, rewriting the whole array for each piece;
    # so there the bits are placed, as integers, and get their type at the end without a copy.
    bits = np.dtype(np.uint16) if on_cpu_in_bfloat16(target) else target
    result = jnp.zeros(shape, bits)
    for start, piece in pieces:
        result = place(result, np.ascontiguousarray(piece, dtype=target).view(bits), start)
    return result if bits == target else jax.device_put(np.asarray(result).view(target))


def on_cpu_in_bfloat16(dtype: np.dtype[Any]) -> bool:
    return dtype == jnp.bfloat16 and jax.default_backend() == "cpu"


def one_layer(path: str, part: Stored) -> np.ndarray:
    array = part.read()
    return (array.T if path.endswith("kernel") else array)[None]


def blocks(tensor: Stored) -> Iterator[tuple[int, np.ndarray]]:
    """Blocks of rows with their first row's number; all of one size, so the last may overlap."""
    rows = tensor.shape[0]
    row_bytes = tensor.dtype.itemsize * int(np.prod(tensor.shape[1:]))
    size = min(rows, max(1, BLOCK_BYTES // max(1, row_bytes)))
    for start in itertools.chain(range(0, rows - size, size), [rows - size]):
        yield start, tensor.read(start, start + size)


@functools.partial(jax.jit, donate_argnums=0)
def place(whole: Array, piece: Array, start: int) -> Array:
    """Writes a piece into `whole` along the first axis, in its own memory."""
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, 0)
