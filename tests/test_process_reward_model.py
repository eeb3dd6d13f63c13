"""A process reward model from labelled steps, on a model of a few thousand parameters.

A step is one of nine letters, several times; it is right if the letter is lower-case.
"""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import TINY, logged, records

from jaxpost import __main__ as cli
from jaxpost import checkpoint, hub, losses, optimizers, rewards, train_step
from jaxpost.data import preferences
from jaxpost.models import heads
from jaxpost.recipes import experience, judge, pairwise, process_reward_model, setup, verdicts

pytestmark = pytest.mark.usefixtures("compiled")

LOGITS = np.array([1.0, 0.2, -0.6])  # of three steps, for all that is computed by hand


def solution(number, draw, steps, length):
    """A step in five has no label, but for the first."""
    firsts = [chr(draw.choice([65, 97], p=[0.4, 0.6]) + draw.integers(9)) for _ in range(steps)]
    labels = [None if n and draw.random() < 0.2 else s.islower() for n, s in enumerate(firsts)]
    words = [letter * length for letter in firsts]
    return {"prompt": f"{number:03}:", "completions": words, "labels": labels}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """400 solutions to train on and 40 held out, alike in length for speed; 8 of any length."""
    folder, draw = tmp_path_factory.mktemp("steps"), np.random.default_rng(0)
    rows = [solution(number, draw, 3, 2) for number in range(440)]
    write(folder / "train.jsonl", rows[:400])
    write(folder / "held_out.jsonl", rows[400:])
    several = [solution(n, draw, *draw.integers(1, 5, 2)) for n in range(8)]
    write(folder / "several.jsonl", several)
    return folder


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(folder, run, *, train="train", batch_size=16, **changes):
    given = {
        "model": setup.ModelConfig(fresh=TINY, tokenizer="bytes", remat="none"),
        "data": preferences.StepConfig(
            train=str(folder / f"{train}.jsonl"), eval=str(folder / "held_out.jsonl"), max_length=32
        ),
        "optimizer": optimizers.OptimizerConfig(learning_rate=3e-3, schedule="constant"),
        "checkpoint": checkpoint.CheckpointConfig(every=30),
    }
    return process_reward_model.Config(run=str(run), batch_size=batch_size, **{**given, **changes})


# The objective ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "loss"), [([1.0, 0.5, 0.0], 0.482963), ([1.0, 1.0, 0.0], 0.449630)]
)
def test_the_loss_by_hand(labels, loss):
    """The mean over the steps (of which a fourth has no label), soft labels and hard ones."""
    mask = np.array([[True, True, True, False]])
    given = np.array([[*labels, 0.0]], np.float32)
    logits = jnp.array([[*LOGITS, 0.0]], jnp.float32)

    def known(params, batch):
        each = losses.value_bce(logits, batch.labels)
        return verdicts.Verdicts(logits, jnp.where(batch.completion_mask, each, 0.0))

    batch = verdicts.Batch(None, mask, given, pairwise.mean_weights(mask))
    found, sums = verdicts.make_objective(known)({}, batch)
    np.testing.assert_allclose(found, loss, atol=1e-6)
    assert sums["places"] == 3
    assert sums["accuracy"] == 3  # a half counts as right
    np.testing.assert_allclose(
        sums["margin"], np.sum((2 * np.array(labels) - 1) * LOGITS), rtol=1e-6
    )


def test_measures_of_solutions_by_hand():
    """Steps right, wrong | wrong | right | right, wrong; the second is taken for right."""
    found = verdicts.Found(
        logits=np.array([1.0, -1.0, 2.0, 0.5, -0.5, -2.0]),
        losses=np.zeros(6),
        labels=np.array([1.0, 0.0, 0.0, 1.0, 0.75, 0.25]),
        solutions=np.array([0, 0, 2, 3, 5, 5]),
    )
    shown = process_reward_model.solution_measures(found)
    assert shown["solution_accuracy"] == 0.5  # the last solution's first error is its second step
    assert shown["first_error_accuracy"] == pytest.approx(1 / 3)
    assert shown["right_solution_accuracy"] == 1.0
    assert shown["f1"] == pytest.approx(0.5)
    one = process_reward_model.solution_measures(
        found._replace(labels=np.ones(6), logits=np.ones(6))
    )
    assert one == {"solution_accuracy": 1.0, "right_solution_accuracy": 1.0}
    of_places = verdicts.place_measures(found)
    assert of_places["accuracy"] == pytest.approx(4 / 6)
    assert of_places["majority"] == 0.5


