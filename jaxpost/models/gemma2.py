"""Gemma 2: soft-caps, sandwich norms, every other layer local, embeddings scaled by √width."""

from collections.abc import Mapping
from typing import Any

from jaxpost.models import hf_config
from jaxpost.models.model import TransformerConfig

MODEL_TYPES = ("gemma2",)


def config(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture in a Gemma 2 `config.json`.

    Raises:
      ValueError: a field or value that is not supported, by name.
    """
    fields = hf_config.open_fields(hf, "Gemma2ForCausalLM")
    shared = gemma(fields, max_positions=8192)
    layers = shared["layers"]
    local = hf_config.local_layers(fields, layers, [i % 2 == 0 for i in range(layers)])
    result = TransformerConfig(
        **shared,
        **hf_config.sliding(fields, fields.integer_or_none("sliding_window", 4096), local),
        rope=hf_config.rope(fields, theta=10_000.0, max_positions=shared["max_positions"]),
        attn_softcap=fields.number_or_none("attn_logit_softcapping", 50.0),
        final_softcap=fields.number_or_none("final_logit_softcapping", 30.0),
    )
    fields.close()
    return result


def gemma(fields: hf_config.Fields, *, max_positions: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share, as keyword arguments of `TransformerConfig`."""
    shape = hf_config.shape(
        fields, kv_heads=4, head_dim=256, max_positions=max_positions, tied=True
    )
    bias = fields.flag("attention_bias", False)
    act = hf_config.activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    if hf_config.activation(fields, "hidden_act", "gelu_pytorch_tanh") != act:
        raise fields.error("hidden_act", "the same as hidden_activation, or leave it out")
    fields.only("mlp_bias", False)
    return shape | {
        "query_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "activation": act,
        "qkv_bias": bias,
        "out_bias": bias,
        "norm_offset": 1.0,
        "sandwich_norms": True,
        "embed_scale": shape["width"] ** 0.5,
    }


def names(config: TransformerConfig) -> dict[str, str]:
    """Our parameter paths to Hugging Face tensor names."""
    return hf_config.names(config, hf_config.SANDWICH_NORMS)
