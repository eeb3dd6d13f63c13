"""Preferences at three levels at once (HPL), on a model of a few thousand numbers."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_preferences import numbers
from tiny import logged

from jaxpost import checkpoint, optimizers, train_step
from jaxpost.data.hierarchy import HierarchyConfig, Level
from jaxpost.recipes import experience, hpl, pair_losses, pair_reference, setup

pytestmark = pytest.mark.usefixtures("compiled")

START = pathlib.Path(__file__).parent / "golden" / "grpo"
PHASES = {"group": (1, 2, 3, 1, 2, 3, 1, 2), "late": (2, 3, 2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The start's tokenizer, and pairs of each kind; groups have phases."""
    folder, draw = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    for name, content in numbers().files.items():
        (folder / name).write_bytes(content)

    def words(count) -> str:
        return "".join(f" {n}" for n in draw.integers(2, 48, count))

    for kind, count in {"trajectory": 6, "suffix": 5, "group": 8, "late": 4}.items():
        rows = [
            {"prompt": words(3).strip(), "chosen": words(3), "rejected": words(2)}
            for _ in range(count)
        ]
        for row, phase in zip(rows, PHASES.get(kind, ()), strict=False):
            row["phase"] = phase
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{kind}.jsonl").write_text(lines)
    return folder


def level(folder, name, pairs, **changes):
    return Level(str(folder / f"{name}.jsonl"), pairs=pairs, **changes)


def config_of(folder, run="run", *, data=None, rate=3e-3, **changes):
    levels = {
        "trajectory": level(folder, "trajectory", 3),
        "suffix": level(folder, "suffix", 4, weight=0.5),
        "group": level(folder, "group", 1),
    }
    given = {
        "model": setup.ModelConfig(path=str(START), tokenizer=str(folder)),
        "data": HierarchyConfig(**{"max_length": 16, **levels, **(data or {})}),
        "optimizer": optimizers.OptimizerConfig(learning_rate=rate, schedule="constant"),
        "checkpoint": checkpoint.CheckpointConfig(every=3),
        "curriculum": (2, 4),
        "steps": 6,
    }
    return hpl.Config(run=str(run), **{**given, **changes})


# The loss ---------------------------------------------------------------------------------------


def test_the_loss_by_hand(folder):
    """Δ of 1.1, 0.5 and −0.2 at the three levels, β 0.3, and 0.54 nats of imitation.

    0.541698 + 0.620957 + 0.723597 + 0.54, all weights 1; of suffixes there are two alike.
    """
    even = {"suffix": level(folder, "suffix", 4)}
    config = config_of(folder, data=even, beta=0.3)
    deltas, kinds = jnp.array([1.1, 0.5, 0.5, -0.2]), jnp.array([0, 1, 1, 2])
    nought = jnp.zeros(4)
    sides = pair_losses.Sides(deltas, nought, nought, nought, nought + 1, nought + 1)
    chosen, weights = jnp.array([-0.54, -7.0, -7.0, -8.0]), jnp.array([1.0, 0.5, 0.5, 1.0])
    loss, found = hpl.total(config, sides, chosen, weights, kinds)
    np.testing.assert_allclose(loss, 2.426253, atol=2e-6)
    np.testing.assert_allclose(found["trajectory/loss"], 0.541698, atol=1e-6)
    np.testing.assert_allclose(found["suffix/loss"], 0.620957, atol=1e-6)
    np.testing.assert_allclose(found["group/loss"], 0.723597, atol=1e-6)
    np.testing.assert_allclose(found["trajectory/nll"], 0.54, atol=1e-6)
    weighted = dataclasses.replace(config_of(folder, beta=0.3), nll_weight=0.0)
    loss, _ = hpl.total(weighted, sides, chosen, weights, kinds)
    np.testing.assert_allclose(loss, 0.541698 + 0.5 * 0.620957 + 0.723597, atol=2e-6)


