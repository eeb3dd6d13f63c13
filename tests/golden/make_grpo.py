"""Writes `grpo/`: a tiny Llama, and the first updates that TRL's GRPOTrainer makes of it.

The golden values come from PyTorch, which the package and its tests never need. To make them again:

    python3.11 -m venv golden-venv
    golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 numpy
    golden-venv/bin/python tests/golden/make_grpo.py

The folder is a model's (weights on the float16 grid); where there is a KL term the reference is the
same model with every weight times 7/8. `cases.json` holds each case's TRL settings, what TRL
sampled, the rewards and TRL's advantages, and of each update its rows and what TRL logged. Nothing
is recomputed. All is float32, with plain SGD and no clipping of the gradient. In the cases `ragged`
every eighth token ends a completion, in the others none does.
"""

import json
import logging
import pathlib
import shutil
import tempfile

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl

FOLDER = pathlib.Path(__file__).parent / "grpo"
VOCABULARY, PADDING, EOS = 48, 0, 1
STOPS = list(range(EOS, VOCABULARY, 8))
PROMPTS = ["3 14 15 9", "26 5 35 8 9 7 9", "32 38"]
GROUP, NEW_TOKENS = 4, 8
REFERENCE = 0.875
LOGGED = ("loss", "grad_norm", "entropy", "kl", "clip_ratio/region_mean")

FIXED = {"generation_kwargs": {"min_new_tokens": NEW_TOKENS}}
STALE = {"num_iterations": 3, "learning_rate": 0.2, "max_steps": 3}
CASES = {
    "fixed": {**FIXED, "loss_type": "grpo"},
    "fixed_kl": {**FIXED, "loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    "fixed_defaults_kl": {**FIXED, "beta": 0.3, "epsilon_high": 0.28},
    "fixed_dr_grpo_kl": {
        **{**FIXED, "loss_type": "dr_grpo", "scale_rewards": "none", "beta": 2.0},
        **{"use_bias_correction_kl": False, "temperature": 0.8},
    },
    "fixed_batch_scale": {**FIXED, "loss_type": "grpo", "scale_rewards": "batch"},
    "fixed_pass_fail": {**FIXED, "loss_type": "grpo"},
    "fixed_entropy": {**FIXED, "loss_type": "grpo", "entropy_coef": 0.05},
    "fixed_minibatches": {
        **{**FIXED, "loss_type": "grpo", "steps_per_generation": 3, "learning_rate": 0.2},
        **{"per_device_train_batch_size": 4, "max_steps": 3},
    },
    "fixed_stale": {**FIXED, **STALE, "loss_type": "grpo", "temperature": 1.3},
    "ragged_grpo": {**STALE, "loss_type": "grpo"},
    "ragged_dapo_kl": {**STALE, "loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.1},
    "ragged_dr_grpo": {
        **{**STALE, "loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 0.002},
    },
    "ragged_accumulated": {
        **{"loss_type": "dapo", "gradient_accumulation_steps": 3},
        **{"per_device_train_batch_size": 4, "beta": 0.1, "use_bias_correction_kl": False},
    },
    "ragged_gspo": {
        **{**STALE, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        **{"epsilon": 0.1, "epsilon_high": 0.15},
    },
    "ragged_cispo": {**STALE, "loss_type": "cispo", "epsilon_high": 1.3},
    "ragged_sapo": {**STALE, "loss_type": "sapo"},
}


def write_model(folder: pathlib.Path) -> None:
    """A Llama of two layers whose logits are far from flat."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=None,  # else PyTorch gives this token, where it is read, no gradient
        eos_token_id=EOS,
    )
    model = transformers.LlamaForCausalLM(config)
    draw = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = draw.normal(1.0 if "norm" in name else 0.0, 0.3, shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def write_reference(folder: pathlib.Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(REFERENCE)
    model.save_pretrained(folder)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A word is a number, which is its token; the first two are not numbers."""
    words = {"padding": PADDING, "eos": EOS} | {str(n): n for n in range(2, VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="padding"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="padding", eos_token="eos"
    )


class Watched(trl.GRPOTrainer):
    """Notes what TRL reads, and changes nothing."""

    def _tokenize_prompts(self, prompts):
        found = super()._tokenize_prompts(prompts)
        self.prompt_ids = found[0]
        return found

    def _compute_loss(self, model, inputs):
        ids, masks = (
            torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], dim=1)
            for kind in ("ids", "mask")
        )
        self.seen.append([row[mask > 0].tolist() for row, mask in zip(ids, masks, strict=True)])
        return super()._compute_loss(model, inputs)


def points(completion_ids: list[list[int]]) -> list[float]:
    """Deviations in a group are of tens, next to which TRL's epsilon of 1e-4 is nothing."""
    return [float(sum(ids)) for ids in completion_ids]


def passes(completion_ids: list[list[int]]) -> list[float]:
    return [float(sum(ids) % 3 == 0) for ids in completion_ids]


def run(case: str, settings: dict, reference: pathlib.Path, scratch: str) -> dict:
    drawn: dict[str, list] = {}
    judge = passes if "pass_fail" in case else points

    def reward(completion_ids, **_):
        assert not drawn, "one rollout a case"
        drawn.update(completions=completion_ids, rewards=judge(completion_ids))
        return drawn["rewards"]

    model = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    model.config._name_or_path = str(reference)  # from where TRL loads the reference
    model.generation_config.eos_token_id = STOPS if "ragged" in case else EOS
    rows = len(PROMPTS) * GROUP
    defaults = {
        **{"per_device_train_batch_size": rows, "max_steps": 1, "learning_rate": 0.1},
        **{"num_generations": GROUP, "max_completion_length": NEW_TOKENS},
    }
    arguments = trl.GRPOConfig(
        output_dir=scratch,
        seed=4,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_grad_norm=0.0,  # no clipping
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **(defaults | settings),
    )
    trainer = Watched(
        model,
        reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=arguments.learning_rate), None),
    )
    trainer.seen = []
    trainer.train()
    whole = [[*a, *b] for a, b in zip(trainer.prompt_ids, drawn["completions"], strict=True)]
    parts = [[whole.index(ids) for ids in part] for part in trainer.seen]
    each = arguments.gradient_accumulation_steps
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "trl": defaults | settings,
        "prompts": trainer.prompt_ids[::GROUP],
        "completions": drawn["completions"],
        "rewards": drawn["rewards"],
        "advantages": list(trainer._logs["advantages"]),
        "updates": [
            {"rows": [row for part in parts[number * each : (number + 1) * each] for row in part]}
            | {name: log[name] for name in LOGGED if name in log}
            for number, log in enumerate(logs)
        ],
    }


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_model(FOLDER)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        reference = pathlib.Path(scratch) / "reference"
        write_reference(reference)
        for case, settings in CASES.items():
            found[case] = run(case, settings, reference, scratch)
            lengths = [len(ids) for ids in found[case]["completions"]]
            print(case, lengths, found[case]["rewards"])
            for update in found[case]["updates"]:
                print("   ", {name: value for name, value in update.items() if name != "rows"})
    lines = (f"{json.dumps(case)}: {json.dumps(value)}" for case, value in found.items())
    (FOLDER / "cases.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
