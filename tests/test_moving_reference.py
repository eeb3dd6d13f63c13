"""A reference that follows the policy (TR-DPO), on a model of a few thousand numbers."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_preferences import TRL_PAIRS, numbers
from tiny import logged

from jaxpost import checkpoint, hub, optimizers, train_step
from jaxpost.data import preferences
from jaxpost.recipes import dpo, moving_reference, pair_reference, pairwise, setup
from jaxpost.recipes.moving_reference import UpdateConfig

pytestmark = pytest.mark.usefixtures("compiled")

START = pathlib.Path(__file__).parent / "golden" / "grpo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The start's tokenizer, and four pairs."""
    folder = tmp_path_factory.mktemp("numbers")
    for name, content in numbers().files.items():
        (folder / name).write_bytes(content)
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in TRL_PAIRS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(folder, run, *, every=3, mix=0.6, lora=None, moves=True, held_out=False, **changes):
    pairs = str(folder / "pairs.jsonl")
    given = {
        "model": setup.ModelConfig(path=str(START), tokenizer=str(folder), lora=lora),
        "data": preferences.PairConfig(pairs, pairs if held_out else None, max_length=16),
        "optimizer": optimizers.OptimizerConfig(learning_rate=1e-2, schedule="constant"),
        "checkpoint": checkpoint.CheckpointConfig(every=4),
        "batch_size": 4,
        "steps": 8,
        "reference_update": UpdateConfig(every, mix) if moves else None,
    }
    return dpo.Config(run=str(run), **{**given, **changes})


def trained(config):
    assert dpo.train(config) == 0
    return pathlib.Path(config.run) / "model"


# The rule ---------------------------------------------------------------------------------------


def test_a_soft_update_mixes_and_a_hard_one_replaces():
    held, params = {"w": jnp.array([1.0, -1.0])}, {"w": jnp.array([2.0, 0.1])}
    soft = moving_reference.moved(held, params, 0.6)
    np.testing.assert_allclose(soft["w"], [1.6, -0.34], rtol=1e-6)
    again = moving_reference.moved(soft, params, 0.6)
    np.testing.assert_allclose(again["w"], [1.84, -0.076], rtol=1e-6)
    hard = moving_reference.moved(held, params, 1.0)
    np.testing.assert_array_equal(hard["w"], params["w"])
    stays = moving_reference.moved(held, params, 0.0)
    np.testing.assert_array_equal(stays["w"], held["w"])


def test_a_copy_keeps_its_type_and_is_mixed_in_float32():
    held, params = jnp.array(256.0, jnp.bfloat16), jnp.array(258.0, jnp.bfloat16)
    mixed = moving_reference.moved(held, params, 0.6)
    assert mixed.dtype == jnp.bfloat16
    assert mixed == 258  # of 257.2; bfloat16 products would sum to 256 or 257.0 -> 256


def test_the_reference_moves_after_every_so_many_updates_and_the_policy_as_without():
    """Under SGD of a constant gradient w falls by 1 an update; the reference starts at 0."""
    inner = optax.sgd(1.0)
    optimizer = moving_reference.following(inner, UpdateConfig(every=3, mix=0.5))
    params = {"w": jnp.zeros(()), "frozen": None}
    state, held = optimizer.init(params), []
    for _ in range(7):
        updates, state = optimizer.update({"w": jnp.ones(()), "frozen": None}, state, params)
        params = optax.apply_updates(params, updates)
        held.append(float(state.reference["w"]))
    assert params["w"] == -7
    np.testing.assert_allclose(held, [0, 0, -1.5, -1.5, -1.5, -3.75, -3.75])
    assert moving_reference.following(inner, None) is inner


# Runs -------------------------------------------------------------------------------------------


