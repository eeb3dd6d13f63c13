"""Writes `reward_models/`: tiny reward models as transformers and TRL save them, and their rewards.

The golden values come from PyTorch, which the package and its tests never need. To make them again:

    python3.11 -m venv golden-venv
    golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 numpy
    golden-venv/bin/python tests/golden/make_reward_model.py

Each case is a folder of AutoModelForSequenceClassification with one label. `rewards.json` holds the
rows read, each without its padding, and the logits that transformers gives for the padded batch.

To check by hand that folders of ours load there (`jaxpost.hub.save_reward_model`), with no missing
and no unexpected key, and give the rewards of the case they were made from:

    golden-venv/bin/python tests/golden/make_reward_model.py check CASE FOLDER
"""

import json
import pathlib
import shutil
import sys
import tempfile

import datasets
import make_grpo
import numpy as np
import torch
import transformers
import trl

FOLDER = pathlib.Path(__file__).parent / "reward_models"
ROWS = [[5, 9, 30, 31, 2, 7, 44, 1], [17, 3, 28, 12, 1]]
SIZES = {
    "vocab_size": make_grpo.VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": make_grpo.EOS,
    "num_labels": 1,
}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, pad_token_id=make_grpo.PADDING),
    "qwen2": transformers.Qwen2Config(
        **SIZES, pad_token_id=make_grpo.PADDING, tie_word_embeddings=True
    ),
    "trl": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
}
PAIRS = {"prompt": ["3 14 15 9"], "chosen": [" 20 8 41"], "rejected": [" 6"]}


def fresh(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """A model whose rewards are far from 0 and whose norms and biases matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def rewards(model: transformers.PreTrainedModel) -> list[float]:
    length = max(map(len, ROWS))
    padded = [row + [make_grpo.PADDING] * (length - len(row)) for row in ROWS]
    mask = [[1] * len(row) + [0] * (length - len(row)) for row in ROWS]
    with torch.no_grad():
        return model(torch.tensor(padded), torch.tensor(mask)).logits[:, 0].tolist()


def save_by_trl(model: transformers.PreTrainedModel, folder: pathlib.Path) -> None:
    """One step of RewardTrainer, then what its `save_model` writes."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = trl.RewardConfig(
            output_dir=scratch, max_steps=1, use_cpu=True, report_to=[], bf16=False
        )
        trainer = trl.RewardTrainer(
            model=model,
            args=settings,
            train_dataset=datasets.Dataset.from_dict(PAIRS),
            processing_class=make_grpo.make_tokenizer(),
        )
        trainer.train()
        trainer.save_model(folder)
    (folder / "training_args.bin").unlink()


def main() -> None:
    torch.set_num_threads(1)
    shutil.rmtree(FOLDER, ignore_errors=True)
    found = {}
    for case, config in CONFIGS.items():
        model = fresh(config)
        if case == "trl":
            save_by_trl(model, FOLDER / case)
        else:
            model.save_pretrained(FOLDER / case)
        found[case] = rewards(model.eval())
    (FOLDER / "rewards.json").write_text(json.dumps({"rows": ROWS, **found}) + "\n")
    print(found)


def check(case: str, folder: str) -> None:
    torch.set_num_threads(1)
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True
    )
    problems = {name: value for name, value in info.items() if value}
    expected = json.loads((FOLDER / "rewards.json").read_text())[case]
    gap = np.abs(np.array(rewards(model.eval())) - expected).max()
    good = gap < 1e-5 and not problems and model.config.num_labels == 1
    print("ok" if good else "FAIL", folder, f"{gap:.1e}", problems)


if __name__ == "__main__":
    check(*sys.argv[2:]) if sys.argv[1:2] == ["check"] else main()
