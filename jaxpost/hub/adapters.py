"""PEFT adapters in and out: `adapter_config.json` and `adapter_model.safetensors`."""

import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpost import models
from jaxpost.hub import reading, save, source, tensors
from jaxpost.models import lora as low_rank
from jaxpost.models import transformer
from jaxpost.models.model import LoRA, Model
from jaxpost.typing import Params

CONFIG, WEIGHTS = save.ADAPTER_FILES
PREFIX = "base_model.model."
# Fields of adapter_config.json that are taken into account here, or only matter in PEFT's training.
READ = ("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern")
READ += ("alpha_pattern", "use_rslora", "init_lora_weights", "task_type", "base_model_name_or_path")
INERT = ("auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "peft_version")
INERT += ("qalora_group_size", "revision", "runtime_config")
# Ways of initialising after which the adapter does not belong to the base model as published.
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mclora")


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
    lora = read_config(folder / CONFIG, model)
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
        reading.check_shape(tensor, shape[:0:-1])
        layers.append(tensor.read().T.astype(np.float32))
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


def read_config(path: pathlib.Path, model: Model) -> LoRA:
    """The `LoRA` that an `adapter_config.json` describes, for this model's projections."""
    fields = source.read_json(path)
    check_fields(path, fields)
    places = modules(model)
    targets = targets_of(path, fields, places)
    rank, alpha = fields["r"], float(fields["lora_alpha"])
    ranks, alphas = (
        {name: looked_up(path, fields, field, places[name], default) for name in targets}
        for field, default in (("rank_pattern", rank), ("alpha_pattern", alpha))
    )
    return LoRA(
        rank=rank,
        alpha=alpha,
        targets=targets,
        rank_stabilized=bool(fields.get("use_rslora")),
        ranks=tuple((name, value) for name, value in ranks.items() if value != rank),
        alphas=tuple((name, float(value)) for name, value in alphas.items() if value != alpha),
    )


def check_fields(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Refuses whatever makes an adapter more than plain LoRA."""
    if fields.get("peft_type") != "LORA":
        raise ValueError(
            f"{path}: peft_type = {fields.get('peft_type')!r} is not supported; LORA is"
        )
    if fields.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"{path}: task_type = {fields['task_type']!r} is not supported")
    for name in ("r", "lora_alpha", "target_modules"):
        if not fields.get(name):
            raise ValueError(f"{path}: {name} = {fields.get(name)!r}; a value is needed")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE):
        raise ValueError(
            f"{path}: init_lora_weights = {init!r} is not supported: it changes the base model's "
            f"weights; convert the adapter to plain LoRA with PEFT first"
        )
    for name, value in fields.items():
        plain = value in (None, False, "none") or value in ([], {}, "")
        if name not in (*READ, *INERT) and not plain:
            raise ValueError(
                f"{path}: {name} = {value!r} is not supported; only plain LoRA adapters are"
            )


def targets_of(
    path: pathlib.Path, fields: Mapping[str, Any], places: Mapping[str, list[str]]
) -> tuple[str, ...]:
    """The projections that PEFT would adapt: all layers of one, or none."""
    wanted, spared = fields["target_modules"], fields.get("exclude_modules")
    if wanted == "all-linear":
        wanted = list(low_rank.PROJECTIONS)
    result = []
    for name, layers in places.items():
        hits = [matches(wanted, m) and not (spared and matches(spared, m)) for m in layers]
        if any(hits) and not all(hits):
            raise ValueError(
                f"{path}: target_modules or exclude_modules picks {name} in some layers only, "
                f"which is not supported"
            )
        if all(hits):
            result.append(name)
    flat = [module for layers in places.values() for module in layers]
    for one in [wanted] if isinstance(wanted, str) else wanted:
        if not any(matches(one if isinstance(wanted, str) else [one], m) for m in flat):
            raise ValueError(
                f"{path}: target_modules names {one!r}, which is none of this model's "
                f"projections: {', '.join(places)}"
            )
    return tuple(result)


def matches(wanted: str | list[str], module: str) -> bool:
    """PEFT's rule: a string is a regular expression for the whole name, a list holds endings."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in wanted)


def looked_up(
    path: pathlib.Path, fields: Mapping[str, Any], field: str, layers: list[str], default: Any
) -> Any:
    """The rank or alpha that a pattern gives to a projection: one for all its layers."""
    patterns = fields.get(field) or {}

    def of(module: str) -> Any:
        keys = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        return patterns.get(next(keys, None), default)

    values = {of(module) for module in layers}
    if len(values) > 1:
        raise ValueError(
            f"{path}: {field} gives {layers[0].rpartition('.')[2]} different values by layer "
            f"({sorted(values)}), which is not supported"
        )
    return values.pop()


def base_of(path: pathlib.Path) -> str:
    """The base model that an adapter folder names."""
    base = source.read_json(path / CONFIG).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path / CONFIG}: base_model_name_or_path is empty; give the base model")
    return str(base)


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
    config = written_config(lora, params, base_model)
    with save.replacing(path) as folder:
        (folder / CONFIG).write_bytes(source.json_bytes(config))
        tensors.write_file(folder / WEIGHTS, parts)


def one_layer(array: Any, layer: int) -> np.ndarray:
    return np.asarray(save.layer_of(array, layer)).T


def written_config(lora: LoRA, params: Params, base_model: str | None) -> dict[str, Any]:
    """An `adapter_config.json` with the fields that PEFT and vLLM read."""
    targets = [name for name in low_rank.PROJECTIONS if "lora_a" in params["layers"][name]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "rank_pattern": {name: rank for name, rank in lora.ranks},
        "alpha_pattern": {name: alpha for name, alpha in lora.alphas},
        "use_rslora": lora.rank_stabilized,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