def test_after_a_hard_update_the_loss_is_that_of_no_preference(folder, tmp_path):
    """Moved after every update, the reference is the policy: log 2 in each, and at the end.

    Of adapters: only they are held, and replaced.
    """
    lora = setup.LoRAConfig(rank=2)
    config = config_of(folder, tmp_path, lora=lora, every=1, mix=1.0, held_out=True, steps=4)
    trained(config)
    np.testing.assert_allclose(logged(tmp_path, "loss"), np.log(2), atol=1e-6)
    np.testing.assert_allclose(logged(tmp_path, "eval/loss"), np.log(2), atol=1e-6)
    np.testing.assert_allclose(logged(tmp_path, "rewards/margins"), 0, atol=1e-6)
    policy, state = begun(config)
    held = sum(x.size for x in jax.tree.leaves(state.opt_state.reference))
    assert 0 < held < 0.5 * sum(x.size for x in jax.tree.leaves(policy.params))


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """A run of eight updates, whose reference moves after the third and the sixth."""
    return trained(config_of(folder, tmp_path_factory.mktemp("straight"))).parent


def test_until_it_moves_the_run_is_plain_dpo(folder, straight, tmp_path):
    """Then a part of the margin is gone, and the loss is larger."""
    trained(config_of(folder, tmp_path, moves=False, steps=5))
    found, plain = logged(straight, "loss"), logged(tmp_path, "loss")
    np.testing.assert_allclose(found[:3], plain[:3], rtol=1e-5)
    assert plain[3] < plain[2] < found[3] < np.log(2)
    assert (tmp_path / "reference").exists()
    assert not (straight / "reference").exists()


def test_a_resumed_run_is_the_run_that_was_not_stopped(folder, straight, tmp_path):
    """Stopped between two moves, of a reference that is neither the start nor the policy."""
    trained(config_of(folder, tmp_path, steps=4))
    model = trained(config_of(folder, tmp_path))
    done = [folder / "model.safetensors" for folder in (straight / "model", model)]
    assert done[0].read_bytes() == done[1].read_bytes()
    assert logged(straight, "loss") == logged(tmp_path, "loss")


def begun(config):
    """The policy, and the state before the first update."""
    policy = setup.load_policy(config.model, jax.random.key(0))
    optimizer = moving_reference.following(optax.sgd(1.0), config.reference_update)
    state = train_step.init_state(policy.params, optimizer, trainable=policy.trainable)
    return policy, moving_reference.started(config, policy, state)


def test_a_named_reference_is_where_it_starts(folder, tmp_path):
    """It says of pairs what a fixed one of that name says."""
    model, params = hub.load_model(START, dtype="float32")
    hub.save_model(tmp_path / "other", model, jax.tree.map(lambda p: 0.875 * p, params))
    moves, stays = (
        config_of(folder, tmp_path, reference=str(tmp_path / "other"), moves=moves)
        for moves in (True, False)
    )
    policy, state = begun(moves)
    read = next(pairwise.data(moves, policy.tokenizer, policy.model))
    found, expected = (
        pair_reference.make(config, policy, tmp_path, lambda: [read])(state)(*read)
        for config in (moves, stays)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": "simpo"}, "has no reference; remove reference_update"),
        ({"reference_cache": "x"}, "reference_cache is for numbers that stay"),
        ({"steps": 3}, "reference_update.every is 3, and of the 3 updates none comes after that"),
        ({"lora": setup.LoRAConfig()}, "a mix of adapters is not the mix of the matrices"),
        ({"lora": setup.LoRAConfig(), "mix": 1.0, "reference": "x"}, "reference: x has none"),
        ({"mix": 0.0}, "reference_update.mix is 0.0; it must be above 0"),
        ({"every": 0}, "reference_update.every is 0; it must be at least 1"),
    ],
)
def test_what_does_nothing_or_means_nothing_is_refused(changes, told, folder, tmp_path):
    with pytest.raises(ValueError, match=told):
        config_of(folder, tmp_path / "run", **changes)


def test_a_reference_of_another_architecture_does_not_move(folder, tmp_path):
    changed = {**json.loads((START / "config.json").read_text()), "num_hidden_layers": 1}
    model, params = hub.init_model(changed, jax.random.key(0), dtype="float32")
    hub.save_model(tmp_path / "other", model, params)
    with pytest.raises(ValueError, match="layers is 1 and not 2"):
        begun(config_of(folder, tmp_path, reference=str(tmp_path / "other")))
