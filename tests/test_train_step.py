"""One update, on a problem small enough to do by hand: a line through points."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import train_step

RNG = np.random.default_rng(0)


class Points(NamedTuple):
    """x [B, 2], y [B], weights [B] (their sum is 1 over the update), scale: one number for all."""

    x: Any
    y: Any
    loss_weights: Any
    scale: Any = np.float32(1.0)


def objective(params, batch):
    error = batch.x @ params["slope"] + params["offset"] - batch.y
    loss = batch.scale * jnp.sum(batch.loss_weights * jnp.square(error))
    return loss, {"points": jnp.sum(jnp.ones_like(batch.y)), "error": jnp.sum(error)}


def points(rows: int = 8) -> Points:
    weights = RNG.uniform(0.1, 1, size=rows).astype(np.float32)
    x, y = RNG.normal(size=(rows, 2)), RNG.normal(size=rows)
    return Points(x.astype(np.float32), y.astype(np.float32), weights / weights.sum())


PARAMS = {"slope": jnp.array([0.5, -1.0]), "offset": jnp.array(0.25)}
TWO = Points(
    np.array([[1.0, 0], [0, 1]], np.float32), np.zeros(2, np.float32), np.array([0.5, 0.5], "f4")
)


def one_step(batch, optimizer=None, params=PARAMS, ema=False, **settings):
    optimizer = optimizer or optax.sgd(0.1)
    state = train_step.init_state(params, optimizer, trainable=settings.get("trainable"), ema=ema)
    return train_step.make_train_step(objective, optimizer, **settings)(state, batch)


def test_a_step_by_hand():
    # Errors .75 and -.75; the gradient is (.75, -.75) for the slope and 0 for the offset.
    state, metrics = one_step(TWO)
    np.testing.assert_allclose(state.params["slope"], [0.425, -0.925], rtol=1e-6)
    np.testing.assert_allclose(state.params["offset"], 0.25)
    assert state.step == 1
    assert state.ema is None
    np.testing.assert_allclose(metrics["loss"], 0.5625)
    np.testing.assert_allclose(metrics["grad_norm"], 0.75 * 2**0.5, rtol=1e-6)
    np.testing.assert_allclose([metrics["points"], metrics["error"]], [2, 0])


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_microbatches_change_nothing(microbatches):
    batch = points()._replace(scale=np.float32(0.7))
    state, metrics = one_step(batch, optax.adam(0.1))
    again, parts = one_step(batch, optax.adam(0.1), microbatches=microbatches)
    for ours, whole in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-6)
    assert parts.keys() == metrics.keys()
    for name in metrics:
        np.testing.assert_allclose(parts[name], metrics[name], rtol=1e-5, atol=1e-6)


def test_microbatches_are_strided():
    parts = train_step.split({"rows": jnp.arange(6), "one": jnp.array(7)}, 2)
    np.testing.assert_array_equal(parts["rows"], [[0, 2, 4], [1, 3, 5]])
    np.testing.assert_array_equal(parts["one"], [7, 7])


def test_microbatches_that_do_not_divide_the_batch():
    with pytest.raises(ValueError, match="split") as error:
        one_step(points(12), microbatches=5)
    assert str(error.value) == (
        "batch of 12 rows cannot be split into 5 microbatches; use one of [1, 2, 3, 4, 6, 12]"
    )
    with pytest.raises(ValueError, match="microbatches is 0"):
        train_step.make_train_step(objective, optax.sgd(0.1), microbatches=0)


def test_an_array_that_has_other_rows_is_not_cut():
    """As a raw key [2] among 4 rows would be; one that is a scalar goes to all microbatches."""
    batch = {"x": jnp.ones(4), "y": jnp.ones(4), "key": jax.random.PRNGKey(0)}
    with pytest.raises(ValueError, match=r"leaf \['key'\] has the shape \(2,\) .* 4 rows"):
        train_step.split(batch, 2)
    parts = train_step.split({**batch, "key": jax.random.key(0)}, 2)
    assert [part.shape for part in parts.values()] == [(2,), (2, 2), (2, 2)]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_metric_may_not_hide_the_real_loss(name, microbatches):
    def named(params, batch):
        loss, _ = objective(params, batch)
        return loss, {name: jnp.zeros(())}

    step = train_step.make_train_step(named, optax.sgd(0.1), microbatches=microbatches)
    with pytest.raises(ValueError, match=f"the name {name},"):
        step(train_step.init_state(PARAMS, optax.sgd(0.1)), TWO)


@pytest.mark.parametrize(("ema", "decay"), [(True, None), (False, 0.9)])
def test_a_moving_average_needs_its_decay_and_the_decay_an_average(ema, decay):
    with pytest.raises(ValueError, match=r"init_state\(ema=True\)") as error:
        one_step(TWO, ema=ema, ema_decay=decay)
    assert "make_train_step(ema_decay=" in str(error.value)


def test_gradients_are_added_in_float32():
    """256 parts of 1/256 + 1/512: in bfloat16 the sum would stop growing."""
    params = {"slope": jnp.zeros(2, jnp.bfloat16), "offset": jnp.zeros((), jnp.bfloat16)}

    def line(params, batch):
        return jnp.sum(batch.loss_weights * params["offset"].astype(jnp.float32)), {}

    batch = points(512)._replace(loss_weights=np.full(512, 1.5 / 512, np.float32))
    optimizer = optax.sgd(1.0)
    step = train_step.make_train_step(line, optimizer, microbatches=256)
    _, metrics = step(train_step.init_state(params, optimizer), batch)
    np.testing.assert_allclose(metrics["grad_norm"], 1.5, rtol=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_is_not_finite_changes_nothing_but_the_step(bad, microbatches):
    optimizer = optax.adam(0.1)
    batch = points()
    spoilt = batch._replace(y=np.where(np.arange(8) == 3, np.float32(bad), batch.y))
    state = train_step.init_state(PARAMS, optimizer, ema=True)
    step = train_step.make_train_step(
        objective, optimizer, microbatches=microbatches, ema_decay=0.9
    )
    after, metrics = step(state, spoilt)
    assert not np.isfinite(metrics["loss"])
    assert after.step == 1
    for ours, before in zip(
        jax.tree.leaves(after._replace(step=0)),
        jax.tree.leaves(state._replace(step=0)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, before)


def test_a_gradient_that_is_not_finite_changes_nothing():
    def root(params, batch):
        return jnp.sqrt(params["offset"]) + 0 * jnp.sum(batch.y), {}

    params = {"slope": jnp.zeros(2), "offset": jnp.array(0.0)}
    optimizer = optax.sgd(0.1)
    step = train_step.make_train_step(root, optimizer)
    state, metrics = step(train_step.init_state(params, optimizer), TWO)
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    np.testing.assert_array_equal(state.params["offset"], 0.0)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_what_is_frozen_stays_and_costs_no_state(microbatches):
    trainable = {"slope": False, "offset": True}
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    batch = points()
    state, metrics = one_step(
        batch, optimizer, ema=True, trainable=trainable, microbatches=microbatches, ema_decay=0.5
    )
    np.testing.assert_array_equal(state.params["slope"], PARAMS["slope"])
    assert state.params["offset"] != PARAMS["offset"]
    assert all(np.shape(leaf) == () for leaf in jax.tree.leaves(state.opt_state))
    assert state.ema["slope"] is None
    of_offset = jax.grad(lambda params: objective(params, batch)[0])(PARAMS)["offset"]
    np.testing.assert_allclose(metrics["grad_norm"], abs(of_offset), rtol=1e-5)


def test_the_moving_average():
    state, _ = one_step(TWO, ema=True, ema_decay=0.9)
    expected = 0.9 * PARAMS["slope"] + 0.1 * state.params["slope"]
    np.testing.assert_allclose(state.ema["slope"], expected, rtol=1e-6)
    assert state.ema["slope"].dtype == jnp.float32


def test_the_moving_average_is_float32_and_does_not_share_the_parameters_memory():
    params = {"slope": jnp.zeros(2, jnp.bfloat16), "offset": jnp.zeros(())}
    state = train_step.init_state(params, optax.sgd(0.1), ema=True)
    assert state.ema["slope"].dtype == jnp.float32
    assert state.ema["offset"].unsafe_buffer_pointer() != params["offset"].unsafe_buffer_pointer()


def test_the_state_can_be_donated():
    optimizer = optax.adam(0.1)
    step = jax.jit(
        train_step.make_train_step(objective, optimizer, microbatches=2, ema_decay=0.9),
        donate_argnums=0,
    )
    batch = points()
    state = train_step.init_state(jax.tree.map(jnp.copy, PARAMS), optimizer, ema=True)
    plain, _ = one_step(batch, optimizer, ema=True, ema_decay=0.9)
    after, _ = step(state, batch)
    assert state.params["slope"].is_deleted()
    np.testing.assert_allclose(after.params["slope"], plain.params["slope"], rtol=1e-5)
    np.testing.assert_allclose(step(after, batch)[0].step, 2)
