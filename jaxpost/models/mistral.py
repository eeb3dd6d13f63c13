"""Mistral: Llama with a sliding window on every layer (or on none, when it is null)."""

from collections.abc import Mapping
from typing import Any

from jaxpost.models import hf_config
from jaxpost.models.model import TransformerConfig

MODEL_TYPES = ("mistral",)


def config(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture in a Mistral `config.json`.

    Raises:
      ValueError: a field or value that is not supported, by name.
    """
    fields = hf_config.open_fields(hf, "MistralForCausalLM")
    shape = hf_config.shape(fields, kv_heads=8, max_positions=131_072)
    window = fields.integer_or_none("sliding_window", 4096)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    result = TransformerConfig(
        **shape,
        **hf_config.sliding(fields, window, (window is not None,) * shape["layers"]),
        activation=hf_config.activation(fields, "hidden_act", "silu"),
        rope=hf_config.rope(fields, theta=10_000.0, max_positions=shape["max_positions"]),
    )
    fields.close()
    return result


def names(config: TransformerConfig) -> dict[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return hf_config.names(config, hf_config.PRE_NORMS)
