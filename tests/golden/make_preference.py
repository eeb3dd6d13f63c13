"""Writes `preference.json`: the first update that TRL's preference and reward trainers make.

The golden values come from PyTorch, which the package and its tests never need. To make them again:

    python3.11 -m venv golden-venv
    golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 trl==1.16.0 numpy
    golden-venv/bin/python tests/golden/make_preference.py

The model is that of `grpo/`, the reference the same with every weight times 7/8. Every case is one
batch of the same pairs, or of their completions one by one; `tokens` is what TRL made of them, by
trainer. A case has TRL's settings, its loss, the global norm of its gradient and what it logged. In
the cases `swapped` the reference is trained and the model is its reference, which makes KTO's KL
positive. All is float32.
"""

import json
import logging
import pathlib
import tempfile

import datasets
import make_grpo
import numpy as np
import torch
import transformers
import trl
from trl.experimental import cpo, orpo

FILE = pathlib.Path(__file__).parent / "preference.json"
PAIRS = {
    "prompt": ["3 14 15 9", "26 5 35 8 9 7 9", "32 38", "46 26 43 38"],
    "chosen": [" 20 8 41", " 33 2", " 7 45 12 12 30", " 19 4 28"],
    "rejected": [" 6", " 40 17 33 9 22", " 7 45 31", " 11 24 36"],
    "margin": [1.0, 0.5, 0.25, 0.0],
}
LOGGED = ("loss", "grad_norm", "kl", "logps/chosen", "logps/rejected", "rewards/accuracies")

DPO = {
    "sigmoid": {},
    "sigmoid_beta": {"beta": 0.5},
    "hinge": {"loss_type": "hinge"},
    "ipo": {"loss_type": "ipo"},
    "exo_pair": {"loss_type": "exo_pair", "label_smoothing": 0.1},
    "nca_pair": {"loss_type": "nca_pair"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.1},
    "bco_pair": {"loss_type": "bco_pair"},
    "sppo_hard": {"loss_type": "sppo_hard"},
    "aot": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot_unpaired": {"loss_type": "aot_unpaired", "label_smoothing": 0.1},
    "apo_zero": {"loss_type": "apo_zero"},
    "apo_down": {"loss_type": "apo_down"},
    "discopop": {"loss_type": "discopop"},
    "sft": {"loss_type": "sft"},
    "sigmoid_norm": {"loss_type": "sigmoid_norm", "beta": 2.0},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {
        **{"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
    },
    "ipo_js_divergence": {"loss_type": "ipo", "f_divergence_type": "js_divergence"},
    "length_desensitized": {"ld_alpha": 0.3},
    "weighted": {"use_weighting": True},
    "mixed": {
        **{"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    },
}
KTO = {
    "kto": {},
    "kto_swapped": {},
    "kto_swapped_weights": {"desirable_weight": 0.75, "undesirable_weight": 1.5, "beta": 0.3},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
}
CPO = {
    "cpo": {},
    "cpo_alone": {"cpo_alpha": 0.0, "label_smoothing": 0.1},
    "cpo_hinge": {"loss_type": "hinge"},
    "cpo_ipo": {"loss_type": "ipo", "cpo_alpha": 0.0},
    "simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5},
    "cpo_simpo": {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.1},
    "alphapo": {
        **{"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 0.25},
        **{"alpha": 0.25},
    },
}
ORPO = {"orpo": {}, "orpo_beta": {"beta": 1.0}}
REWARD = {
    "reward": {},
    "reward_margin": {},
    "reward_centred": {"center_rewards_coefficient": 0.01},
}


def load(kind=transformers.LlamaForCausalLM, **settings):
    return kind.from_pretrained(make_grpo.FOLDER, dtype=torch.float32, **settings)


def reference():
    model = load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(make_grpo.REFERENCE)
    return model


def reward_model():
    model = load(transformers.LlamaForSequenceClassification, num_labels=1)
    model.config.pad_token_id = make_grpo.PADDING  # by which the last token is found
    with torch.no_grad():
        head = np.random.default_rng(1).normal(0.0, 0.3, tuple(model.score.weight.shape))
        model.score.weight.copy_(torch.from_numpy(head.astype(np.float16).astype(np.float32)))
    return model


def singles() -> dict[str, list]:
    """Three chosen completions, then three rejected ones."""
    kinds = ("chosen", "rejected")
    return {
        "prompt": PAIRS["prompt"][:3] + PAIRS["prompt"][1:],
        "completion": PAIRS[kinds[0]][:3] + PAIRS[kinds[1]][1:],
        "label": [True] * 3 + [False] * 3,
    }


def run(trainer_kind, config_kind, model, rows: dict, settings: dict, scratch: str, **more):
    class Watched(trainer_kind):
        """Notes the loss, which is logged with fewer digits, and changes nothing."""

        def compute_loss(self, *arguments, **named):
            loss = super().compute_loss(*arguments, **named)
            self.seen.append(loss.item())
            return loss

    arguments = config_kind(
        output_dir=scratch,
        per_device_train_batch_size=len(rows["prompt"]),
        max_steps=1,
        learning_rate=0.1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_grad_norm=0.0,  # no clipping
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = Watched(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=make_grpo.make_tokenizer(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        **more,
    )
    trainer.seen = []
    trainer.train()
    (log,) = (log for log in trainer.state.log_history if "grad_norm" in log)
    (loss,) = trainer.seen
    found = {name: log[name] for name in LOGGED if name in log}
    columns = [name for name in trainer.train_dataset.column_names if name.endswith("ids")]
    tokens = {name: list(trainer.train_dataset[name]) for name in columns}
    return {"trl": settings, **found, "loss": loss}, tokens


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    pairs = {name: column for name, column in PAIRS.items() if name != "margin"}
    kinds = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig, DPO, pairs),
        "kto": (trl.KTOTrainer, trl.KTOConfig, KTO, singles()),
        "cpo": (cpo.CPOTrainer, cpo.CPOConfig, CPO, pairs),
        "orpo": (orpo.ORPOTrainer, orpo.ORPOConfig, ORPO, pairs),
        "reward": (trl.RewardTrainer, trl.RewardConfig, REWARD, pairs),
    }
    written = {"head": reward_model().score.weight[0].tolist(), "margins": PAIRS["margin"]}
    written["labels"] = singles()["label"]
    with tempfile.TemporaryDirectory() as scratch:
        for kind, (trainer, config, cases, rows) in kinds.items():
            for case, settings in cases.items():
                model = reward_model() if kind == "reward" else load()
                more = {"ref_model": reference()} if kind in ("dpo", "kto") else {}
                if "swapped" in case:
                    model, more = more["ref_model"], {"ref_model": model}
                given = PAIRS if case == "reward_margin" else rows
                found, tokens = run(trainer, config, model, given, settings, scratch, **more)
                known = written.setdefault(f"tokens_{kind}", tokens)
                assert all(known[name] == column for name, column in tokens.items())
                written[case] = found
                print(case, found)
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in written.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
