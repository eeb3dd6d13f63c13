"""Writing a model to a folder that transformers and vLLM load as it is."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxpost import companions, models
from jaxpost.hub import config_json, load, reading, source, tensors
from jaxpost.models import lora as low_rank
from jaxpost.models.model import Model
from jaxpost.typing import Array, Params

MAX_SHARD_BYTES = 5_000_000_000
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def save_model(
    path: source.Path,
    model: Model,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    merge: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json, safetensors weights and the companion files of `model.card`.

    The folder appears complete or not at all. An existing model folder is replaced. Saving what was
    loaded from a saved folder gives the same bytes.

    Args:
      dtype: type to store in; None keeps the parameters' own.
      merge: fold LoRA adapters into the weights first.
      max_shard_bytes: weights above this are split into shards with an index.

    Raises:
      ValueError: params with LoRA leaves and no `merge`; a model without a config to write.
      FileExistsError: the path holds something other than a model folder.
    """
    kind = config_json.without_lm_head(model.card.hf_config)
    if kind is not None:
        raise ValueError(
            f"{os.fspath(path)}: the model was read from a {kind.replace('_', ' ')}, which has no "
            f"language-model head to write; use save_{kind}"
        )
    if low_rank.has_lora(params):
        if not merge:
            raise ValueError(
                f"{os.fspath(path)}: the parameters hold LoRA adapters, which a model folder does "
                f"not; pass merge=True to fold them in, or use save_adapter"
            )
        model, params = low_rank.merge(model, params)
    hf = written_config(model, params, dtype)
    parts = writable(model, params, dtype)
    write_folder(path, hf, model.card.files, parts, max_shard_bytes)


def write_folder(
    path: source.Path,
    hf: Mapping[str, Any],
    files: Mapping[str, bytes],
    parts: Sequence[tensors.Writable],
    max_shard_bytes: int,
) -> None:
    with replacing(path) as folder:
        (folder / "config.json").write_bytes(source.json_bytes(hf))
        for name, content in files.items():
            (folder / plain_name(name)).write_bytes(content)
        tensors.write_tensors(folder, parts, max_shard_bytes)


def written_config(model: Model, params: Params, dtype: DTypeLike | None) -> dict[str, Any]:
    """The `config.json` to write, proven to describe the model."""
    if "model_type" not in model.card.hf_config:
        raise ValueError(
            "this model has no Hugging Face config (model.card is empty), so no folder can be "
            "written; make it with load_model or init_model"
        )
    name = str(load.parameter_dtype(dtype or params["embedding"].dtype))
    hf = config_json.written(model.card.hf_config, model.config, name)
    how = {field: getattr(model.config, field) for field in ("lora", "compute_dtype", "remat")}
    for described in (model.card.hf_config, hf):
        if dataclasses.replace(models.config_from_hf(described), **how) != model.config:
            raise ValueError(
                "model.card.hf_config describes another architecture than model.config; make the "
                "model with load_model or init_model"
            )
    return hf


def writable(model: Model, params: Params, dtype: DTypeLike | None) -> list[tensors.Writable]:
    """The tensors of a model folder, embedding first, then layer by layer."""
    config, result = model.config, []
    names = models.names_from_hf(model.card.hf_config, config)
    ours = {"/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(params)}
    if ours != set(names):
        raise ValueError(
            f"these are not this model's parameters: {sorted(ours ^ set(names))[:3]} are in only "
            f"one of the two"
        )
    for layer in range(config.layers):
        for path, template in names.items():
            if path.startswith("layers/"):
                result.append(one_tensor(path, template.format(layer), params, layer, dtype))
    outside = [path for path in names if not path.startswith("layers/")]
    first = one_tensor("embedding", names["embedding"], params, None, dtype)
    rest = [one_tensor(p, names[p], params, None, dtype) for p in outside if p != "embedding"]
    return [first, *result, *rest]


def one_tensor(
    path: str, name: str, params: Params, layer: int | None, dtype: DTypeLike | None
) -> tensors.Writable:
    array = reading.leaf(params, path)
    stored = load.parameter_dtype(dtype or array.dtype)

    def read() -> np.ndarray:
        one = np.asarray(array if layer is None else layer_of(array, layer))
        return (one.T if path.endswith("kernel") else one).astype(stored)

    return tensors.Writable(name, reading.stored_shape(path, array.shape), stored, read)


@jax.jit
def layer_of(stacked: Array, layer: Array | int) -> Array:
    """One layer of a stacked parameter, so that only it comes from the device."""
    return jax.lax.dynamic_index_in_dim(stacked, layer, keepdims=False)


def plain_name(name: str) -> str:
    if name != pathlib.PurePath(name).name or name == "config.json":
        raise ValueError(f"{name!r} cannot be the name of a companion file")
    return name


@contextlib.contextmanager
def replacing(path: source.Path) -> Iterator[pathlib.Path]:
    """A fresh folder beside `path` that takes its place when the block ends well.

    Raises:
      FileExistsError: `path` is a file, or a folder with anything in it that we do not write.
    """
    target = pathlib.Path(path).expanduser().absolute()
    refuse_foreign(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new-{os.getpid()}")
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        for written in fresh.iterdir():
            sync(written)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def sync(path: pathlib.Path) -> None:
    """Waits until a file or folder is on the disk itself, so that a power cut finds it whole."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def refuse_foreign(target: pathlib.Path) -> None:
    if target.is_file():
        raise FileExistsError(f"{target}: is a file; give a folder to write")
    if not target.exists():
        return
    known = {"config.json", tensors.INDEX, *companions.NAMES, *ADAPTER_FILES}
    for entry in sorted(target.iterdir()):
        ours = entry.name in known or entry.match("model*.safetensors")
        if not ours or entry.is_dir():
            raise FileExistsError(
                f"{target}: holds {entry.name}, which is not part of a model folder, so it is not "
                f"replaced; choose another folder or empty this one"
            )
