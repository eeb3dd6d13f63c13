"""The `config.json` and `generation_config.json` that a GGUF file's metadata amount to."""

from typing import Any

import numpy as np

from jaxpost.hub.gguf_in import ROPE_FREQS, UNDERSTOOD, File

# Llama 3.1's rope scaling is not in the metadata: only its factors are, as a tensor.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA3_LOCAL_THETA, GEMMA3_PERIOD, GEMMA3_27B_LAYERS = 10_000.0, 6, 62


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
        "vocab_size": file.shape("token_embd.weight")[0],
        "max_position_embeddings": file.need("context_length"),
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
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
    return config if model_type == "gemma3_text" else config | {"hidden_act": "silu"}


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
    ids = {
        kind: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for kind, name in KINDS.items()
    }
    result = {f"{kind}_token_id": value for kind, value in ids.items() if value is not None}
    turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    if turn is not None and turn != ids["eos"]:
        result["eos_token_id"] = (
            [result["eos_token_id"], turn] if "eos_token_id" in result else turn
        )
    return result


KINDS = {"bos": "bos", "eos": "eos", "pad": "padding"}


def generation_config(file: File) -> dict[str, Any]:
    return token_ids(file)


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
    from jaxpost.models.model import Rope
    from jaxpost.models.transformer import rope_frequencies

    factors, theta = file.read(ROPE_FREQS), file.get("rope.freq_base", 10_000.0)
    factor = float(factors.max())
    rope = Rope(theta=theta, kind="llama3", factor=factor)
    expected = (
        rope_frequencies(Rope(theta=theta), head_dim)[0] / rope_frequencies(rope, head_dim)[0]
    )
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(
            f"{file.path}: tensor {ROPE_FREQS} rescales the rope in a way that is not supported "
            f"(only Llama 3's is)"
        )
    return {**LLAMA3, "factor": factor}


def gemma_fields(file: File, heads: int, width: int, head_dim: int) -> dict[str, Any]:
    """What only the Gemma family has. Gemma 3's pattern and local rope are not in the metadata."""
    layers = file.need("block_count")
    three = file.architecture.model_type == "gemma3_text"
    # The 27B models (46 layers in Gemma 2, 62 in Gemma 3) scale queries by width / heads instead.
    wide = layers == (GEMMA3_27B_LAYERS if three else 46)
    config = {
        "query_pre_attn_scalar": width // heads if wide else head_dim,
        "sliding_window": file.need("attention.sliding_window"),
        "attention_bias": False,
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }
    if three:
        config["rope_local_base_freq"] = file.get("rope.freq_base_swa", GEMMA3_LOCAL_THETA)
        kinds = [(i + 1) % GEMMA3_PERIOD != 0 for i in range(layers)]
        config["layer_types"] = ["sliding_attention" if k else "full_attention" for k in kinds]
    return config
