"""Gemma 3, text only: Gemma 2 with q/k norms, five local layers to a global one, two ropes."""

from collections.abc import Mapping
from typing import Any

from jaxpost.models import gemma2, hf_config
from jaxpost.models.model import Rope, TransformerConfig

MODEL_TYPES = ("gemma3_text",)


def config(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture in a Gemma 3 text `config.json` (not the multimodal `gemma3`).

    Raises:
      ValueError: a field or value that is not supported, by name.
    """
    fields = hf_config.open_fields(hf, "Gemma3ForCausalLM")
    shared = gemma2.gemma(fields, max_positions=131_072)
    # transformers reads this field and never applies it, so only its absence is unambiguous.
    fields.only("attn_logit_softcapping", None)
    everywhere, nearby = ropes(fields, shared["max_positions"])
    local = pattern(fields, shared["layers"])
    result = TransformerConfig(
        **shared,
        **hf_config.sliding(fields, fields.integer_or_none("sliding_window", 4096), local),
        rope=everywhere,
        rope_local=nearby if any(local) else None,
        final_softcap=fields.number_or_none("final_logit_softcapping", None),
        qk_norm=True,
    )
    fields.close()
    return result


def pattern(fields: hf_config.Fields, layers: int) -> tuple[bool, ...]:
    """Which layers are local: all but each n-th, n = `sliding_window_pattern`, or `layer_types`."""
    period = fields.integer_or_none("sliding_window_pattern", None)
    fallback = fields.integer_or_none("_sliding_window_pattern", None) or 6
    by_period = [(i + 1) % (period or fallback) != 0 for i in range(layers)]
    local = hf_config.local_layers(fields, layers, by_period)
    if period is not None and local != tuple(by_period):
        raise fields.error("sliding_window_pattern", "a pattern equal to layer_types")
    return local


def ropes(fields: hf_config.Fields, max_positions: int) -> tuple[Rope, Rope]:
    """The global and the local rope.

    transformers 4 writes `rope_theta`, `rope_scaling` (global only) and `rope_local_base_freq`;
    transformers 5 writes one dictionary per layer type under `rope_parameters`.
    """
    nested = fields.get("rope_parameters", None) or {}
    stray = [name for name in nested if name not in hf_config.LAYER_TYPES]
    if stray:
        raise fields.error("rope_parameters", f"one dictionary for each of {hf_config.LAYER_TYPES}")
    scaling = fields.get("rope_scaling", None) or {}
    everywhere, nearby = (nested.get(kind) or {} for kind in hf_config.LAYER_TYPES)
    if everywhere and scaling and dict(scaling) != dict(everywhere):
        raise fields.error("rope_scaling", "only one of rope_scaling and rope_parameters")
    theta = theta_of(fields, "rope_theta", everywhere, 1_000_000.0)
    local_theta = theta_of(fields, "rope_local_base_freq", nearby, 10_000.0)
    name = "rope_parameters" if nested else "rope_scaling"
    return (
        hf_config.rope_of(
            fields, name, everywhere or scaling, theta=theta, max_positions=max_positions
        ),
        hf_config.rope_of(fields, name, nearby, theta=local_theta, max_positions=max_positions),
    )


def theta_of(
    fields: hf_config.Fields, name: str, values: Mapping[str, Any], default: float
) -> float:
    given = fields.number_or_none(name, None)
    if given is not None and values.get("rope_theta", given) != given:
        raise fields.error(name, "the same as rope_theta in rope_parameters")
    return default if given is None else given


def names(config: TransformerConfig) -> dict[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return hf_config.names(config, hf_config.SANDWICH_NORMS)
