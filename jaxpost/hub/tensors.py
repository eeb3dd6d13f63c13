"""Safetensors folders, read tensor by tensor and written shard by shard."""

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxpost.hub import source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class Stored(NamedTuple):
    """One tensor in a safetensors file: its place, shape, and a way to read (rows of) it."""

    name: str
    file: pathlib.Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    view: Any  # safetensors' lazy slice: nothing is read before it is indexed

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start` to `stop` of the first axis, as stored."""
        try:
            return self.view[start:stop]
        except Exception as error:  # safetensors raises a bare Exception subclass
            raise ValueError(f"{self.file}: cannot read tensor {self.name}: {error}") from error


def finite(array: np.ndarray, name: str, file: pathlib.Path) -> np.ndarray:
    """The array itself, if it holds no NaN and no infinity.

    Raises:
      ValueError: it does; the message names the tensor, the file and the type.
    """
    good = np.isfinite(array)
    if not good.all():
        raise ValueError(
            f"{file}: tensor {name} holds {good.size - np.count_nonzero(good)} numbers that are "
            f"NaN or infinite as {array.dtype}; the file is broken, or needs a wider type"
        )
    return array


def stored_tensors(folder: pathlib.Path) -> dict[str, Stored]:
    """The tensors of a model folder by name, sorted; only file headers have been read.

    Raises:
      FileNotFoundError: no safetensors weights, or a shard that the index names is missing.
      ValueError: an incomplete file, or an index that does not agree with the shards.
    """
    where = weight_map(folder)
    files = sorted(set(where.values())) if where else [SINGLE]
    found: dict[str, Stored] = {}
    for name in files:
        path = folder / name
        if not path.is_file():
            lost = next(tensor for tensor, file in where.items() if file == name)
            raise FileNotFoundError(f"{path}: missing, but {INDEX} says it holds {lost} (and more)")
        for tensor in tensors_in(path):
            if where and where.get(tensor.name) != name:
                raise ValueError(
                    f"{path}: holds tensor {tensor.name}, which {INDEX} puts elsewhere"
                )
            found[tensor.name] = tensor
    for name in sorted(where):
        if name not in found:
            raise ValueError(f"{folder / where[name]}: has no tensor {name}, but {INDEX} says so")
    return dict(sorted(found.items()))


def weight_map(folder: pathlib.Path) -> dict[str, str]:
    """Tensor name to shard file, from the index; empty for a folder with one single file."""
    index = folder / INDEX
    if index.is_file():
        where = source.read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{index}: has no weight_map")
        return where
    if (folder / SINGLE).is_file():
        return {}
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise FileNotFoundError(
            f"{folder}: holds only pickled weights ({', '.join(pickles[:3])}); unpickling runs "
            f"whatever code the file contains, so they are not read. Save the model again with "
            f"transformers' save_pretrained, which writes safetensors."
        )
    raise FileNotFoundError(f"{folder}: has neither {SINGLE} nor {INDEX}")


def tensors_in(path: pathlib.Path) -> Iterator[Stored]:
    """The tensors of one safetensors file. The file is read by `pread`: a mapped file would count
    into this process's memory page by page until it is closed."""
    import safetensors

    try:
        file = safetensors.safe_open(path, "np", backend="pread")  # the slices keep it open
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {unreadable(path, error)}") from error
    for name in sorted(file.keys()):
        view = file.get_slice(name)
        if view.get_dtype() not in DTYPES:
            raise ValueError(
                f"{path}: tensor {name} has type {view.get_dtype()}; supported: {', '.join(DTYPES)}"
            )
        yield Stored(name, path, tuple(view.get_shape()), DTYPES[view.get_dtype()], view)


def unreadable(path: pathlib.Path, error: Exception) -> str:
    with path.open("rb") as file:
        if file.read(16).startswith(b"version https://"):
            return "a git-lfs pointer, not the weights; run `git lfs pull` in its folder"
    return (
        f"not a whole safetensors file ({path.stat().st_size} bytes; {error}); "
        f"fetch or copy it again"
    )


class Writable(NamedTuple):
    """One tensor to write; `read` makes it when its shard's turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write_tensors(folder: pathlib.Path, tensors: Sequence[Writable], max_shard_bytes: int) -> None:
    """Writes tensors in their order to one file, or to shards and their index.

    A shard holds at most `max_shard_bytes`, or one larger tensor. Host memory: one shard.
    """
    shards = split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / SINGLE, shards[0])
        return
    where = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / name, shard)
        where |= {tensor.name: name for tensor in shard}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index = {"metadata": total, "weight_map": where}
    (folder / INDEX).write_bytes(source.json_bytes(index))


def split(tensors: Sequence[Writable], max_shard_bytes: int) -> list[list[Writable]]:
    shards: list[list[Writable]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def write_file(path: pathlib.Path, tensors: Sequence[Writable]) -> None:
    """Raises OSError where the disk takes no more."""
    import safetensors.numpy

    arrays = {}
    for tensor in tensors:
        array = np.ascontiguousarray(tensor.read())
        if array.shape != tensor.shape or array.dtype != tensor.dtype:
            raise ValueError(
                f"{path}: tensor {tensor.name} is {array.dtype}{list(array.shape)}, announced as "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
        arrays[tensor.name] = array
    path.touch()
    mode = path.stat().st_mode  # what the umask gives; safetensors makes files private
    try:
        safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise OSError(
            f"{path} could not be written ({error}); put that right and run the same command again"
        ) from error
    path.chmod(mode)
