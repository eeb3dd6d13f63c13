"""Reading a model from its Hugging Face folder, and making a fresh one from a config."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpost import companions, models
from jaxpost.hub import config_json, reading, source, tensors
from jaxpost.models import lora as low_rank
from jaxpost.models.model import LoRA, Model, ModelCard, Remat, TransformerConfig
from jaxpost.typing import Array, Params


def load_model(
    path_or_hub_id: source.Path,
    *,
    dtype: DTypeLike | None = None,
    compute_dtype: DTypeLike | None = None,
    remat: Remat = "none",
    lora: LoRA | None = None,
) -> tuple[Model, Params]:
    """A model and its parameters from a Hugging Face folder or hub id (`owner/name`).

    Weights are read layer by layer into the device arrays they end in, so peak host memory stays
    near the size of the weights (on an accelerator: near that of one layer).

    Args:
      dtype: parameter type (`float32`, `bfloat16`, `float16`); None keeps each as stored.
      compute_dtype: type of activations; None takes the parameters' (the embedding's).
      remat: what the backward pass recomputes, see `TransformerConfig`.
      lora: adds fresh adapters (`lora.add_lora` with key 0; call it yourself for another key).

    Raises:
      FileNotFoundError: no such folder or hub id, no config.json, weights missing or pickled.
      ValueError: an unsupported config field; a missing, unexpected, misshapen or unreadable
        tensor. Each names the file, and the field or tensor.
    """
    folder = source.folder_of(path_or_hub_id)
    hf, config = described(folder)
    params = reading.read_params(
        folder, hf, config, None if dtype is None else parameter_dtype(dtype)
    )
    compute = parameter_dtype(compute_dtype or params["embedding"].dtype)
    config = dataclasses.replace(config, compute_dtype=str(compute), remat=remat)
    model = models.make_model(config, ModelCard(hf, companions.read(folder)))
    if lora is not None:
        return low_rank.add_lora(model, params, lora, jax.random.key(0))
    return model, params


def init_model(
    hf_config: Mapping[str, Any],
    key: Array,
    *,
    dtype: DTypeLike = "float32",
    compute_dtype: DTypeLike | None = None,
    remat: Remat = "none",
    lora: LoRA | None = None,
    files: Mapping[str, bytes] | None = None,
) -> tuple[Model, Params]:
    """A fresh model of the architecture in `hf_config` (the content of a `config.json`).

    `files` are companions to save with it (tokenizer, chat template), by file name.
    """
    target = parameter_dtype(dtype)
    compute = parameter_dtype(compute_dtype or target)
    config = dataclasses.replace(
        models.config_from_hf(hf_config), compute_dtype=str(compute), remat=remat
    )
    model = models.make_model(config, ModelCard(dict(hf_config), dict(files or {})))
    init_key, lora_key = jax.random.split(key)
    params = jax.jit(lambda k: jax.tree.map(lambda x: x.astype(target), model.init(k)))(init_key)
    if lora is not None:
        return low_rank.add_lora(model, params, lora, lora_key)
    return model, params


def load_config(path_or_hub_id: source.Path) -> TransformerConfig:
    """The architecture of a model; its weights are not read, nor fetched.

    Raises:
      FileNotFoundError, ValueError: as `load_model`.
    """
    return described(source.folder_of(path_or_hub_id, ["config.json"]))[1]


def described(folder: pathlib.Path) -> tuple[Mapping[str, Any], TransformerConfig]:
    """The folder's `config.json`, and the architecture that it describes."""
    hf = config_of(folder)
    kind = config_json.without_lm_head(hf)
    if kind is not None:
        raise ValueError(
            f"{folder}/config.json: architectures = {hf['architectures']} is a "
            f"{kind.replace('_', ' ')}, which has no language-model head; load it with load_{kind}"
        )
    try:
        return hf, models.config_from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{folder}/{error}") from error  # it begins with `config.json:`


def config_of(folder: pathlib.Path) -> Mapping[str, Any]:
    """The folder's `config.json`, with a way out where the folder is an adapter or a GGUF's."""
    if (folder / "config.json").is_file():
        return source.read_json(folder / "config.json")
    hint = "not a Hugging Face model folder"
    if (folder / "adapter_config.json").is_file():
        hint = "a PEFT adapter; load its base model, then call load_adapter"
    elif any(folder.glob("*.gguf")):
        hint = "holds a GGUF file; run `jaxpost convert FILE.gguf FOLDER` first"
    raise FileNotFoundError(f"{folder}: has no config.json: {hint}")


def parameter_dtype(name: DTypeLike) -> np.dtype[Any]:
    """The numpy type of a parameter type's name.

    Raises:
      ValueError: not one of the types that weights are stored in.
    """
    known = {str(dtype): dtype for dtype in tensors.DTYPES.values()}
    text = name if isinstance(name, str) else str(jnp.dtype(name))
    if text not in known:
        raise ValueError(f"dtype {text!r} is not supported; supported: {', '.join(known)}")
    return known[text]