def told(pairs, report):
    """Numbers of a reference, one a row of data."""
    rows = np.repeat(pairs.rows, 2) % 3
    return (-20.0 - rows * np.tile([1.0, 2.0], len(pairs.rows))).astype(np.float32)


class Update:
    """A first update."""

    def __init__(self, config, step=1):
        policy = setup.load_policy(config.model, jax.random.key(0))
        model, params = policy.model, policy.params
        data = hpl.Data(config, policy)
        self.found = data.next(step)
        data.close()
        batch = hpl.make_batch(config, self.found, told)
        self.batch = hpl.filled(batch, 2 * config.batch_size)
        _, laid_out = experience.laid_out(self.batch, config.microbatches, model)
        objective = hpl.make_objective(config, model)
        run = setup.make_update(config, objective, optax.sgd(1.0), None)
        state = train_step.init_state(jax.tree.map(jnp.copy, params), optax.sgd(1.0))
        state, self.sums = run(state, laid_out)
        self.gradient = jax.tree.map(jnp.subtract, params, state.params)


def test_microbatches_do_not_change_an_update(folder):
    """Each level is the mean over its own pairs, of 3, 4 and 1, in 1 part and in 4."""
    first, other = (Update(config_of(folder, microbatches=parts)) for parts in (1, 4))
    for name in first.sums:
        np.testing.assert_allclose(other.sums[name], first.sums[name], rtol=1e-4, atol=1e-6)
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, other.gradient, first.gradient))
    assert norm < 1e-5 * optax.tree.norm(first.gradient)


def test_pairs_of_a_level_lie_everywhere():
    order = hpl.evenly([8, 4, 4])
    assert sorted(order) == list(range(16))
    assert (order.reshape(-1, 2) % 2 == [0, 1]).all()  # a pair stays together
    kinds = np.repeat([0, 1, 2], [8, 4, 4])[order]
    assert [sorted(half.tolist()) for half in kinds.reshape(2, -1)] == [
        [0, 0, 0, 0, 1, 1, 2, 2]
    ] * 2


# The curriculum ---------------------------------------------------------------------------------


def test_when_phases_begin(folder):
    by_number = config_of(folder, curriculum=(2, 4))
    by_share = config_of(folder, curriculum=(0.34, 0.67))
    for config in (by_number, by_share):
        assert [config.phase(step) for step in range(1, 7)] == [1, 1, 2, 2, 3, 3]
    assert config_of(folder, curriculum=(0, 0)).phase(1) == 3


def drawn(data, steps):
    """The rows of each update's groups."""
    found = [data.next(step) for step in steps]
    return [one["group"][0].rows.tolist() if "group" in one else None for one in found]


def test_groups_join_by_phase_and_a_position_is_exact(folder):
    """Eight updates a phase, of one group: rows 0, 3, 6 are of phase 1, 2 and 5 of phase 3."""
    config = config_of(folder, curriculum=(8, 16), steps=24)
    policy = setup.load_policy(config.model, jax.random.key(0))
    data = hpl.Data(config, policy)
    rows = np.ravel(drawn(data, range(1, 13)))
    state = json.loads(json.dumps(data.get_state()))
    rest = np.ravel(drawn(data, range(13, 25)))
    data.close()
    assert set(rows[:8]) == {0, 3, 6}
    assert {*rows[8:], *rest[:4]} <= {0, 1, 3, 4, 6, 7}
    assert set(rest[4:]) == set(range(8))
    again = hpl.Data(config, policy)
    again.set_state(state)
    assert (np.ravel(drawn(again, range(13, 25))) == rest).all()
    again.close()


