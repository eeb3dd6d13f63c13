"""Writes `adapters/`: a tiny Llama, adapters that real PEFT made for it, and PEFT's logits.

The golden values come from PyTorch, which the package and its tests never need. To make them again:

    python3.11 -m venv golden-venv
    golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2 numpy
    golden-venv/bin/python tests/golden/make_adapters.py

`base/` is the model's folder; each case is a PEFT adapter folder with its `logits.npy` [2, 12, V].
"""

import pathlib
import shutil

import numpy as np
import peft
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "adapters"
TOKENS = np.random.default_rng(7).integers(0, 61, (2, 12))

CASES = {
    "plain": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "exclude_modules": ["o_proj"],
        "use_rslora": True,
        "rank_pattern": {"down_proj": 3, "self_attn.k_proj": 2},
        "alpha_pattern": {"(gate|up)_proj": 5},
    },
    "regex": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": r".*\.mlp\.(up|down)_proj",
        "lora_dropout": 0.1,
    },
}


def base() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + torch.randn_like(parameter) * 0.2)
    return model


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    np.save(FOLDER / "tokens.npy", TOKENS)
    base().save_pretrained(FOLDER / "base")
    for name, options in CASES.items():
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        model = peft.get_peft_model(base(), config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_B" in parameter_name:
                    parameter.normal_(std=0.1)
            logits = model(torch.tensor(TOKENS)).logits
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink(missing_ok=True)
        np.save(FOLDER / name / "logits.npy", logits.float().numpy())
        print(name, tuple(logits.shape), float(logits.abs().max()))


if __name__ == "__main__":
    main()
