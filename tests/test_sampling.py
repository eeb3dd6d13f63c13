"""The sampled distribution: hand-computed truncations, ties, gradients, and draws by key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import sampling

FIVE = jnp.log(jnp.array([0.4, 0.3, 0.15, 0.1, 0.05]))
INF = float("inf")


def kept(logits, **settings):
    """Indices that `truncate` keeps in one row."""
    return np.flatnonzero(np.isfinite(sampling.truncate(jnp.asarray(logits), **settings))).tolist()


def test_nothing_asked_changes_nothing():
    np.testing.assert_array_equal(sampling.truncate(FIVE), FIVE)


def test_temperature_divides():
    np.testing.assert_allclose(
        sampling.truncate(jnp.array([2.0, 0.0]), temperature=0.5), [4.0, 0.0]
    )


def test_log_probability_at_temperature_half():
    logps = jax.nn.log_softmax(sampling.truncate(jnp.array([2.0, 0.0]), temperature=0.5))
    np.testing.assert_allclose(logps[0], -0.018150, atol=1e-6)


def test_top_k_keeps_exactly_k_and_lower_ids_among_equals():
    assert kept([1.0, 3.0, 2.0, 3.0], top_k=2) == [1, 3]
    assert kept([1.0, 2.0, 3.0, 2.0, 2.0], top_k=3) == [1, 2, 3]
    assert kept([1.0, 1.0, 1.0], top_k=2) == [0, 1]
    assert kept([1.0, 2.0], top_k=5) == [0, 1]


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.01, [0]),
        (0.4, [0]),
        (0.41, [0, 1]),
        (0.7, [0, 1]),
        (0.85, [0, 1, 2]),
        (0.951, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_smallest_set_with_that_mass(p, expected):
    assert kept(FIVE, top_p=p) == expected


def test_top_p_of_one_keeps_all():
    assert kept([0.0, -30.0, -200.0], top_p=1.0) == [0, 1, 2]
    assert kept([0.0, -30.0, -200.0], top_p=jnp.array(1.0)) == [0, 1, 2]


def test_top_p_takes_lower_ids_among_equals():
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0, 1]
    assert kept(np.log([0.2, 0.4, 0.2, 0.2]), top_p=0.7) == [0, 1, 2]
    assert kept([0.0, 0.0], top_p=1e-9) == [0]


def test_min_p_is_relative_to_the_most_probable():
    assert kept(FIVE, min_p=0.3) == [0, 1, 2]
    assert kept([0.0, 0.0, -1.0], min_p=1.0) == [0, 1]
    assert kept(FIVE, min_p=0.0) == [0, 1, 2, 3, 4]


def test_top_p_counts_what_top_k_left():
    # Of [.4, .3] renormalised the first holds .571: enough for .55, though .4 is not.
    assert kept(FIVE, top_p=0.55) == [0, 1]
    assert kept(FIVE, top_k=2, top_p=0.55) == [0]


def test_temperature_comes_first():
    # At temperature 0.5 the squares [.16, .09, .0225, .01, .0025] / .285: the first holds .561.
    assert kept(FIVE, temperature=0.5, top_p=0.56) == [0]


def test_zero_temperature_keeps_the_first_of_the_highest():
    logits = jnp.array([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    probabilities = jax.nn.softmax(sampling.truncate(logits, temperature=0.0, top_k=2, top_p=0.9))
    np.testing.assert_array_equal(probabilities, [[0, 1, 0], [1, 0, 0]])


def test_top_p_agrees_with_sorting():
    rng = np.random.default_rng(0)
    logits = np.concatenate([rng.normal(size=(20, 300)), rng.integers(0, 4, size=(20, 300))])
    for p in (0.05, 0.5, 0.9, 0.999):
        ours = np.isfinite(sampling.truncate(jnp.asarray(logits, jnp.float32), top_p=p))
        for row, mine in zip(logits, ours, strict=True):
            probabilities = np.exp(row) / np.exp(row).sum()
            order = np.argsort(-probabilities, kind="stable")
            count = np.searchsorted(np.cumsum(probabilities[order]), p - 1e-6) + 1
            np.testing.assert_array_equal(np.flatnonzero(mine), np.sort(order[:count]))


def test_traced_numbers_and_leading_axes():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 50))
    traced = jax.jit(
        lambda x, t, p, m: sampling.truncate(x, temperature=t, top_k=20, top_p=p, min_p=m)
    )(logits, 0.7, 0.9, 0.05)
    plain = sampling.truncate(logits, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    np.testing.assert_allclose(traced, plain, rtol=1e-6)
    rows = [
        sampling.truncate(row, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
        for row in logits[0]
    ]
    np.testing.assert_allclose(plain[0], jnp.stack(rows), rtol=1e-6)


def test_gradient_passes_through_kept_logits_only():
    def logp(logits):
        return jax.nn.log_softmax(
            sampling.truncate(logits, temperature=0.5, top_k=3, top_p=0.99, min_p=0.1)
        )[0]

    kept_three = jax.nn.softmax(FIVE[:3] / 0.5)
    expected = np.append((np.array([1.0, 0, 0]) - kept_three) / 0.5, [0, 0])
    np.testing.assert_allclose(jax.grad(logp)(FIVE), expected, atol=1e-6)


def test_gradient_of_a_greedy_choice_is_zero():
    gradient = jax.grad(lambda x: jax.nn.log_softmax(sampling.truncate(x, temperature=0.0))[0])(
        FIVE
    )
    np.testing.assert_array_equal(gradient, np.zeros(5))


@pytest.mark.parametrize("temperature", [1e-42, 1e-38, 1e-30, 1e-21])
def test_temperatures_that_would_overflow_are_greedy(temperature):
    logits = jnp.array([[1e3, 1e4, 1e4, -1e4], [-3e4, -1.0, -2.0, -1e30]])
    kept_cold = sampling.truncate(logits, temperature=temperature)
    np.testing.assert_array_equal(kept_cold, sampling.truncate(logits, temperature=0.0))
    keys = jax.random.split(jax.random.key(0), 2)
    tokens, logps = sampling.sample_token(keys, logits, temperature=temperature)
    np.testing.assert_array_equal(tokens, [1, 1])
    np.testing.assert_array_equal(logps, [0.0, 0.0])


@pytest.mark.parametrize("temperature", [1e-20, 1e-15, 1e-3])
def test_the_least_temperatures_stay_finite(temperature):
    logits = jnp.array([1e4, 9e3, -1e4])
    kept_cold = sampling.truncate(logits, temperature=jnp.float32(temperature))
    assert np.isfinite(kept_cold).all()
    np.testing.assert_array_equal(jax.nn.softmax(kept_cold), [1, 0, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": INF}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        sampling.truncate(FIVE, **settings)


def test_draws_follow_the_truncated_distribution():
    keys = jax.random.split(jax.random.key(1), 20_000)
    draw = functools.partial(sampling.sample_token, temperature=0.8, top_k=4, min_p=0.1)
    tokens, logps = jax.jit(draw)(keys, jnp.broadcast_to(FIVE, (20_000, 5)))
    expected = np.array([0.4, 0.3, 0.15, 0.1, 0]) ** 1.25
    expected /= expected.sum()
    np.testing.assert_allclose(np.bincount(tokens, minlength=5) / 20_000, expected, atol=0.012)
    np.testing.assert_allclose(np.exp(logps), expected[np.asarray(tokens)], atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7, "top_k": 300}])
def test_draws_from_several_blocks_of_the_vocabulary(settings):
    count, size = 40_000, 2 * sampling.BLOCK + 88  # the last block is not full
    logits = 2 * jax.random.normal(jax.random.key(4), (size,))
    keys = jax.random.split(jax.random.key(5), count)
    one = functools.partial(sampling.sample_token, **settings)
    tokens, logps = jax.jit(jax.vmap(one, (0, None)))(keys, logits)
    wanted = jax.nn.log_softmax(sampling.truncate(logits, **settings))
    np.testing.assert_allclose(logps, wanted[tokens], atol=1e-5)
    expected = np.exp(wanted) * count
    often = expected > 20
    deviation = (np.bincount(tokens, minlength=size) - expected)[often] / np.sqrt(expected[often])
    assert 0.8 < np.mean(np.square(deviation)) < 1.25  # chi-squared for each degree of freedom
    assert np.abs(deviation).max() < 5


def test_greedy_takes_the_first_of_the_highest_in_any_block():
    size = 2 * sampling.BLOCK + 88
    logits = jax.random.normal(jax.random.key(4), (5, size))
    logits = logits.at[jnp.arange(5), jnp.array([3, 255, 256, 511, 599])].set(9.0)
    logits = logits.at[:, 512].set(9.0)
    tokens, _ = sampling.sample_token(None, logits, temperature=0.0)
    np.testing.assert_array_equal(tokens, [3, 255, 256, 511, 512])
    broken = sampling.sample_token(None, logits.at[0, 7].set(jnp.nan), temperature=0.0)[1]
    assert np.isnan(broken[0])
    np.testing.assert_array_equal(broken[1:], 0)


def test_a_row_depends_on_its_own_key_only():
    logits = jax.random.normal(jax.random.key(2), (6, 40))
    keys = jax.random.split(jax.random.key(3), 6)
    tokens, logps = sampling.sample_token(keys, logits, temperature=0.9, top_p=0.8)
    for row in (0, 4):
        token, logp = sampling.sample_token(keys[row], logits[row], temperature=0.9, top_p=0.8)
        assert token == tokens[row]
        np.testing.assert_allclose(logp, logps[row], atol=1e-6)
    turned, _ = sampling.sample_token(keys[::-1], logits[::-1], temperature=0.9, top_p=0.8)
    np.testing.assert_array_equal(turned[::-1], tokens)


def test_greedy_draws_have_log_probability_zero():
    tokens, logps = sampling.sample_token(
        jax.random.split(jax.random.key(0), 2),
        jnp.array([[0.0, 5.0, 5.0], [1.0, 0.0, 0.0]]),
        temperature=0.0,
    )
    np.testing.assert_array_equal(tokens, [1, 0])
    np.testing.assert_array_equal(logps, [0.0, 0.0])
