"""Learning from single completions that are desirable or not, on a model of a few thousand numbers.

A prompt is three numbers and a completion up to three more, of which the first is to be even.
"""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_preference_losses import DESIRABLE, REFERENCE, U
from test_preferences import TRL_PAIRS, numbers
from tiny import logged, records

from jaxpost import batch as batches
from jaxpost import checkpoint, hub, optimizers, rollout, train_step
from jaxpost.data import preferences
from jaxpost.recipes import experience, kto, reference, setup

pytestmark = pytest.mark.usefixtures("compiled")

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "preference.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The start's tokenizer, and what it wrote: 256 completions to train on and 35 held out."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, content in numbers().files.items():
        (folder / name).write_bytes(content)
    model, params = hub.load_model(GOLDEN / "grpo", dtype="float32")
    prompts = np.random.default_rng(0).integers(2, 48, (400, 3))
    drawn = rollout.sample(
        model, params, prompts.tolist(), jax.random.key(0), max_new_tokens=1
    ).tokens
    rows = [
        {"prompt": words(prompt), "completion": " " + words(said), "label": bool(said[0] % 2 == 0)}
        for prompt, said in zip(prompts, drawn.tolist(), strict=True)
        if min(said) > 1
    ]
    write(folder / "train.jsonl", rows[:256])
    write(folder / "held_out.jsonl", rows[256:291])
    return folder


def words(ids) -> str:
    return " ".join(str(number) for number in ids if number > 1)


