"""Metrics are ratios of sums."""

import jax
import jax.numpy as jnp
import pytest

from jaxpost import metrics


def test_a_ratio_of_sums_is_not_a_mean_of_ratios():
    correct, targets = jnp.array([1, 30]), jnp.array([1, 60])
    assert metrics.ratio(correct.sum(), targets.sum()) == pytest.approx(31 / 61)
    assert metrics.ratio(correct, targets).tolist() == [1.0, 0.5]


def test_nothing_counted_is_zero_and_its_slope_too():
    nothing = jnp.zeros(())
    assert metrics.ratio(jnp.zeros(()), nothing) == 0
    assert jax.grad(metrics.ratio)(jnp.ones(()), nothing) == 0
    assert jax.grad(metrics.ratio, argnums=1)(jnp.ones(()), nothing) == 0


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices():
    nll = 5 * jnp.log(jnp.asarray(49152.0))
    assert metrics.perplexity(nll, jnp.asarray(5)) == pytest.approx(49152, rel=1e-5)
    assert metrics.perplexity(jnp.zeros(()), jnp.asarray(0)) == 1