def test_a_level_waits_for_its_phase(folder, caplog):
    """The loss is that of the other levels, and nothing is logged of it."""
    late = config_of(folder, data={"group": level(folder, "late", 1)})
    one = Update(late)
    assert set(one.found) == {"trajectory", "suffix"}
    assert "no group is of a phase before 2" in caplog.text
    shown = hpl.summary(one.found, one.sums)
    assert "group" not in {name.partition("/")[0] for name in shown}
    parts = shown["trajectory/loss"] + shown["trajectory/nll"] + 0.5 * shown["suffix/loss"]
    np.testing.assert_allclose(shown["loss"], parts, rtol=1e-6)
    data = hpl.Data(late, setup.load_policy(late.model, jax.random.key(0)))
    assert set(data.next(3)) == set(hpl.KINDS)
    data.close()


# Runs -------------------------------------------------------------------------------------------


def test_held_out_pairs_are_measured_by_level(folder):
    """Under the start as reference: log 2, in the whole by the level's weight; no imitation."""
    data = {"suffix": level(folder, "suffix", 4, eval=str(folder / "suffix.jsonl"), weight=0.5)}
    config = config_of(folder, data=data)
    policy = setup.load_policy(config.model, jax.random.key(0))
    score = pair_reference.make_score(config, policy.model)
    evaluate = hpl.make_evaluation(config, policy)
    found = evaluate(lambda pairs, _: score(policy.params, pairs), policy.params)
    np.testing.assert_allclose(found["eval/suffix/loss"], np.log(2), atol=1e-6)
    np.testing.assert_allclose(found["eval/loss"], np.log(2) / 2, atol=1e-6)
    assert found["eval/suffix/logps/chosen"] < 0
    assert {name.split("/")[1] for name in found} == {"suffix", "loss"}


def test_a_resumed_run_is_the_run_that_was_not_stopped(folder, tmp_path):
    """Stopped within the second phase."""
    for run, stops in {"straight": (6,), "parts": (3, 6)}.items():
        for steps in stops:
            assert hpl.train(config_of(folder, tmp_path / run, steps=steps)) == 0
    done = [tmp_path / run / "model" / "model.safetensors" for run in ("straight", "parts")]
    assert done[0].read_bytes() == done[1].read_bytes()
    for name in ("loss", "group/loss", "phase"):
        found = [logged(tmp_path / run, name) for run in ("straight", "parts")]
        assert found[0] == found[1]
    assert logged(tmp_path / "straight", "phase") == [1, 1, 2, 2, 3, 3]
    first, *_, last = logged(tmp_path / "straight", "trajectory/nll")
    assert 0 < last < first


# What is refused --------------------------------------------------------------------------------

ALONE = {"trajectory": None, "group": None}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data": {kind: None for kind in hpl.KINDS}}, "data has no pairs: set one of trajectory"),
        ({"data": ALONE, "curriculum": None}, "nll_weight is 1, of data.trajectory, which is not"),
        ({"data": ALONE, "nll_weight": 0.0}, "curriculum is of data.group, which is not set"),
        ({"curriculum": (4, 2)}, "shares below 1, in this order"),
        ({"curriculum": (1.5, 2)}, "two whole numbers of updates"),
        ({"curriculum": (-0.5, 2)}, "two whole numbers of updates"),
        ({"loss": "aot"}, "aot ranks all pairs of an update, of which levels differ"),
        ({"loss": "simpo", "reference": "x"}, "has no reference; remove reference"),
        ({"microbatches": 3}, "batch of 8 rows cannot be split into 3 microbatches"),
        ({"eval": hpl.pairwise.EvalConfig(every=2)}, "eval.every needs data.eval"),
    ],
)
def test_what_does_nothing_is_refused(changes, told, folder):
    with pytest.raises(ValueError, match=told):
        config_of(folder, **changes)


def test_a_group_without_a_phase_is_refused(folder):
    config = config_of(folder, data={"group": level(folder, "suffix", 1)})
    policy = setup.load_policy(config.model, jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"suffix.jsonl:1: column phase: expected 1, 2 or 3, got n"
    ):
        hpl.Data(config, policy)
    hpl.Data(dataclasses.replace(config, curriculum=None), policy).close()