def write(path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(folder, run="run", *, rate=3e-3, lora=None, train="train", data=None, **changes):
    given = {
        "model": setup.ModelConfig(path=str(GOLDEN / "grpo"), tokenizer=str(folder), lora=lora),
        "data": preferences.PreferenceConfig(
            train=str(folder / f"{train}.jsonl"),
            eval=str(folder / "held_out.jsonl"),
            max_length=16,
            **(data or {}),
        ),
        "optimizer": optimizers.OptimizerConfig(learning_rate=rate, schedule="constant"),
        "checkpoint": checkpoint.CheckpointConfig(every=4),
    }
    return kto.Config(run=str(run), **{**given, **changes})


# The objective ----------------------------------------------------------------------------------


class Update:
    """A first update; policy and reference have the start's weights, scaled."""

    def __init__(self, config, path, policy=1.0, of_reference=1.0):
        model, params = hub.load_model(GOLDEN / "grpo", dtype="float32")
        self.params = jax.tree.map(lambda p: policy * p, params)
        other = jax.tree.map(lambda p: of_reference * p, params)
        batching = preferences.Batching(config.batch_size)
        self.rows, _ = next(preferences.unpaired(config.data, numbers(), batching))
        score = kto.make_score(config.microbatches, model)
        cache = reference.Cache(path)
        told = [(side, reference.digests(side)) for side in kto.sides(config, self.rows)]
        cache.fill(told, lambda side: score(other, side))
        both = kto.Both(score, cache)
        self.level = kto.Level(config, both).next(self.params, self.rows)
        batch = kto.make_batch(self.rows, both.ref_logps(self.rows.tokens))
        _, batch = experience.laid_out(batch, config.microbatches, model)
        objective = kto.make_objective(config, model)
        step = setup.make_update(config, objective, optax.sgd(1.0), None)
        state = train_step.init_state(jax.tree.map(jnp.copy, self.params), optax.sgd(1.0))
        state, self.sums = step(state, batch._replace(level=self.level))
        self.gradient = jax.tree.map(jnp.subtract, self.params, state.params)


@pytest.mark.parametrize("case", ["kto", "kto_swapped", "kto_swapped_weights", "apo_zero_unpaired"])
def test_the_first_update_is_trls(case, folder, tmp_path):
    """Loss, norm of the gradient, z₀, of rows and a reference as the recipe reads them."""
    rows = [{"prompt": p, "completion": c, "label": True} for p, c, _ in TRL_PAIRS[:3]]
    rows += [{"prompt": p, "completion": r, "label": False} for p, _, r in TRL_PAIRS[1:]]
    write(folder / "trl.jsonl", rows)
    settings = dict(CASES[case]["trl"])
    loss = settings.pop("loss_type", "kto").removesuffix("_unpaired")
    data = {"shuffle": False}
    config = config_of(folder, train="trl", data=data, batch_size=6, loss=loss, **settings)
    scales = (0.875, 1.0) if "swapped" in case else (1.0, 0.875)
    found = Update(config, tmp_path / "cache.npz", *scales)
    np.testing.assert_allclose(found.sums["loss"], CASES[case]["loss"], rtol=1e-5)
    np.testing.assert_allclose(found.sums["grad_norm"], CASES[case]["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(found.level, CASES[case].get("kl", 0.0), rtol=1e-5)
    shown = kto.summary(config, found.sums, found.rows.labels, found.level)
    for name in ("logps/chosen", "logps/rejected"):
        np.testing.assert_allclose(shown[name], CASES[case][name], rtol=1e-5)


@pytest.mark.parametrize("loss", ["kto", "bco"])
def test_microbatches_do_not_change_an_update(loss, folder, tmp_path):
    """z₀ and δ, the loss and the gradient, in 1, 2 and 4 parts."""
    first, *others = (
        Update(
            config_of(folder, loss=loss, batch_size=8, microbatches=parts),
            tmp_path / f"{parts}.npz",
            *(0.875, 1.0),
        )
        for parts in (1, 2, 4)
    )
    assert first.level != 0 or loss == "kto"  # whose z₀ is 0 where the mean is below it
    for other in others:
        np.testing.assert_allclose(other.level, first.level, rtol=1e-5)
        np.testing.assert_allclose(other.sums["loss"], first.sums["loss"], rtol=1e-5)
        norm = optax.tree.norm(jax.tree.map(jnp.subtract, other.gradient, first.gradient))
        assert norm < 1e-5 * optax.tree.norm(first.gradient)


def losses_of(folder, level, **settings):
    scores = kto.Scores(U, REFERENCE)
    return kto.loss_of(config_of(folder, **settings), scores, DESIRABLE, jnp.array(level))


def test_the_losses_by_hand(folder):
    """u is 1 of the desirable and 0.3 … of the other, see `test_preference_losses`; β is 0.1."""
    for level, settings, expected in (
        (0.2, {}, [0.490001, 0.482507]),
        (0.2, {"undesirable_weight": 1.33}, [0.490001, 1.33 * 0.482507]),
        (0.2, {"desirable_weight": 2.0}, [0.980002, 0.482507]),
        (0.0, {"loss": "apo_zero"}, [0.485004, 0.487503]),
        (0.05, {"loss": "bco"}, [0.688160, 0.644397]),
    ):
        np.testing.assert_allclose(losses_of(folder, level, **settings), expected, atol=2e-6)


@pytest.mark.parametrize("label", [True, False])
def test_a_batch_of_one_kind_is_trained_and_says_nothing_of_the_other(label, folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write(folder / "one.jsonl", [row | {"label": label} for row in rows[:8]])
    config = config_of(folder, train="one", batch_size=8)
    found = Update(config, tmp_path / "cache.npz", 0.875)
    assert 0 < found.sums["grad_norm"] < np.inf
    shown = kto.summary(config, found.sums, found.rows.labels, found.level)
    there, missing = ("chosen", "rejected") if label else ("rejected", "chosen")
    assert shown[f"count/{there}"] == 8
    assert shown[f"count/{missing}"] == 0
    assert f"rewards/{there}" in shown
    assert not {f"rewards/{missing}", f"logps/{missing}", "rewards/margins"} & shown.keys()


def test_a_row_is_known_again_however_long_its_batch():
    tokens = np.array([[3, 4, 5, 6, 7], [3, 4, 5, 8, 7]])
    mask = np.array([[False, False, True, True, True]] * 2)
    rows = batches.token_batch(tokens, mask)
    wider = batches.TokenBatch(*(np.pad(field, ((0, 0), (0, 3))) for field in rows))
    assert reference.digests(rows) == reference.digests(wider)
    assert len({*reference.digests(rows)}) == 2
    less = rows._replace(completion_mask=rows.completion_mask & (np.arange(4) > 1))
    assert reference.digests(less) != reference.digests(rows)


# Runs -------------------------------------------------------------------------------------------


def even(path) -> float:
    """The share of even ones among first numbers sampled, on prompts never seen."""
    model, params = hub.load_model(path, dtype="float32")
    prompts = np.random.default_rng(1).integers(2, 48, (512, 3)).tolist()
    drawn = rollout.sample(model, params, prompts, jax.random.key(1), max_new_tokens=1)
    first = drawn.tokens[drawn.tokens > 1]
    assert len(first) > 350
    return float(np.mean(first % 2 == 0))


@pytest.mark.parametrize(
    "loss", ["kto", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bco", "apo_zero"))]
)
def test_the_policy_learns_to_write_what_was_desirable(loss, folder, tmp_path):
    """Of its own samples, even first numbers from at most 55 % to at least 75 %.

    Before the first update policy and reference are one: z₀ and all rewards are 0.
    """
    config = config_of(folder, tmp_path / "run", loss=loss, rate=5e-3, beta=1.0, steps=120)
    assert even(GOLDEN / "grpo") <= 0.55
    assert kto.train(config) == 0
    assert even(tmp_path / "run" / "model") >= 0.75
    first = records(config.run)[0]
    at_reference = np.log(2) if loss == "bco" else 0.5
    np.testing.assert_allclose(first["eval/loss"], at_reference, atol=1e-5)
    np.testing.assert_allclose(first["eval/rewards/margins"], 0.0, atol=1e-5)
    assert logged(config.run, "eval/rewards/margins")[-1] > 1.0


@pytest.mark.parametrize(
    ("loss", "lora"),
    [("kto", None), ("bco", setup.LoRAConfig(rank=2, targets=("q_proj", "down_proj")))],
)
def test_a_resumed_run_is_the_run_that_was_not_stopped(loss, lora, folder, tmp_path):
    """Ended after 4 updates, then asked for 8; δ goes on, and is the mean of all rewards so far."""
    straight = config_of(
        folder, tmp_path / "straight", loss=loss, lora=lora, batch_size=16, steps=8
    )
    assert kto.train(straight) == 0
    for steps in (4, 8):
        parts = dataclasses.replace(straight, run=str(tmp_path / "parts"), steps=steps)
        assert kto.train(parts) == 0
    done = [pathlib.Path(c.run) / "model" / "model.safetensors" for c in (straight, parts)]
    assert done[0].read_bytes() == done[1].read_bytes()
    found = [[r for r in records(c.run) if "loss" in r] for c in (straight, parts)]
    assert [r["loss"] for r in found[0]] == [r["loss"] for r in found[1]]
    held_out = [r for r in records(straight.run) if "eval/loss" in r]
    assert {r["eval/count/chosen"] + r["eval/count/rejected"] for r in held_out} == {35}
    if loss == "bco":
        kinds = ("chosen", "rejected")
        rewards = [sum(r[f"count/{k}"] * r[f"rewards/{k}"] for k in kinds) for r in found[1]]
        means = np.cumsum(rewards) / (16 * np.arange(1, 9))
        np.testing.assert_allclose([r["shift"] for r in found[1]], means, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": "bco", "desirable_weight": 2.0}, "desirable_weight is 2.0, which loss: bco"),
        ({"loss": "bco", "undesirable_weight": 1.0}, "undesirable_weight is 1.0, which loss: bco"),
        ({"batch_size": 1}, "batch_size is 1, and loss: kto reads"),
        ({"batch_size": 10, "microbatches": 4}, "use one of"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
    ],
)
def test_what_does_nothing_is_refused(changes, told, folder):
    with pytest.raises(ValueError, match=told):
        config_of(folder, **changes)


def test_uneven_kinds_are_told_with_the_weights_that_help(folder, caplog):
    labels = np.arange(40) < 10
    kto.tell_of_kinds(config_of(folder), labels)
    assert "desirable completions weigh 0.333 of what the others do" in caplog.text
    assert "desirable_weight between 3 and 4, or undesirable_weight between 0.25 and 0.333" in (
        caplog.text
    )
    caplog.clear()
    kto.tell_of_kinds(config_of(folder, desirable_weight=3.5), labels)
    kto.tell_of_kinds(config_of(folder, loss="bco"), labels)
    assert not caplog.records
    kto.tell_of_kinds(config_of(folder), labels[:10])
    assert "no undesirable completion is trained on" in caplog.text
