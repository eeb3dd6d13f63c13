"""Weights against worked examples: what is averaged over what, and what is left out."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from jaxpost import loss_weights

# Two sequences of one and three trained tokens, with their token losses.
LOSSES = jnp.array([[0.9, 0.0, 0.0, 0.0], [0.1, 0.7, 0.4, 0.0]])
MASK = jnp.array([[True, False, False, False], [True, True, True, False]])


def weighted(weights, values) -> float:
    return float(jnp.sum(weights * jnp.asarray(values)))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (loss_weights.token_mean(MASK), 0.525),
        (loss_weights.sequence_mean(MASK), 0.65),
        (loss_weights.sequence_sum_mean(MASK), 1.05),
        (loss_weights.fixed_length(MASK, length=4, sequences=2), 0.2625),
    ],
)
def test_four_reductions_of_the_same_losses(weights, expected):
    np.testing.assert_allclose(weighted(weights, LOSSES), expected, rtol=1e-6)
    assert weights.shape == MASK.shape
    assert weights.dtype == jnp.float32


def test_another_worked_example():
    losses, mask = jnp.array([[2.0, 0, 0], [1, 1, 0]]), jnp.array([[1, 0, 0], [1, 1, 1]], bool)
    assert weighted(loss_weights.token_mean(mask), losses) == pytest.approx(1.0)
    assert weighted(loss_weights.sequence_sum_mean(mask), losses) == pytest.approx(2.0)
    assert weighted(loss_weights.sequence_mean(mask), losses) == pytest.approx(4 / 3)
    assert weighted(loss_weights.fixed_length(mask, 8, 2), losses) == pytest.approx(0.25)


def test_weights_are_zero_outside_the_mask():
    for weights in (
        loss_weights.token_mean(MASK),
        loss_weights.sequence_mean(MASK),
        loss_weights.sequence_sum_mean(MASK),
        loss_weights.fixed_length(MASK, 4, 2),
    ):
        np.testing.assert_array_equal(np.asarray(weights)[~np.asarray(MASK)], 0.0)


@pytest.mark.parametrize(
    ("think", "answer", "expected"), [(1.0, 1.0, 0.475), (0.5, 1.0, 0.5), (0.0, 1.0, 0.55)]
)
def test_reasoning_may_weigh_less_than_the_answer(think, answer, expected):
    weights = jnp.array([[think, think, answer, answer]])
    assert weighted(loss_weights.token_mean(weights), [[0.5, 0.3, 0.2, 0.9]]) == pytest.approx(
        expected
    )


# Token losses of a trajectory: an action, an observation, an action, an observation, an action.
TRAJECTORY = [[0.2, 0.7, 3.0, 1.1, 0.4, 2.5, 0.3]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([1, 1, 1, 1, 1, 1, 1], 1.171429),
        ([1, 1, 0, 1, 1, 0, 1], 0.54),  # observations are read, not learnt
        ([1, 1, 0, 0, 0, 0, 1], 0.4),  # nor is an action that was an error
    ],
)
def test_a_trajectory_is_learnt_where_the_mask_says(mask, expected):
    weights = loss_weights.token_mean(jnp.array([mask], bool))
    assert weighted(weights, TRAJECTORY) == pytest.approx(expected, rel=1e-6)


STEPS = [[0.9, 0.3, 0.4, 1.2, 0.8, 0.1]]


@pytest.mark.parametrize(
    ("mask", "expected"), [([0, 0, 0, 1, 1, 0], 1.0), ([1, 1, 1, 1, 1, 1], 0.616667)]
)
def test_critical_steps_alone(mask, expected):
    weights = loss_weights.token_mean(jnp.array([mask], bool))
    assert weighted(weights, STEPS) == pytest.approx(expected, rel=1e-6)


# A wrong attempt, the words that change course, code, what it printed, the answer.
CHANGES_COURSE = [[0.6, 0.9, 0.5, 0.2, 0.4, 2.0, 0.1]]


@pytest.mark.parametrize(
    ("mask", "expected"), [([0, 0, 1, 1, 1, 0, 1], 0.3), ([1, 1, 1, 1, 1, 0, 1], 0.45)]
)
def test_a_trajectory_of_two_teachers(mask, expected):
    weights = loss_weights.token_mean(jnp.array([mask], bool))
    assert weighted(weights, CHANGES_COURSE) == pytest.approx(expected, rel=1e-6)


def test_sequences_packed_in_a_row_weigh_as_in_rows_of_their_own():
    packed_losses = jnp.array([[0.9, 0.1, 0.7, 0.4, 5.0]])
    mask, segments = jnp.array([[1, 1, 1, 1, 0]], bool), jnp.array([[1, 2, 2, 2, 0]])
    for function, expected in (
        (loss_weights.sequence_mean, 0.65),
        (loss_weights.sequence_sum_mean, 1.05),
    ):
        assert weighted(function(mask, segments), packed_losses) == pytest.approx(expected)


def test_segments_of_different_rows_are_different_sequences():
    mask, segments = jnp.ones((2, 2), bool), jnp.ones((2, 2), int)
    np.testing.assert_allclose(loss_weights.sequence_mean(mask, segments), 0.25)
    np.testing.assert_allclose(loss_weights.sequence_sum_mean(mask, segments), 0.5)


def test_a_sequence_without_anything_to_learn_does_not_count():
    mask = jnp.array([[True, True], [False, False]])
    np.testing.assert_allclose(loss_weights.token_mean(mask), [[0.5, 0.5], [0, 0]])
    np.testing.assert_allclose(loss_weights.sequence_mean(mask), [[0.5, 0.5], [0, 0]])
    np.testing.assert_allclose(loss_weights.sequence_sum_mean(mask), [[1, 1], [0, 0]])


def test_nothing_to_learn_at_all_is_zero_and_not_nan():
    mask, segments = jnp.zeros((2, 3), bool), jnp.ones((2, 3), int)
    for weights in (
        loss_weights.token_mean(mask),
        loss_weights.sequence_mean(mask),
        loss_weights.sequence_mean(mask, segments),
        loss_weights.sequence_sum_mean(mask),
        loss_weights.fixed_length(mask, 3, 2),
    ):
        np.testing.assert_array_equal(weights, np.zeros((2, 3)))


def test_declared_shapes_are_checked_here():
    """That the tests' own import hook works: a segment id is missing for each row."""
    with pytest.raises(jaxtyping.TypeCheckError, match="segment_ids"):
        loss_weights.sequence_mean(MASK, jnp.ones(4, int))
