"""Qwen3, dense: a norm on the queries and keys of each head instead of Qwen2's biases."""

from collections.abc import Mapping
from typing import Any

from jaxpost.models import hf_config, qwen2
from jaxpost.models.model import TransformerConfig

MODEL_TYPES = ("qwen3",)


def config(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture in a Qwen3 `config.json`.

    Raises:
      ValueError: a field or value that is not supported, by name.
    """
    fields = hf_config.open_fields(hf, "Qwen3ForCausalLM")
    shape = hf_config.shape(fields, kv_heads=32, head_dim=128, max_positions=32_768)
    bias = fields.flag("attention_bias", False)
    fields.only("mlp_bias", False)
    result = TransformerConfig(
        **shape,
        **qwen2.sliding(fields, shape["layers"]),
        activation=hf_config.activation(fields, "hidden_act", "silu"),
        rope=hf_config.rope(fields, theta=10_000.0, max_positions=shape["max_positions"]),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )
    fields.close()
    return result


def names(config: TransformerConfig) -> dict[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return hf_config.names(config, hf_config.PRE_NORMS)
