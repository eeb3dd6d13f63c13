"""The `config.json` and `generation_config.json` that a GGUF file's metadata amount to."""

from typing import Any

import numpy as np

from jaxpost.hub.gguf_in import EMBEDDING, HEAD, ROPE_FREQS, UNDERSTOOD, File
from jaxpost.models.model import Rope
from jaxpost.models.transformer import rope_frequencies

# Llama 3.1's rope scaling is not in the metadata: only its factors are, as a tensor.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(file: File) -> dict[str, Any]:
    """The Hugging Face config of a GGUF model.

    Raises:
      ValueError: metadata of the architecture whose meaning is not known here, by name.
    """
    check_fields(file)
    heads, width = file.need("attention.head_count"), file.need("embedding_length")
    head_dim = file.get("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if file.get(name, head_dim) != head_dim:
            raise ValueError(
                f"{file.path}: {file.prefix}{name} = {file.get(name)} is not supported; "
                f"it must be the head size, {head_dim}"
            )
    config = {
        "model_type": file.architecture.model_type,
        "hidden_size": width,
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": file.shape(EMBEDDING)[0],
        "max_position_embeddings": file.need("context_length"),
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "rope_theta": file.get("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(file, head_dim),
        "use_cache": True,
        **token_ids(file),
        **file.architecture.extra,
    }
    model_type = file.architecture.model_type
    if model_type.startswith("gemma"):
        return config | gemma_fields(file, heads, width, head_dim)
    bias = "blk.0.attn_q.bias" in file.tensors
    if model_type == "llama":
        mlp_bias = "blk.0.ffn_down.bias" in file.tensors
        config |= {"attention_bias": bias, "mlp_bias": mlp_bias}
    elif model_type == "qwen3":
        config["attention_bias"] = bias
    return config | {"hidden_act": "silu"}


def check_fields(file: File) -> None:
    known = {file.prefix + name for name in UNDERSTOOD}
    for name, value in file.metadata.items():
        if name.startswith(file.prefix) and name not in known:
            raise ValueError(f"{file.path}: GGUF field {name} = {value!r} is not supported")
    slides = file.architecture.model_type.startswith("gemma")
    for name in ("attention.sliding_window", "rope.freq_base_swa"):
        if file.get(name) and not slides:
            raise ValueError(
                f"{file.path}: GGUF field {file.prefix}{name} = {file.get(name)} is not supported"
            )


def token_ids(file: File) -> dict[str, Any]:
    """The ids of the special tokens; several end tokens where a turn has its own."""
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {ours: token_id(file, theirs) for ours, theirs in kinds.items()}
    result: dict[str, Any] = {f"{k}_token_id": v for k, v in ids.items() if v is not None}
    turn = token_id(file, "eot")
    if turn not in (None, ids["eos"]):
        result["eos_token_id"] = turn if ids["eos"] is None else [ids["eos"], turn]
    return result


def token_id(file: File, name: str) -> int | None:
    return file.metadata.get(f"tokenizer.ggml.{name}_token_id")


def rope_scaling(file: File, head_dim: int) -> dict[str, Any] | None:
    """The rescaling of the rope, from the metadata or from the tensor of frequency factors."""
    kind = file.get("rope.scaling.type", "none")
    if ROPE_FREQS in file.tensors:
        return llama3_scaling(file, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(file.need("rope.scaling.factor"))}
    if kind == "yarn":
        original = file.need("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": float(file.need("rope.scaling.factor")),
            "original_max_position_embeddings": original,
        }
    raise ValueError(f"{file.path}: {file.prefix}rope.scaling.type = {kind!r} is not supported")


def llama3_scaling(file: File, head_dim: int) -> dict[str, Any]:
    """Llama 3's rescaling, recognised by the factors it gives: unscaled over scaled frequency."""
    factors, theta = file.read(ROPE_FREQS), file.get("rope.freq_base", 10_000.0)
    factor = float(factors.max())
    plain, _ = rope_frequencies(Rope(theta=theta), head_dim)
    scaled, _ = rope_frequencies(Rope(theta=theta, kind="llama3", factor=factor), head_dim)
    expected = plain / scaled
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(
            f"{file.path}: tensor {ROPE_FREQS} rescales the rope in a way that is not supported "
            f"(only Llama 3's is)"
        )
    return {**LLAMA3, "factor": factor}


def gemma_fields(file: File, heads: int, width: int, head_dim: int) -> dict[str, Any]:
    """What only the Gemma family has, with llama.cpp's defaults for what a file leaves out."""
    layers = file.need("block_count")
    three = file.architecture.model_type == "gemma3_text"
    # The 27B models scale queries by width / heads instead; llama.cpp knows them by their depth.
    wide = layers == (62 if three else 46)
    config = {
        "query_pre_attn_scalar": width // heads if wide else head_dim,
        "sliding_window": file.need("attention.sliding_window"),
        "attention_bias": False,
        "attn_logit_softcapping": file.get("attn_logit_softcapping", None if three else 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", None if three else 30.0),
        "layer_types": layer_types(file, layers, period=6 if three else 2),
    }
    if three:
        config["rope_local_base_freq"] = file.get("rope.freq_base_swa", 10_000.0)
    return config


def layer_types(file: File, layers: int, period: int) -> list[str]:
    """Each layer's kind: every `period`-th is global, unless the file lists the local ones."""
    given = file.get("attention.sliding_window_pattern", period)
    local = given if isinstance(given, list) else [(i + 1) % given != 0 for i in range(layers)]
    return ["sliding_attention" if sliding else "full_attention" for sliding in local]
