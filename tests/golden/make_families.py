"""Writes `families/<case>.json` and `.npz`: tiny random models and the logits transformers gives.

The golden values come from PyTorch, which the package and its tests never need. To make them again:

    python3.11 -m venv golden-venv
    golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 numpy
    golden-venv/bin/python tests/golden/make_families.py

A case holds, beside the weights (under their Hugging Face names, drawn on the float16 grid so that
half the bytes hold them exactly), one batch of five rows:

    rows 0, 1   full length, longer than every sliding window
    row 2       padded on the left, run with an attention mask
    row 3       padded on the right, run with an attention mask
    row 4       three sequences packed one after another and padded; each was run on its own

`logits` are float32, from eager attention, and 0 at padding. `<case>.json` holds the config as a
user wrote it (`given`) and as transformers saves it (`saved`).
"""

import json
import pathlib
import tempfile

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "families"
LENGTH, PADDING = 40, 9
PACKED = (5, 17, 14)

SMALL = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SLIDING, FULL = "sliding_attention", "full_attention"

CASES = {
    "llama_tied_gqa": {
        **{"model_type": "llama", "hidden_size": 36, "num_attention_heads": 6},
        **{"rope_theta": 100_000, "rope_scaling": None, "tie_word_embeddings": True},
        **{"rms_norm_eps": 1e-5, "rope_interleaved": False, "torch_dtype": "bfloat16"},
    },
    "llama_untied_mqa": {
        **{"model_type": "llama", "num_key_value_heads": 1, "head_dim": 10},
        **{"rms_norm_eps": 1e-2, "hidden_act": "gelu"},
    },
    "llama_llama3_biases": {
        **{"model_type": "llama", "head_dim": 16, "rope_theta": 500.0, "rope_scaling": LLAMA3},
        **{"attention_bias": True, "mlp_bias": True, "num_key_value_heads": None},
    },
    "llama_linear": {
        **{"model_type": "llama", "head_dim": 6, "rope_theta": 10_000.0},
        **{"rope_scaling": {"type": "linear", "factor": 2.5}},
    },
    "llama_yarn": {
        **{"model_type": "llama", "head_dim": 16, "tie_word_embeddings": True},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0},
            **{"original_max_position_embeddings": 32, "beta_fast": 2.0, "beta_slow": 0.5},
        },
    },
    "mistral_window": {"model_type": "mistral", "sliding_window": 7, "head_dim": 10},
    "mistral_yarn": {
        **{"model_type": "mistral", "sliding_window": None, "head_dim": 20, "dtype": "float32"},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "truncate": False},
            **{"original_max_position_embeddings": 16, "mscale": 1.2, "mscale_all_dim": 0.7},
        },
    },
    "qwen2_tied": {
        **{"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1_000_000.0},
        **{"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
    },
    "qwen2_sliding": {
        **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6},
        **{"max_window_layers": 1, "num_key_value_heads": 1, "head_dim": 6},
    },
    "qwen2_layer_types": {
        **{"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9},
        **{"layer_types": [SLIDING, FULL, SLIDING]},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    },
    "qwen3": {
        **{"model_type": "qwen3", "head_dim": 10, "attention_bias": True},
        **{"rope_theta": 1_000_000, "hidden_size": 28},
    },
    "qwen3_sliding_tied": {
        **{"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
        **{"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 5},
        **{"layer_types": [FULL, SLIDING, SLIDING], "hidden_act": "gelu_pytorch_tanh"},
    },
    "gemma2": {
        **{"model_type": "gemma2", "head_dim": 10, "sliding_window": 6, "rope_theta": 10_000.0},
        **{"query_pre_attn_scalar": 14, "attn_logit_softcapping": 3.0},
        **{"final_logit_softcapping": 5.0, "hidden_act": "gelu_pytorch_tanh"},
        **{"hidden_activation": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
    },
    "gemma2_untied_mqa": {
        **{"model_type": "gemma2", "head_dim": 6, "num_key_value_heads": 1, "sliding_window": 8},
        **{"query_pre_attn_scalar": 8, "attn_logit_softcapping": None},
        **{"final_logit_softcapping": None, "attention_bias": True},
        **{"tie_word_embeddings": False, "layer_types": [FULL, SLIDING, FULL]},
    },
    "gemma3_default_pattern": {
        **{"model_type": "gemma3_text", "head_dim": 10, "sliding_window": 5},
        **{"hidden_size": 20, "num_hidden_layers": 7, "num_key_value_heads": 1},
        **{"rope_theta": 500_000.0, "rope_local_base_freq": 300.0, "query_pre_attn_scalar": 12},
        **{"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    },
    "gemma3_nested_ropes": {
        **{"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 6},
        **{"num_hidden_layers": 4, "tie_word_embeddings": False, "query_pre_attn_scalar": 24},
        **{"layer_types": [SLIDING, FULL, SLIDING, FULL], "final_logit_softcapping": 4.0},
        "rope_parameters": {
            FULL: {**LLAMA3, "rope_theta": 50_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 200.0},
        },
    },
    "gemma3_pattern": {
        **{"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4},
        **{"sliding_window_pattern": 2, "query_pre_attn_scalar": 8, "attention_bias": True},
    },
}


def draw(model: torch.nn.Module, gemma: bool, generator: np.random.Generator) -> None:
    """Random weights on the float16 grid; norms and biases far from their initial values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            if "norm" in name:
                values = generator.uniform(0.5, 1.5, shape) - gemma
            elif name.endswith("bias"):
                values = generator.normal(0, 0.3, shape)
            elif "embed" in name:
                values = generator.normal(
                    0, 0.4 if model.config.tie_word_embeddings else 2.0, shape
                )
            else:
                values = generator.normal(0, 1.5 / np.sqrt(shape[1]), shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float16).astype(np.float32)))


def run(model: torch.nn.Module, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        inputs = torch.from_numpy(tokens[None].astype(np.int64))
        attention_mask = torch.from_numpy(mask[None].astype(np.int64))
        return model(input_ids=inputs, attention_mask=attention_mask).logits[0].numpy()


def batch(model: torch.nn.Module, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """The five rows of a case."""
    vocab = model.config.vocab_size
    tokens = generator.integers(0, vocab, (5, LENGTH)).astype(np.int32)
    segment_ids = np.ones((5, LENGTH), np.int32)
    segment_ids[2, :PADDING] = 0
    segment_ids[3, LENGTH - PADDING :] = 0
    logits = np.zeros((5, LENGTH, vocab), np.float32)
    for row in range(4):
        real = segment_ids[row] > 0
        logits[row] = np.where(real[:, None], run(model, tokens[row], real), 0)
    segment_ids[4], start = 0, 0
    for number, length in enumerate(PACKED, 1):
        here = slice(start, start + length)
        segment_ids[4, here] = number
        logits[4, here] = run(model, tokens[4, here], np.ones(length, bool))
        start += length
    return {"tokens": tokens, "segment_ids": segment_ids, "logits": logits}


def saved_config(model: transformers.PreTrainedModel) -> dict:
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return json.loads((pathlib.Path(folder) / "config.json").read_text())


def write(case: str, given: dict, seed: int) -> None:
    generator = np.random.default_rng(seed)
    fields = {name: value for name, value in given.items() if name != "model_type"}
    fields = json.loads(json.dumps(fields))  # transformers edits nested dictionaries in place
    config = transformers.AutoConfig.for_model(given["model_type"], **fields)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    draw(model, "gemma" in given["model_type"], generator)
    weights = {
        f"weights/{name}": value.numpy().astype(np.float16)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" or not config.tie_word_embeddings
    }
    np.savez(FOLDER / f"{case}.npz", allow_pickle=False, **weights, **batch(model, generator))
    text = json.dumps({"given": given, "saved": saved_config(model)}, indent=1)
    (FOLDER / f"{case}.json").write_text(text + "\n")


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for seed, (case, settings) in enumerate(CASES.items()):
        write(case, {**SMALL, **settings}, seed)
        print(case)


if __name__ == "__main__":
    main()