@pytest.fixture(scope="module")
def policy():
    fresh = setup.ModelConfig(fresh=TINY, tokenizer="bytes", remat="none")
    return setup.load_policy(fresh, jax.random.key(0))


def rows_of(config, policy):
    """The first batch."""
    data = pairwise.data(config, policy.tokenizer, policy.model, read=preferences.steps, once=True)
    with contextlib.closing(data):
        return next(data)[0]


def with_head(policy):
    """Parameters with a head that is not 0."""
    weight = jax.random.normal(jax.random.key(1), (policy.model.config.width,))
    return pairwise.with_head(policy, {"weight": weight, "bias": jnp.float32(0.5)})[0]


def logits_of(policy, rows) -> np.ndarray:
    """Of the labelled steps, each row read as it stands."""

    @jax.jit
    def read(params, inputs, segments):
        hidden = policy.model.apply(params["model"], inputs, segments, None, None)
        return heads.read(params["head"], hidden)

    return np.asarray(read(with_head(policy), rows.inputs, rows.segment_ids))[rows.step_mask]


class Update:
    """A first update from a model and a head that are not 0."""

    def __init__(self, config, policy):
        model, self.params = policy.model, with_head(policy)
        self.rows = rows_of(config, policy)
        batch = verdicts.make_batch(self.rows)
        _, batch = experience.laid_out(batch, config.microbatches, model)
        objective = process_reward_model.make_objective(config, model)
        step = setup.make_update(config, objective, optax.sgd(1.0), None)
        state = train_step.init_state(jax.tree.map(jnp.copy, self.params), optax.sgd(1.0))
        state, self.sums = step(state, batch)
        self.gradient = jax.tree.map(jnp.subtract, self.params, state.params)


def test_microbatches_and_packing_do_not_change_an_update(data, policy, tmp_path):
    """Loss and gradient in 1 and 4 parts; the loss is that of each row read on its own."""
    first, other = (
        Update(config_of(data, tmp_path, train="several", batch_size=8, microbatches=parts), policy)
        for parts in (1, 4)
    )
    np.testing.assert_allclose(other.sums["loss"], first.sums["loss"], rtol=1e-5)
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, other.gradient, first.gradient))
    assert norm < 1e-5 * optax.tree.norm(first.gradient)
    labels = jnp.asarray(first.rows.labels[first.rows.step_mask])
    each = losses.value_bce(jnp.asarray(logits_of(policy, first.rows)), labels)
    np.testing.assert_allclose(first.sums["loss"], np.mean(each), rtol=1e-5)
    lines = (data / "several.jsonl").read_text().splitlines()
    given = [label for line in lines for label in json.loads(line)["labels"]]
    assert None in given
    assert first.sums["places"] == sum(label is not None for label in given)


def test_a_step_without_a_label_is_read_and_not_judged(data, policy, tmp_path):
    """The others are judged as if it had one, and not as if it were not there."""
    labels, logits = {"all": [1, 0, 1], "null": [1, None, 1], "gone": [1, 1]}, {}
    for name, given in labels.items():
        steps = ["aa", "B", "ccc"] if len(given) == 3 else ["aa", "ccc"]
        write(data / f"{name}.jsonl", [{"prompt": "1:", "completions": steps, "labels": given}])
        config = config_of(data, tmp_path, train=name, batch_size=1)
        logits[name] = logits_of(policy, rows_of(config, policy))
    np.testing.assert_allclose(logits["null"], logits["all"][[0, 2]], rtol=1e-5)
    assert abs(logits["gone"][1] - logits["null"][1]) > 1e-3


# Runs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(data, tmp_path_factory):
    config = config_of(data, tmp_path_factory.mktemp("learnt") / "run", steps=60)
    assert process_reward_model.train(config) == 0
    return config


def test_it_learns_which_steps_are_right(learnt):
    """Held-out accuracy from a guess to 30 % over always saying what is more often so."""
    first, last = (
        {n.removeprefix("eval/"): v for n, v in r.items()}
        for r in records(learnt.run)
        if "eval/loss" in r
    )
    np.testing.assert_allclose(first["loss"], np.log(2), atol=1e-5)
    assert last["majority"] < 0.7
    assert last["accuracy"] >= last["majority"] + 0.3
    assert last["f1"] >= 0.9 > first["f1"]
    assert last["calibration_error"] < 0.1
    assert last["margin"] > 2.0 > first["margin"] == 0.0


