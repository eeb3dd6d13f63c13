"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and optional sliding layers."""

from collections.abc import Mapping
from typing import Any

from jaxpost.models import hf_config
from jaxpost.models.model import TransformerConfig

MODEL_TYPES = ("qwen2",)


def config(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture in a Qwen2 `config.json`.

    Raises:
      ValueError: a field or value that is not supported, by name.
    """
    fields = hf_config.open_fields(hf, "Qwen2ForCausalLM")
    shape = hf_config.shape(fields, kv_heads=32, max_positions=32_768)
    fields.only("attention_bias", True)
    fields.only("mlp_bias", False)
    result = TransformerConfig(
        **shape,
        **sliding(fields, shape["layers"]),
        activation=hf_config.activation(fields, "hidden_act", "silu"),
        rope=hf_config.rope(fields, theta=10_000.0, max_positions=shape["max_positions"]),
        qkv_bias=True,
    )
    fields.close()
    return result


def sliding(fields: hf_config.Fields, layers: int) -> dict[str, Any]:
    """The window: `sliding_window` counts only with `use_sliding_window`.

    Without `layer_types`, the layers from `max_window_layers` on slide. (Qwen3 does the same.)
    """
    window = fields.integer_or_none("sliding_window", 4096)
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.error("max_window_layers", "an integer")
    default = [window is not None and layer >= first for layer in range(layers)]
    return hf_config.sliding(fields, window, hf_config.local_layers(fields, layers, default))


def names(config: TransformerConfig) -> dict[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return hf_config.names(config, hf_config.PRE_NORMS)
