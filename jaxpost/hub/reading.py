"""From a folder's tensors to parameters: checked first, then streamed into their final arrays."""

import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    return params_of(folder, tensors.stored_tensors(folder), hf, config, dtype)


def params_of(
    folder: pathlib.Path,
    stored: Mapping[str, Stored],
    hf: Mapping[str, Any],
    config: TransformerConfig,
    dtype: np.dtype[Any] | None,
) -> Params:
    """The parameters among tensors that were found; all of them must belong to the architecture."""
    found = {name: Found(tensor.file, tensor.shape) for name, tensor in stored.items()}
    check(folder, found, expected_shapes(hf, config))
    names = names_of(hf, config)
    if config.tied_embeddings and HEAD in stored:
        check_tied(stored[HEAD], stored[names["embedding"][0]])
    params: dict[str, Any] = {}
    for path, parts in names.items():
        put(params, path, streamed(path, [stored[name] for name in parts], dtype))
    return params


def names_of(hf: Mapping[str, Any], config: TransformerConfig) -> dict[str, list[str]]:
    """For each parameter, the tensors it is read from: one, or one for each layer."""
    return {
        path: [name.format(layer) for layer in range(layers_of(path, config))]
        for path, name in models.names_from_hf(hf, config).items()
    }


def expected_shapes(hf: Mapping[str, Any], config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model folder, with the shapes they are stored in."""
    shapes = jax.eval_shape(models.make_model(config).init, jax.random.key(0))
    return {
        name: stored_shape(path, leaf(shapes, path).shape)
        for path, names in names_of(hf, config).items()
        for name in names
    }


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


class Found(NamedTuple):
    """Where a tensor was found, and its shape."""

    file: pathlib.Path
    shape: tuple[int, ...]


def check(
    where: pathlib.Path, found: Mapping[str, Found], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses tensors that are missing, misshapen, or unknown to the architecture."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise ValueError(f"{where}: lacks {listed(missing)}, which its config asks for")
    known = {*expected, HEAD}  # a tied head may be stored as well: check_tied compares it
    extra = [name for name in found if name not in known and not name.endswith(HARMLESS)]
    if extra:
        raise ValueError(
            f"{found[extra[0]].file}: holds {listed(extra)}, which the model that its config "
            f"describes does not have"
        )
    for name, shape in expected.items():
        check_shape(name, found[name], shape)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"tensor {', '.join(names[:3])}{more}"


def check_shape(name: str, found: Found, shape: tuple[int, ...]) -> None:
    if found.shape != shape:
        raise ValueError(
            f"{found.file}: tensor {name} has shape {list(found.shape)}, but the config asks for "
            f"{list(shape)}"
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
    widest = functools.reduce(jnp.promote_types, [part.dtype for part in parts])
    target = np.dtype(widest if dtype is None else dtype)
    if path.startswith("layers/"):
        shape = (len(parts), *stored_shape(path, (0, *parts[0].shape)))
        pieces = ((part, i, one_layer(path, part)) for i, part in enumerate(parts))
    else:
        shape, pieces = parts[0].shape, ((parts[0], *block) for block in blocks(parts[0]))
    # XLA's CPU backend updates bfloat16 through float32, rewriting the whole array for each piece;
    # so there the bits are placed, as integers, and get their type at the end without a copy.
    bits = np.dtype(np.uint16) if on_cpu_in_bfloat16(target) else target
    result = jnp.zeros(shape, bits)
    for part, start, piece in pieces:
        piece = tensors.finite(as_type(piece, target), part.name, part.file)
        result = place(result, piece.view(bits), start)
    return result if bits == target else jax.device_put(np.asarray(result).view(target))


def as_type(piece: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Contiguous, in a type; what is too large for it becomes infinite, without a warning."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(piece, dtype=dtype)


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
def place(whole: Array, piece: Array | np.ndarray, start: Array | int) -> Array:
    """Writes a piece into `whole` along the first axis, in its own memory."""
    return jax.lax.dynamic_update_slice_in_dim(whole, piece, start, 0)
