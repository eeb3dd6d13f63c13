"""Llama 2, 3, 3.1, 3.2 and every model saved as one (SmolLM2 among them)."""

from collections.abc import Mapping
from typing import Any

from jaxpost.models import hf_config
from jaxpost.models.model import TransformerConfig

MODEL_TYPES = ("llama",)


def config(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture in a Llama `config.json`.

    Raises:
      ValueError: a field or value that is not supported, by name.
    """
    fields = hf_config.open_fields(hf, "LlamaForCausalLM")
    shape = hf_config.shape(fields, max_positions=2048)
    bias = fields.flag("attention_bias", False)
    result = TransformerConfig(
        **shape,
        activation=hf_config.activation(fields, "hidden_act", "silu"),
        rope=hf_config.rope(fields, theta=10_000.0, max_positions=shape["max_positions"]),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    fields.close()
    return result


def names(config: TransformerConfig) -> dict[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return hf_config.names(config, hf_config.PRE_NORMS)
