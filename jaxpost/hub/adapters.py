"""PEFT adapters in and out: `adapter_config.json` and `adapter_model.safetensors`."""

import functools
import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpost import models
from jaxpost.hub import adapter_config, reading, save, source, tensors
from jaxpost.models import lora as low_rank
from jaxpost.models import transformer
from jaxpost.models.model import Model
from jaxpost.typing import Params

CONFIG, WEIGHTS = save.ADAPTER_FILES
PREFIX = "base_model.model."


def load_adapter(path: source.Path, model: Model, params: Params) -> tuple[Model, Params]:
    """The model with a PEFT LoRA adapter from a folder or hub id; its leaves are float32.

    Raises:
      FileNotFoundError: no such folder, or one without a PEFT adapter.
      ValueError: an adapter that is not plain LoRA on whole projections, by field; tensors that
        are missing, unexpected or of the wrong shape; a model that has LoRA already.
    """
    if low_rank.has_lora(params):
        raise ValueError(
            f"{os.fspath(path)}: the model already has LoRA adapters; merge them first"
        )
    folder = source.folder_of(path)
    lora = adapter_config.read(folder / CONFIG, modules(model))
    low_rank.check(lora)
    stored = {tensor.name: tensor for tensor in weights_in(folder)}
    wanted = {
        name: low_rank.leaf_shapes(params, name, rank[0])
        for name in low_rank.PROJECTIONS
        if (rank := transformer.lora_rank_and_scale(lora, name))
    }
    layers = dict(params["layers"])
    for name, shapes in wanted.items():
        leaves = {
            leaf: read_leaf(folder, stored, model, name, leaf, shape)
            for leaf, shape in shapes.items()
        }
        layers[name] = {**layers[name], **leaves}
    if stored:
        raise ValueError(f"{folder / WEIGHTS}: {reading.listed(list(stored))} belongs to no target")
    return low_rank.with_lora(model, lora), {**params, "layers": layers}


def weights_in(folder: pathlib.Path) -> list[tensors.Stored]:
    if (folder / WEIGHTS).is_file():
        return list(tensors.tensors_in(folder / WEIGHTS))
    reason = "missing"
    if (folder / "adapter_model.bin").is_file():
        reason = "missing; adapter_model.bin is a pickle, which is not read"
    raise FileNotFoundError(f"{folder / WEIGHTS}: {reason}")


def read_leaf(
    folder: pathlib.Path,
    stored: dict[str, tensors.Stored],
    model: Model,
    name: str,
    leaf: str,
    shape: tuple[int, ...],
) -> Any:
    """One stacked leaf from its tensors, which are taken out of `stored`."""
    layers = []
    for module in modules(model)[name]:
        key = tensor_name(module, leaf)
        if key not in stored:
            raise ValueError(f"{folder / WEIGHTS}: lacks tensor {key}")
        tensor = stored.pop(key)
        reading.check_shape(key, reading.Found(tensor.file, tensor.shape), shape[:0:-1])
        layers.append(tensors.finite(tensor.read(), key, tensor.file).T.astype(np.float32))
    return jnp.asarray(np.stack(layers))


def tensor_name(module: str, leaf: str) -> str:
    """PEFT's name for one layer's adapter: `base_model.model.<module>.lora_A.weight`."""
    return f"{PREFIX}{module}.{'lora_A' if leaf == 'lora_a' else 'lora_B'}.weight"


def modules(model: Model) -> dict[str, list[str]]:
    """For each projection, the Hugging Face module names of its layers."""
    names = models.names_from_hf(model.card.hf_config, model.config)
    result = {}
    for name in low_rank.PROJECTIONS:
        template = names[f"layers/{name}/kernel"].removesuffix(".weight")
        result[name] = [template.format(layer) for layer in range(model.config.layers)]
    return result


def save_adapter(
    path: source.Path, model: Model, params: Params, *, base_model: str | None = None
) -> None:
    """Writes the LoRA leaves as a PEFT adapter; an existing adapter or model folder is replaced.

    Args:
      base_model: folder or hub id of the base model, noted for whoever loads the adapter.

    Raises:
      ValueError: a model without adapters.
      FileExistsError: the path holds something other than an adapter or model folder.
    """
    lora = model.config.lora
    if lora is None or not low_rank.has_lora(params):
        raise ValueError(f"{os.fspath(path)}: the model has no LoRA adapters; use save_model")
    parts = []
    for name, places in modules(model).items():
        for leaf in low_rank.LEAVES if "lora_a" in params["layers"][name] else ():
            array = params["layers"][name][leaf]
            for layer, module in enumerate(places):
                read = functools.partial(one_layer, array, layer)
                shape = tuple(array.shape[:0:-1])
                dtype = np.dtype(array.dtype)
                parts.append(tensors.Writable(tensor_name(module, leaf), shape, dtype, read))
    config = adapter_config.written(lora, params, base_model)
    with save.replacing(path) as folder:
        (folder / CONFIG).write_bytes(source.json_bytes(config))
        tensors.write_file(folder / WEIGHTS, parts)


def one_layer(array: Any, layer: int) -> np.ndarray:
    return np.asarray(save.layer_of(array, layer)).T
