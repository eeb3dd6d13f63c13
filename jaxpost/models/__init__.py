"""Models: one architecture description, one transformer, one file for each family of configs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxpost.models import gemma2, gemma3, llama, mistral, qwen2, qwen3
from jaxpost.models.model import Cache, LoRA, Model, ModelCard, Rope, TransformerConfig
from jaxpost.models.transformer import logits, make_model


class Family(NamedTuple):
    """How one family of `config.json` is read, and what its tensors are called."""

    config: Callable[[Mapping[str, Any]], TransformerConfig]
    names: Callable[[TransformerConfig], dict[str, str]]


FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(llama.MODEL_TYPES, Family(llama.config, llama.names)),
    **dict.fromkeys(mistral.MODEL_TYPES, Family(mistral.config, mistral.names)),
    **dict.fromkeys(qwen2.MODEL_TYPES, Family(qwen2.config, qwen2.names)),
    **dict.fromkeys(qwen3.MODEL_TYPES, Family(qwen3.config, qwen3.names)),
    **dict.fromkeys(gemma2.MODEL_TYPES, Family(gemma2.config, gemma2.names)),
    **dict.fromkeys(gemma3.MODEL_TYPES, Family(gemma3.config, gemma3.names)),
}


def family_of(hf: Mapping[str, Any]) -> Family:
    """The family named by `model_type`.

    Raises:
      ValueError: a model type that is not supported, with the list of those that are.
    """
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    hint = ""
    if "text_config" in hf or model_type == "gemma3":
        hint = " (a multimodal model: its text_config is not read; use a text-only checkpoint)"
    raise ValueError(
        f"config.json: model_type = {model_type!r} is not supported{hint}; "
        f"supported: {', '.join(sorted(FAMILIES))}"
    )


def config_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    """The architecture described by a Hugging Face `config.json`.

    Raises:
      ValueError: a model type, field or value that is not supported, by name.
    """
    return family_of(hf).config(hf)


def names_from_hf(hf: Mapping[str, Any], config: TransformerConfig) -> dict[str, str]:
    """For each of our parameter paths, the Hugging Face tensor name, `{}` for the layer number.

    A path that ends in `kernel` holds the transpose of the Hugging Face weight.
    """
    return family_of(hf).names(config)


__all__ = [
    "Cache",
    "LoRA",
    "Model",
    "ModelCard",
    "Rope",
    "TransformerConfig",
    "config_from_hf",
    "logits",
    "make_model",
    "names_from_hf",
]
