"""`adapter_config.json`: which PEFT adapters are plain LoRA, and what their fields mean."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost.hub import source
from jaxpost.models import lora as low_rank
from jaxpost.models.model import LoRA
from jaxpost.typing import Params

Places = Mapping[str, Sequence[str]]  # projection → the module names of its layers

# Fields of adapter_config.json that are taken into account here, or only matter in PEFT's training.
READ = ("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern")
READ += ("alpha_pattern", "use_rslora", "init_lora_weights", "task_type", "base_model_name_or_path")
INERT = ("auto_mapping", "inference_mode", "lora_dropout", "megatron_core", "peft_version")
INERT += ("qalora_group_size", "revision", "runtime_config")
# Ways of initialising after which the adapter does not belong to the base model as published.
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mclora")


def read(path: pathlib.Path, places: Places) -> LoRA:
    """The `LoRA` that an `adapter_config.json` describes, for a model with these projections.

    Raises:
      ValueError: anything that is more than plain LoRA on whole projections, by field.
    """
    fields = source.read_json(path)
    check_fields(path, fields)
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
        plain = value is None or value is False or value in ("none", "", [], {})
        if name not in (*READ, *INERT) and not plain:
            raise ValueError(
                f"{path}: {name} = {value!r} is not supported; only plain LoRA adapters are"
            )


def targets_of(path: pathlib.Path, fields: Mapping[str, Any], places: Places) -> tuple[str, ...]:
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


def matches(wanted: str | Sequence[str], module: str) -> bool:
    """PEFT's rule: a string is a regular expression for the whole name, a list holds endings."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, module) is not None
    return any(module == one or module.endswith(f".{one}") for one in wanted)


def looked_up(
    path: pathlib.Path, fields: Mapping[str, Any], field: str, layers: Sequence[str], default: Any
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
    """The base model that an `adapter_config.json` names."""
    base = source.read_json(path).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path}: base_model_name_or_path is empty; give the base model")
    return str(base)


def written(lora: LoRA, params: Params, base_model: str | None) -> dict[str, Any]:
    """An `adapter_config.json` with the fields that PEFT and vLLM read."""
    targets = [name for name in low_rank.PROJECTIONS if "lora_a" in params["layers"][name]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": whole(lora.alpha),
        "lora_dropout": 0.0,
        "target_modules": targets,
        "rank_pattern": dict(lora.ranks),
        "alpha_pattern": {name: whole(alpha) for name, alpha in lora.alphas},
        "use_rslora": lora.rank_stabilized,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def whole(number: float) -> float | int:
    """32 rather than 32.0: some readers declare the field an integer."""
    return int(number) if float(number).is_integer() else number