def test_the_folder_scores_steps_as_training_measured_them(learnt, data, capsys):
    """`jaxpost eval` of run and folder is training's last evaluation; as a reward it ranks."""
    last = next(
        {n: v for n, v in r.items() if n.startswith("eval/")}
        for r in reversed(records(learnt.run))
        if "eval/loss" in r
    )
    for path in (learnt.run, f"{learnt.run}/model"):
        assert cli.main(["eval", path, str(data / "held_out.jsonl"), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found.keys() == last.keys()
        for name, value in last.items():
            assert found[name] == pytest.approx(value, abs=1e-5), name
    asked = [rewards.Item("007:", said, {}) for said in ("aa\nbb\ncc", "aa\nBB\ncc", "AA\nbb")]
    with judge.opened(rewards.RewardConfig(model=f"{learnt.run}/model")) as scorer:
        values = [one.value for one in scorer.submit(asked).result()]
    assert values[0] > 0.8
    assert max(values[1:]) < 0.2


def test_a_resumed_run_is_the_run_that_was_not_stopped(learnt, tmp_path):
    """As if it had been killed before the checkpoint of its last update."""
    again = dataclasses.replace(learnt, run=str(tmp_path / "run"))
    shutil.copytree(learnt.run, again.run)
    shutil.rmtree(f"{again.run}/checkpoints/step_00000060")
    for name in ("finished.json", "model/model.safetensors"):
        Path(again.run, name).unlink()
    assert process_reward_model.train(again) == 0
    done = [Path(c.run) / "model" / "model.safetensors" for c in (learnt, again)]
    assert done[0].read_bytes() == done[1].read_bytes()
    assert records(learnt.run) == records(again.run)


@pytest.mark.slow
def test_adapters_are_folded_into_the_folder(data, tmp_path, capsys):
    """Of LoRA adapters and a head: the folder's measures are those of the run."""
    lora = setup.LoRAConfig(rank=2, targets=("q_proj",))
    model = setup.ModelConfig(fresh=TINY, tokenizer="bytes", lora=lora)
    config = config_of(data, tmp_path / "run", model=model, microbatches=2, steps=2)
    assert process_reward_model.train(config) == 0
    found, _, head = hub.load_process_reward_model(Path(config.run) / "model")
    assert found.config.lora is None
    assert float(jnp.abs(head["weight"]).max()) > 0
    assert hub.step_separator(Path(config.run) / "model") == "\n"
    capsys.readouterr()
    measured = []
    for path in (config.run, f"{config.run}/model"):
        assert cli.main(["eval", path, str(data / "held_out.jsonl"), "--json"]) == 0
        measured.append(json.loads(capsys.readouterr().out)["eval/loss"])
    np.testing.assert_allclose(measured, logged(config.run, "eval/loss")[-1], rtol=1e-5)


def test_what_does_nothing_and_what_cannot_be_written_is_refused(data, learnt, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"eval\.rows needs data\.eval"):
        config_of(
            data, tmp_path, data=preferences.StepConfig(train="x"), eval=pairwise.EvalConfig(rows=3)
        )
    with pytest.raises(ValueError, match="use one of"):
        config_of(data, tmp_path, batch_size=10, microbatches=4)
    gemma = {n: v for n, v in TINY.items() if n != "hidden_act"} | {"model_type": "gemma3_text"}
    fresh = gemma | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
    model = setup.ModelConfig(fresh=fresh, tokenizer="bytes")
    with pytest.raises(ValueError, match="has no token classifier in transformers"):
        process_reward_model.train(config_of(data, tmp_path / "run", model=model))
    held_out = str(data / "held_out.jsonl")
    for arguments, told in (
        (["sample", learnt.run, "--prompt", "1"], "is the run of a process reward model"),
        (["eval", learnt.run, held_out, "--reward", "a:b"], "--reward is for models that write"),
        (["eval", learnt.run, held_out, "steps=3"], "is measured under data.*"),
    ):
        assert cli.main(arguments) != 0
        assert told in capsys.readouterr().err
