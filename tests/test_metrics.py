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


def test_a_tie_is_not_a_right_preference():
    chosen, rejected = jnp.array([1.0, 0.0, -1.0]), jnp.array([0.0, 0.0, 0.0])
    assert metrics.preference_accuracy(chosen, rejected).tolist() == [1, 0, 0]


def test_confidence_that_is_right_has_no_calibration_error():
    margins = jnp.log(3.0) * jnp.array([1, 1, 1, -1])  # three of four right, at 75 %
    sums = metrics.calibration(margins, jnp.ones(4))
    assert metrics.calibration_error(sums) == pytest.approx(0, abs=1e-6)
    assert metrics.calibration_error(metrics.calibration(margins, margins > 0)) == pytest.approx(
        0.25
    )
    assert metrics.calibration_error(metrics.calibration(jnp.zeros(3), jnp.ones(3))) == 0
    assert metrics.calibration_error(metrics.calibration(margins, jnp.zeros(4))) == 0


def test_calibration_adds_up_over_parts():
    margins = 3 * jax.random.normal(jax.random.key(0), (60,))
    whole = metrics.calibration(margins, jnp.ones(60), bins=5)
    parts = [metrics.calibration(part, jnp.ones(20), bins=5) for part in jnp.split(margins, 3)]
    assert jnp.allclose(sum(parts), whole, atol=1e-5)
    assert whole[0].sum() == 60
    confidences = jax.nn.sigmoid(jnp.abs(margins))
    assert whole[0, -1] == jnp.sum(confidences > 0.9)


def test_probabilities_that_come_true_have_no_calibration_error():
    logits = jnp.log(3.0) * jnp.array([1, 1, 1, 1, -1, -1])  # 75 % four times, 25 % twice
    labels, all_rows = jnp.array([1.0, 1, 1, 0, 0.5, 0]), jnp.ones(6)
    sums = metrics.reliability(logits, labels, all_rows)
    assert metrics.calibration_error(sums) == pytest.approx(0, abs=1e-6)
    wrong = metrics.reliability(logits, 1 - labels, all_rows)
    assert metrics.calibration_error(wrong) == pytest.approx(0.5)
    assert metrics.calibration_error(metrics.reliability(logits, labels, labels < 0)) == 0
