"""Recipes on pairs, from configuration to exported model, on a model of a few thousand parameters.

The chosen of a pair is a lower-case letter, the rejected one an upper-case letter. Held here: a
reward model tells them apart on prompts it never saw, and DPO makes the policy write what was
chosen; a run that was killed and resumed is the run that was not.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jaxpost import checkpoint, hub, optimizers, rollout, writer
from jaxpost import config as configs
from jaxpost.data import preferences, sources
from jaxpost.recipes import dpo, reward_model, setup, sft

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """120 pairs to train on and 30 held out."""
    folder, draw = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    rows = []
    for number in range(150):
        letter, length = chr(draw.integers(97, 123)), int(draw.integers(1, 4))
        rows.append(
            {
                "prompt": f"{number:03}:",
                "chosen": letter * length,
                "rejected": chr(draw.integers(65, 91)) * int(draw.integers(1, 4)),
            }
        )
    for name, part in {"train": rows[:120], "held_out": rows[120:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy that writes letters, one in five lower-case: an SFT on other prompts."""
    folder, draw = tmp_path_factory.mktemp("start"), np.random.default_rng(1)
    rows = []
    for number in range(300, 500):
        first = 97 if draw.random() < 0.2 else 65
        word = chr(first + draw.integers(26)) * int(draw.integers(1, 4))
        rows.append({"prompt": f"{number}:", "completion": word})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = sft.Config(
        run=str(folder / "run"),
        model=setup.ModelConfig(fresh=TINY, tokenizer="bytes"),
        data=sources.DataConfig(train=str(folder / "rows.jsonl"), max_length=32),
        optimizer=optimizers.OptimizerConfig(learning_rate=1e-2, schedule="constant"),
        batch_size=16,
        steps=60,
    )
    assert sft.train(config) == 0
    return folder / "run" / "model"


def config_of(recipe, run, data, *, rate=3e-3, steps=30, batch_size=16, start=None, **changes):
    fresh = setup.ModelConfig(fresh=TINY, tokenizer="bytes")
    return recipe.Config(
        run=str(run),
        model=fresh if start is None else setup.ModelConfig(path=str(start)),
        data=preferences.PairConfig(
            train=str(data / "train.jsonl"), eval=str(data / "held_out.jsonl"), max_length=32
        ),
        optimizer=optimizers.OptimizerConfig(learning_rate=rate, schedule="constant"),
        steps=steps,
        batch_size=batch_size,
        checkpoint=checkpoint.CheckpointConfig(every=10),
        **changes,
    )


def records(run) -> list[dict]:
    """What was logged, but for what depends on the clock."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in writer.WALL_CLOCK}
        for line in lines
    ]


def evaluations(run, name) -> list[float]:
    return [record[name] for record in records(run) if name in record]


def test_a_reward_model_tells_held_out_pairs_apart(data, tmp_path):
    """Accuracy from 0 (all rewards are 0, which is no preference) to at least 95 %."""
    config = config_of(reward_model, tmp_path / "run", data, microbatches=2, centering=0.01)
    assert reward_model.train(config) == 0
    first, last = evaluations(config.run, "eval/accuracy")
    assert first == 0.0
    assert last >= 0.95
    assert evaluations(config.run, "eval/calibration_error")[-1] < 0.2
    model, params, head = hub.load_reward_model(Path(config.run) / "model")
    assert head["weight"].shape == (32,)
    assert model.config.layers == 2


def lower_case(folder) -> float:
    """The share of sampled first letters that are lower-case, on prompts never seen."""
    model, params = hub.load_model(folder, dtype="float32")
    prompts = [list(f"{number}:".encode()) for number in range(200, 264)]
    drawn = rollout.sample(
        model, params, prompts, jax.random.key(0), max_new_tokens=1, temperature=1.0
    )
    return float(np.mean([97 <= token < 123 for token in drawn.tokens[:, 0]]))


LOSSES = ["dpo", "ipo_average", "hinge", "simpo", "apo_zero", {"dpo": 0.8, "nll": 0.2}]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_dpo_makes_the_policy_write_what_was_chosen(loss, data, start, tmp_path):
    """Of its own samples at temperature 1, lower case from at most 30 % to at least 80 %."""
    config = config_of(dpo, tmp_path / "run", data, start=start, loss=loss, microbatches=2)
    assert lower_case(start) <= 0.3
    assert dpo.train(config) == 0
    assert evaluations(config.run, "eval/rewards/accuracies")[-1] >= 0.95
    assert lower_case(Path(config.run) / "model") >= 0.8
