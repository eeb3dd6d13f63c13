"""The `config.json` that is written: one that transformers 4, transformers 5 and vLLM all read."""

from collections.abc import Mapping
from typing import Any

from jaxpost import models
from jaxpost.models.model import TransformerConfig

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
CLASSIFIERS: Mapping[str, str] = {
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "gemma2": "Gemma2ForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
}
TOKEN_CLASSIFIERS: Mapping[str, str] = {  # transformers has none of gemma3_text
    "llama": "LlamaForTokenClassification",
    "mistral": "MistralForTokenClassification",
    "qwen2": "Qwen2ForTokenClassification",
    "qwen3": "Qwen3ForTokenClassification",
    "gemma2": "Gemma2ForTokenClassification",
}
OF_TOKEN_HEADS = ("classifier_dropout", "hidden_dropout", "token_classification_bias")


def written(hf: Mapping[str, Any], config: TransformerConfig, dtype: str) -> dict[str, Any]:
    """`hf` with both spellings of its type and rope; every other field is kept as it came.

    Writing what was written changes nothing: `written(written(hf)) == written(hf)`.
    """
    result = {
        **hf,
        "architectures": [ARCHITECTURES[hf["model_type"]]],
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if hf["model_type"] == "gemma3_text":
        return result | two_ropes(hf, config)
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    return result | spellings(rope_dictionary(given, config.rope.theta), config.rope.theta)


def spellings(rope: Mapping[str, Any], theta: float) -> dict[str, Any]:
    scaled = rope["rope_type"] != "default"
    return {
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": rope,
    }


def rope_dictionary(given: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """A rope as transformers 5 writes it: `rope_type` (never `type`), `rope_theta`, the rest."""
    kind = given.get("rope_type") or given.get("type") or "default"
    rest = {key: value for key, value in given.items() if key != "type"}
    return {**rest, "rope_type": kind, "rope_theta": theta}


def two_ropes(hf: Mapping[str, Any], config: TransformerConfig) -> dict[str, Any]:
    """Gemma 3's ropes: one dictionary for each kind of layer, and the older flat fields."""
    nested = hf.get("rope_parameters") or {}
    everywhere = nested.get("full_attention") or hf.get("rope_scaling") or {}
    nearby = nested.get("sliding_attention") or {}
    local_theta = nearby.get("rope_theta") or hf.get("rope_local_base_freq") or 10_000.0
    if config.rope_local is not None:
        local_theta = config.rope_local.theta
    flat = spellings(rope_dictionary(everywhere, config.rope.theta), config.rope.theta)
    kinds = {
        "full_attention": flat["rope_parameters"],
        "sliding_attention": rope_dictionary(nearby, local_theta),
    }
    return flat | {"rope_local_base_freq": local_theta, "rope_parameters": kinds}


def is_reward_model(hf: Mapping[str, Any]) -> bool:
    """Whether a config is of a sequence classifier of a supported family."""
    return list(hf.get("architectures") or []) == [CLASSIFIERS.get(hf.get("model_type", ""))]


def is_process_reward_model(hf: Mapping[str, Any]) -> bool:
    """Whether a config is of a token classifier of a supported family."""
    return list(hf.get("architectures") or []) == [TOKEN_CLASSIFIERS.get(hf.get("model_type", ""))]


def without_lm_head(hf: Mapping[str, Any]) -> str | None:
    """What a config without a language-model head is of: the end of the name of its loader."""
    if is_reward_model(hf):
        return "reward_model"
    return "process_reward_model" if is_process_reward_model(hf) else None


def of_transformer(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A classifier's config as that of a causal language model; any other as it is."""
    if without_lm_head(hf) is None:
        return dict(hf)
    kept = {name: value for name, value in hf.items() if name not in OF_TOKEN_HEADS}
    return {**kept, "architectures": [ARCHITECTURES[hf["model_type"]]]}


def of_reward_model(
    causal: Mapping[str, Any], source: Mapping[str, Any], pad_token_id: int | None
) -> dict[str, Any]:
    """A written causal config as that of a reward model; `source` says what its head was tied to.

    As transformers does it, the count of labels is the length of `id2label` and no field.
    """
    kept = {name: value for name, value in causal.items() if name != "num_labels"}
    label = (causal.get("id2label") or {}).get("0") if is_reward_model(source) else None
    return kept | {
        "architectures": [CLASSIFIERS[causal["model_type"]]],
        "tie_word_embeddings": models.config_from_hf(of_transformer(source)).tied_embeddings,
        "id2label": {"0": label or "LABEL_0"},
        "label2id": {label or "LABEL_0": 0},
        "pad_token_id": pad_token_id,
    }


def of_process_reward_model(causal: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """A written causal config as that of a token classifier; `source` as in `of_reward_model`.

    Label 1 is that of right steps.
    """
    kept = {name: value for name, value in causal.items() if name != "num_labels"}
    names = source.get("id2label") if is_process_reward_model(source) else None
    labels = names if names and len(names) == 2 else {"0": "LABEL_0", "1": "LABEL_1"}
    return kept | {
        "architectures": [TOKEN_CLASSIFIERS[causal["model_type"]]],
        "tie_word_embeddings": models.config_from_hf(of_transformer(source)).tied_embeddings,
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }
