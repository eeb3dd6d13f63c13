"""Recipes on pairs, from configuration to exported model, on a model of a few thousand parameters.

The chosen of a pair is a lower-case letter, the rejected one an upper-case letter. Held here: a
reward model tells them apart on prompts it never saw, and DPO makes the policy write what was
chosen; a run that was killed and resumed is the run that was not.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny import TINY, logged, records

from jaxpost import __main__ as cli
from jaxpost import checkpoint, hub, optimizers, rollout
from jaxpost.data import chat, preferences, rows, sources, tokenizers
from jaxpost.recipes import dpo, reward_model, setup, sft


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """120 pairs to train on and 30 held out."""
    folder, draw = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    lines = []
    for number in range(150):
        letter, length = chr(draw.integers(97, 123)), int(draw.integers(1, 4))
        lines.append(
            {
                "prompt": f"{number:03}:",
                "chosen": letter * length,
                "rejected": chr(draw.integers(65, 91)) * int(draw.integers(1, 4)),
            }
        )
    for name, part in {"train": lines[:120], "held_out": lines[120:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A policy that writes letters, one in five lower-case: an SFT on other prompts."""
    folder, draw = tmp_path_factory.mktemp("start"), np.random.default_rng(1)
    lines = []
    for number in draw.integers(300, 1000, 5000):
        first = 97 if draw.random() < 0.2 else 65
        word = chr(first + draw.integers(26)) * int(draw.integers(1, 4))
        lines.append(json.dumps({"prompt": f"{number}:", "completion": word}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    config = sft.Config(
        run=str(folder / "run"),
        model=setup.ModelConfig(fresh=TINY, tokenizer="bytes"),
        data=sources.DataConfig(train=str(folder / "rows.jsonl"), max_length=32),
        optimizer=optimizers.OptimizerConfig(learning_rate=3e-3, schedule="cosine"),
        batch_size=32,
        steps=150,
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


def test_a_reward_model_tells_held_out_pairs_apart(data, tmp_path, capsys):
    """Accuracy from 0 (all rewards are 0, which is no preference) to at least 95 %.

    `jaxpost eval` of the folder says the same.
    """
    config = config_of(reward_model, tmp_path / "run", data, microbatches=2, centering=0.01)
    assert reward_model.train(config) == 0
    first, last = logged(config.run, "eval/accuracy")
    assert first == 0.0
    assert last >= 0.95
    assert logged(config.run, "eval/calibration_error")[-1] < 0.2
    model, _, head = hub.load_reward_model(Path(config.run) / "model")
    assert head["weight"].shape == (32,)
    assert model.config.layers == 2
    capsys.readouterr()
    held_out = str(data / "held_out.jsonl")
    assert cli.main(["eval", f"{config.run}/model", held_out, "--rows", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["eval/accuracy"] >= 0.95
    assert found.keys() == {n for n in records(config.run)[0] if n.startswith("eval/")}


def lower_case(folder) -> float:
    """The share of sampled completions that begin in lower case, on prompts never seen."""
    model, params = hub.load_model(folder, dtype="float32")
    tokenizer = tokenizers.load_tokenizer(folder)
    asked = [rows.PromptRow(f"{number}:") for number in range(200, 264)]
    prompts = [chat.prompt_ids(row, tokenizer, chat.ChatOptions()) for row in asked]
    drawn = rollout.sample(model, params, prompts, jax.random.key(0), max_new_tokens=1)
    return float(np.mean([tokenizer.decode(row.tolist()).islower() for row in drawn.tokens]))


@pytest.mark.parametrize(
    "loss",
    ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ipo_average", "simpo"))],
)
def test_a_loss_of_pairs_alone_teaches_which_is_better(loss, data, tmp_path):
    """Held-out accuracy of the implicit rewards to at least 95 %, from a fresh model."""
    config = config_of(dpo, tmp_path / "run", data, loss=loss, microbatches=2)
    assert dpo.train(config) == 0
    assert logged(config.run, "eval/rewards/accuracies")[-1] >= 0.95


def test_dpo_makes_the_policy_write_what_was_chosen(data, start, tmp_path):
    """Of its own samples at temperature 1, lower case from at most 30 % to at least 80 %.

    With a likelihood term: by pairs alone this tiny model learns to write neither.
    """
    loss = {"dpo": 1.0, "nll": 0.2}
    config = config_of(dpo, tmp_path / "run", data, start=start, rate=1e-3, steps=120, loss=loss)
    assert lower_case(start) <= 0.3
    assert dpo.train(config) == 0
    assert lower_case(Path(config.run) / "model") >= 0.8


def test_a_resumed_run_is_the_run_that_was_not_stopped(data, start, tmp_path):
    """Ended after 10 updates, then asked for 20; the reference is still the start."""
    straight = config_of(dpo, tmp_path / "straight", data, start=start, rate=1e-3, steps=20)
    assert dpo.train(straight) == 0
    first = config_of(dpo, tmp_path / "parts", data, start=start, rate=1e-3, steps=10)
    assert dpo.train(first) == 0
    second = config_of(dpo, tmp_path / "parts", data, start=start, rate=1e-3, steps=20)
    assert dpo.train(second) == 0
    done = [Path(c.run) / "model" / "model.safetensors" for c in (straight, second)]
    assert done[0].read_bytes() == done[1].read_bytes()


def test_the_loss_is_that_of_the_reference_at_the_start(data, start, tmp_path):
    """Before any update policy and reference are one: DPO's loss is log 2, margins are 0."""
    config = config_of(dpo, tmp_path / "run", data, start=start, steps=1, microbatches=4)
    assert dpo.train(config) == 0
    first = next(record for record in records(config.run) if "eval/loss" in record)
    np.testing.assert_allclose(first["eval/loss"], np.log(2), atol=1e-5)
    np.testing.assert_allclose(first["eval/rewards/margins"], 0.0, atol=1e-4)
    loss = next(record["loss"] for record in records(config.run) if "loss" in record)
    np.testing.assert_allclose(loss, np.log(2), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": "dop"}, "do you mean dpo"),
        ({"loss": "orpo", "beta": 0.1}, "beta is 0.1, which loss: orpo does not look at"),
        ({"loss": "simpo", "reference": "x"}, "has no reference; remove reference"),
        ({"loss": "aot", "microbatches": 2}, "set microbatches to 1"),
        ({"label_smoothing": 0.1, "loss": "hinge"}, "label_smoothing is 0.1"),
        ({"batch_size": 10, "microbatches": 4}, "microbatches"),
    ],
)
def test_what_a_loss_does_not_look_at_is_refused(changes, told, data, tmp_path):
    with pytest.raises(ValueError, match=told):
        config_of(dpo, tmp_path / "run", data, **changes)


def test_microbatches_do_not_change_an_update(data, start, tmp_path):
    """Loss and gradient norm of the first update, in 1, 2 and 4 parts."""
    found = []
    for parts in (1, 2, 4):
        folder = tmp_path / str(parts)
        config = config_of(dpo, folder, data, start=start, steps=1, microbatches=parts)
        assert dpo.train(config) == 0
        found.append(next(r for r in records(config.run) if "grad_norm" in r))
    for other in found[1:]:
        np.testing.assert_allclose(other["grad_norm"], found[0]["grad_norm"], rtol=1e-5)
        np.testing.assert_allclose(other["loss"], found[0]["loss"], atol=1e-6)
