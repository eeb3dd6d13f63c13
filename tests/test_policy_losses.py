"""Policy losses, divergences and mirror descent against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import advantages, loss_weights, losses


def ragged(*rows) -> jax.Array:
    """Rows of several lengths, zero after their ends."""
    width = max(map(len, rows))
    return jnp.array([[*row, *[0.0] * (width - len(row))] for row in rows], float)


def close(actual, expected, atol=2e-6):
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=0)


def total(weights, values) -> float:
    return float(jnp.sum(weights * values))


# A group of four completions of lengths 2, 3, 4 and 1.
LENGTHS = jnp.array([2, 3, 4, 1])
MASK = jnp.arange(4) < LENGTHS[:, None]
DELTA = ragged([0.1, -0.05], [0.3, 0, -0.3], [0.05, 0.05, -0.4, 0.02], [0.25])
LOGPS = ragged([-0.5, -1], [-0.7, -0.2, -1.1], [-0.3, -0.9, -1.4, -0.6], [-0.8])
OLD = LOGPS - DELTA
REF = LOGPS + ragged([0, 0.1], [-0.2, 0, 0.1], [0, 0, 0.3, -0.1], [0.05])
REWARDS = jnp.array([[1.0, 0, 0, 1]])
NORMALIZED = advantages.per_token(advantages.group_normalized(REWARDS), MASK)
BIASED = advantages.per_token(advantages.group_normalized(REWARDS, ddof=0), MASK)
TOKENS = loss_weights.token_mean(MASK)
SEQUENCES = loss_weights.sequence_mean(MASK)


def test_reinforce_is_the_score_times_the_advantage():
    close(losses.reinforce(jnp.array([-0.5, -2.0]), jnp.array([2.0, -1.0])), [1, -2])


@pytest.mark.parametrize(
    ("advantage", "ratio", "single", "dual"),
    [
        (1.0, 1.5, -1.28, -1.28),
        (1.0, 0.5, -0.5, -0.5),
        (-1.0, 1.5, 1.5, 1.5),
        (-1.0, 0.5, 0.8, 0.8),
        (-1.0, 5.0, 5.0, 3.0),
    ],
)
def test_clip_and_dual_clip(advantage, ratio, single, dual):
    arguments = jnp.log(jnp.array([ratio])), jnp.zeros(1), jnp.array([advantage])
    close(losses.ppo_clip(*arguments, clip_low=0.2, clip_high=0.28), single)
    close(losses.ppo_dual_clip(*arguments, clip_low=0.2, clip_high=0.28), dual)


def test_ppo_of_three_tokens():
    logps, old = jnp.array([[-0.9, -0.7, -1.6]]), jnp.array([[-1, -0.5, -2]])
    given = jnp.array([[1.174159, 0.095571, -1.269730]])
    close(jnp.mean(losses.ppo_clip(logps, old, given)), 0.172774)


def test_grpo():
    loss = losses.ppo_clip(LOGPS, OLD, NORMALIZED)
    close(
        loss,
        ragged(
            [-0.957104, -0.823787],
            [1.169010, 0.866024, 0.692819],
            [0.910426, 0.910426, 0.692819, 0.883519],
            [-1.039229],
        ),
    )
    close(total(SEQUENCES, loss), -0.042773)
    close(total(SEQUENCES, losses.ppo_clip(LOGPS, OLD, BIASED)), -0.049390)
    kl = losses.kl_k3(LOGPS, REF)
    close(
        kl,
        ragged([0, 0.005171], [0.018731, 0, 0.005171], [0, 0, 0.049859, 0.004837], [0.001271]),
    )
    close(total(SEQUENCES, kl), 0.006374)
    close(total(SEQUENCES, loss + 0.04 * kl), -0.042518)


def test_dr_grpo():
    given = advantages.per_token(advantages.group_centered(REWARDS), MASK)
    weights = loss_weights.fixed_length(MASK, length=4, sequences=4)
    close(total(weights, losses.ppo_clip(LOGPS, OLD, given)), 0.119256)


def test_dapo():
    loss = losses.ppo_clip(LOGPS, OLD, NORMALIZED, clip_high=0.28)
    close(total(TOKENS, loss), 0.323564)
    close(total(TOKENS, losses.ppo_clip(LOGPS, OLD, BIASED, clip_high=0.28)), 0.373619)
    close(total(SEQUENCES, loss), -0.060094)


def test_gspo_per_sequence_and_per_token():
    sums = [jnp.sum(array, axis=1) for array in (LOGPS, OLD)]
    loss = losses.gspo(*sums, NORMALIZED[:, 0], LENGTHS)
    close(loss, [-0.866370, 0.866024, 0.865764, -0.866370])
    close(jnp.mean(loss), -0.000238)
    log_s = loss_weights.sequence_means(DELTA, MASK)
    close(jnp.exp(log_s[:, 0]), [1.025315, 1, 0.932394, 1.284025])

    def per_sequence(logps):
        return jnp.mean(losses.gspo(jnp.sum(logps, 1), sums[1], NORMALIZED[:, 0], LENGTHS))

    def per_token(logps):
        log_s = loss_weights.sequence_means(logps - OLD, MASK)
        return jnp.sum(SEQUENCES * losses.gspo_token(logps, log_s, NORMALIZED))

    close(per_token(LOGPS), per_sequence(LOGPS))
    gradient = jnp.where(MASK, jax.grad(per_sequence)(LOGPS), 0)
    assert np.any(gradient != 0)
    close(jax.grad(per_token)(LOGPS), gradient)


def test_the_ratio_of_gspo_is_the_mean_and_not_the_sum():
    deltas, one = jnp.array([0.1, 0.3, -0.1]), jnp.ones(1)
    mean = losses.gspo(deltas.sum()[None], jnp.zeros(1), -one, jnp.array([3]))
    close(mean, 1.105171)
    close(losses.gspo(deltas.sum()[None], jnp.zeros(1), -one, jnp.array([1])), 1.349859)
    close(losses.gspo(jnp.zeros(1), jnp.zeros(1), -one, jnp.array([0])), 1.0)


def test_cispo_weighs_every_token():
    def loss(logps):
        return jnp.sum(TOKENS * losses.cispo(logps, OLD, NORMALIZED, clip_high=0.28))

    close(loss(LOGPS), -0.190108)
    close(
        jax.grad(loss)(LOGPS),
        ragged(
            [-0.095710, -0.082379],
            [0.110851, 0.086602, 0.064157],
            [0.091043, 0.091043, 0.058051, 0.088352],
            [-0.110851],
        ),
    )
    bounded = jax.grad(lambda x: jnp.sum(losses.cispo(x, OLD, NORMALIZED, clip_low=0.2)))(LOGPS)
    close(bounded[2, 2], 0.8 * 0.866024)


def test_rloo_clips_the_product_of_the_ratios():
    given = advantages.leave_one_out(REWARDS)[0]
    loss = losses.ppo_clip(jnp.sum(LOGPS, 1), jnp.sum(OLD, 1), given)
    close(jnp.exp(jnp.sum(DELTA, 1)), [1.051271, 1, 0.755784, 1.284025])
    close(jnp.mean(loss), -0.075212)


def test_sapo_gate():
    one = jnp.ones(1)
    close(losses.sapo(jnp.log(1.5 * one), jnp.zeros(1), one), -2.489837)
    close(losses.sapo(jnp.zeros(1), jnp.zeros(1), one, tau_positive=0.5), -4)
    close(losses.sapo(jnp.zeros(1), jnp.zeros(1), -one), 2 / 1.05)


def test_vespo_weight():
    gradient = jax.grad(lambda x: losses.vespo(x, jnp.zeros(1), jnp.ones(1))[0])
    close(gradient(jnp.log(jnp.array([1.2]))), -0.790289)


def test_sequence_level_ppo():
    given = advantages.per_token(
        jnp.array([[0.5, -0.8, 0.8]]), jnp.arange(3) < jnp.array([[2], [3], [1]])
    )
    delta = ragged([0.1, 0.3], [-0.3, 0.05, 0.1], [0])
    loss = losses.ppo_dual_clip(delta, jnp.zeros_like(delta), given)
    close(loss, ragged([-0.552585, -0.6], [0.64, 0.841017, 0.884137], [-0.8]))
    close(jnp.sum(loss) / 6, 0.068761)


def test_decoupled_ppo_of_stale_data():
    log_w, log_u = jnp.array([0.2, -0.1, 1.9]), jnp.array([0.1, 0.4, -0.3])
    given, zeros = jnp.array([1.0, 1, -1]), jnp.zeros(3)
    loss = losses.ppo_decoupled(log_u, zeros, -log_w, given)
    close(loss, [-1.349859, -1.085805, 5.348716], atol=5e-6)
    close(jnp.mean(loss), 0.971017)
    masked = loss_weights.banded_importance(zeros, -log_w, low=0, high=5)
    close(jnp.mean(masked * losses.ppo_clip(log_u, zeros, given)), -0.811888)
    coupled = losses.ppo_clip(log_u + log_w, zeros, given)
    close(coupled, [-1.2, -1.2, 4.953032], atol=5e-6)
    close(jnp.mean(coupled), 0.851011)


LOG_W = jnp.array([[0.1, -0.8, 1.2, 0.05]])
NOUGHT = jnp.zeros((1, 4))
ALL = jnp.ones((1, 4), bool)


def test_a_sampler_that_is_not_the_policy():
    close(loss_weights.importance(LOG_W, NOUGHT), [[1.105171, 0.449329, 3.320117, 1.051271]])
    truncated = loss_weights.truncated_importance(LOG_W, NOUGHT)
    close(truncated, [[1.105171, 0.449329, 2, 1.051271]])
    close(loss_weights.banded_importance(LOG_W, NOUGHT), [[1.105171, 0, 0, 1.051271]])
    close(loss_weights.mean_one(truncated, ALL), [[0.959814, 0.390231, 1.736951, 0.913003]])
    product = loss_weights.sequence_totals(LOG_W, None)
    close(loss_weights.importance(product, NOUGHT), jnp.full((1, 4), 1.733253))
    close(jnp.exp(loss_weights.sequence_means(LOG_W, ALL)), jnp.full((1, 4), 1.147402))


@pytest.mark.parametrize(("bound", "kept"), [(1.147, 0), (1.148, 1)])
def test_sequences_far_off_in_the_mean_are_left_out(bound, kept):
    close(loss_weights.near_in_mean(LOG_W, NOUGHT, ALL, high=bound), jnp.full((1, 4), kept))
    padded = [jnp.pad(array, ((0, 0), (0, 3))) for array in (LOG_W, NOUGHT, ALL)]
    close(loss_weights.near_in_mean(*padded, high=bound)[:, :4], jnp.full((1, 4), kept))


@pytest.mark.parametrize(("limit", "kept"), [(0.3439, 0), (0.3440, 1)])
def test_sequences_far_off_in_divergence_are_left_out(limit, kept):
    kept_tokens = loss_weights.near_in_divergence(LOG_W, NOUGHT, ALL, limit=limit)
    close(kept_tokens, jnp.full((1, 4), kept))


def test_a_masked_token_stays_in_the_divisor_or_not():
    keep = loss_weights.banded_importance(LOG_W, NOUGHT) > 0
    ones = jnp.ones((1, 4))
    assert total(loss_weights.token_mean(ALL) * keep, ones) == pytest.approx(0.5)
    assert total(loss_weights.token_mean(ALL & keep), ones) == pytest.approx(1.0)


def test_importances_are_constants():
    def objective(logps):
        return jnp.sum(loss_weights.truncated_importance(logps, NOUGHT))

    close(jax.grad(objective)(LOG_W), NOUGHT)


def test_truncated_completions_are_not_in_the_divisor():
    mask = jnp.arange(4) < jnp.array([[2], [4]])
    for truncated, expected in (([False, True], 1.0), ([True, True], 0.0)):
        weights = loss_weights.token_mean(mask & ~jnp.array(truncated)[:, None])
        assert total(weights, mask) == pytest.approx(expected)


def test_advantages_of_padding_do_not_matter():
    given = jnp.array([[1.0, 1, 10, 10]])
    mask = jnp.array([[True, True, False, False]])
    loss = losses.ppo_clip(NOUGHT, NOUGHT, given)
    assert total(loss_weights.token_mean(mask), loss) == pytest.approx(-1)


@pytest.mark.parametrize("width", [4, 9])
def test_padding_changes_nothing(width):
    pad = ((0, 2), (0, width - 4))
    logps, old, given, mask = (jnp.pad(x, pad) for x in (LOGPS, OLD, NORMALIZED, MASK))
    for function in (losses.ppo_clip, losses.ppo_dual_clip, losses.cispo, losses.sapo):
        plain = total(SEQUENCES, function(LOGPS, OLD, NORMALIZED))
        assert total(loss_weights.sequence_mean(mask), function(logps, old, given)) == (
            pytest.approx(plain, rel=1e-6)
        )


def test_means_of_packed_sequences():
    packed = jnp.array([[0.1, -0.05, 0.3, 0.0, -0.3, 9.0]])
    mask, segments = jnp.arange(6)[None] < 5, jnp.array([[1, 1, 2, 2, 2, 0]])
    means = loss_weights.sequence_means(packed, mask, segments)
    close(means, [[0.025, 0.025, 0, 0, 0, 0]])


# Every surrogate is the policy gradient where the policy has not moved yet.
SURROGATES = {
    "ppo_clip": losses.ppo_clip,
    "ppo_dual_clip": losses.ppo_dual_clip,
    "ppo_decoupled": lambda logps, old, given: losses.ppo_decoupled(logps, old, old, given),
    "gspo": lambda logps, old, given: losses.gspo(logps, old, given, jnp.ones(logps.shape)),
    "gspo_token": lambda logps, old, given: losses.gspo_token(logps, logps - old, given),
    "cispo": losses.cispo,
    "sapo": losses.sapo,
    "vespo": losses.vespo,
    "pmd": lambda *arrays: losses.pmd(*arrays, tau=0.3),
    "mirror_descent": lambda *arrays: losses.mirror_descent(*arrays, tau=0.3),
    "pmd_token": lambda *arrays: losses.pmd_token(*arrays, tau=0.3, log_low=-1, log_high=1),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_the_gradient_at_ratio_one_is_reinforce(name):
    given = jnp.array([1.5, -0.5, 0.25, 0.0])
    logps = jnp.array([-0.3, -2.0, -1e-3, -9.0])
    gradient = jax.grad(lambda x: jnp.sum(SURROGATES[name](x, logps, given)))(logps)
    close(gradient, -given)


@pytest.mark.parametrize(
    ("difference", "k1", "k2", "k3"), [(0.5, 0.5, 0.125, 0.106531), (-0.5, -0.5, 0.125, 0.148721)]
)
def test_divergence_estimates(difference, k1, k2, k3):
    pair = jnp.array([difference]), jnp.zeros(1)
    close(losses.kl_k1(*pair), k1)
    close(losses.kl_k2(*pair), k2)
    close(losses.kl_k3(*pair), k3)


def test_k3_is_never_negative():
    differences = jnp.concatenate([jnp.logspace(-30, 1.3, 4000), -jnp.logspace(-30, 1.3, 4000)])
    assert jnp.min(losses.kl_k3(differences, jnp.zeros_like(differences))) >= 0


@pytest.mark.parametrize(
    ("loss", "value", "slope"),
    [(losses.kl_k3, 0.367879, 0.632121), (losses.kl_k3_plus, 0.367879, 1), (losses.kl_k2, 0.5, 1)],
)
def test_values_and_slopes_of_divergences(loss, value, slope):
    pair = jnp.array([-1.0]), jnp.array([-2.0])
    close(loss(*pair), value)
    close(jax.grad(lambda x: loss(x, pair[1])[0])(pair[0]), slope)


PI, PI_REF = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.4, 0.4, 0.2])
EXACT = [0.098938, -0.093885, -0.005053]


def as_loss(estimate):
    """The expected gradient on the logits of π, of a loss on samples of π."""
    frozen = jax.nn.log_softmax(jnp.log(PI))

    def expected(logits):
        return jnp.sum(jnp.exp(frozen) * estimate(jax.nn.log_softmax(logits), jnp.log(PI_REF)))

    return jax.grad(expected)(jnp.log(PI))


def as_reward(estimate):
    """The same, of REINFORCE with the estimate as a cost."""
    cost = estimate(jnp.log(PI), jnp.log(PI_REF))

    def expected(logits):
        return -jnp.sum(PI * losses.reinforce(jax.nn.log_softmax(logits), cost))

    return jax.grad(expected)(jnp.log(PI))


def test_the_exact_divergence_of_three_words():
    def divergence(logits):
        logps = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logps) * (logps - jnp.log(PI_REF)))

    close(jax.grad(divergence)(jnp.log(PI)), EXACT)
    estimates = (losses.kl_k1, losses.kl_k2, losses.kl_k3)
    values = [jnp.sum(PI * estimate(jnp.log(PI), jnp.log(PI_REF))) for estimate in estimates]
    close(jnp.array(values), [0.025267, 0.024862, 0.025267])


def weighted_k3(logps, ref_logps):
    return losses.kl_k3_weighted(logps, jnp.log(PI), ref_logps)


@pytest.mark.parametrize(
    ("place", "estimate", "expected"),
    [
        (as_loss, losses.kl_k1, [0, 0, 0]),
        (as_loss, losses.kl_k2, EXACT),
        (as_loss, losses.kl_k3, [0.1, -0.1, 0]),
        (as_loss, losses.kl_k3_plus, EXACT),
        (as_loss, weighted_k3, EXACT),
        (as_reward, losses.kl_k1, EXACT),
        (as_reward, losses.kl_k3, [-0.001062, 0.006115, -0.005053]),
    ],
)
def test_each_divergence_has_its_place(place, estimate, expected):
    close(place(estimate), expected)


def test_weighted_k3_is_exact_on_samples_of_any_policy():
    old = jnp.log(jnp.array([0.2, 0.2, 0.6]))

    def expected(logits):
        logps = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(old) * losses.kl_k3_weighted(logps, old, jnp.log(PI_REF)))

    value, gradient = jax.value_and_grad(expected)(jnp.log(PI))
    close(value, 0.025267)
    close(gradient, EXACT)


L = jnp.array([0.2, -0.1, 0.0, 0.1])


@pytest.mark.parametrize(
    ("advantage", "residuals", "loss", "gradient"),
    [
        (
            advantages.group_centered(REWARDS),
            [0.3, -0.4, -0.5, 0.4],
            0.165,
            [-0.15, 0.2, 0.25, -0.2],
        ),
        (
            advantages.partition_centered(REWARDS, tau=1.0),
            [0.179885, -0.520115, -0.620115, 0.279885],
            0.191439,
            [-0.089943, 0.260057, 0.310057, -0.139943],
        ),
    ],
)
def test_pmd(advantage, residuals, loss, gradient):
    def mean_square(log_ratios):  # the reports' loss, before its division by 2τ
        return 2 * jnp.mean(losses.pmd(log_ratios, jnp.zeros(4), advantage[0], tau=1.0))

    close(advantage[0] - L, residuals)
    close(mean_square(L), loss)
    close(jax.grad(mean_square)(L), gradient)


def test_pmd_gradient_is_equation_3():
    given = advantages.group_centered(REWARDS)[0]
    loss, slope = jax.value_and_grad(
        lambda x: jnp.mean(losses.pmd(x, jnp.zeros(4), given, tau=1.0))
    )(L)
    close(loss, 0.0825)
    close(-slope, [0.075, -0.1, -0.125, 0.1])
    level = jax.grad(lambda x: jnp.mean(losses.pmd(x, jnp.zeros(4), jnp.zeros(4), tau=1.0)))(L)
    close(-level, [-0.05, 0.025, 0, -0.025])


def test_pmd_by_length():
    given = advantages.leave_one_out(REWARDS)[0]
    loss = losses.pmd(L, jnp.zeros(4), given, tau=1.0) / jnp.array([2, 4, 5, 10])
    close(jnp.mean(loss), 0.038771)
    one = jnp.ones(1)
    value, slope = jax.value_and_grad(
        lambda x: (losses.pmd(x, 0 * one, 0.75 * one, tau=0.5) / 4)[0]
    )(0.2 * one)
    close(value, 0.105625)
    close(slope, -0.1625)


def test_pmd_weights_are_one_number_a_sequence():
    weights = jnp.array([2.0, 0.0])
    assert float(jnp.mean(weights * jnp.array([1.0, 3.0]))) == 1.0
    assert losses.pmd(L, jnp.zeros(4), L, tau=1.0).shape == (4,)


@pytest.mark.parametrize(
    ("loss", "tau", "optimum", "tolerance"),
    [
        (losses.pmd, 0.5, [0.776072, 0.084630, 0.139298], 2e-6),
        (losses.mirror_descent, 0.5, [0.814098, 0.066106, 0.119796], 2e-6),
    ],
)
def test_where_mirror_descent_ends(loss, tau, optimum, tolerance):
    rewards = jnp.array([1.0, 0, 0.5])
    given = rewards - jnp.sum(PI * rewards)

    def expected(logits):
        return jnp.sum(PI * loss(jax.nn.log_softmax(logits), jnp.log(PI), given, tau=tau))

    close(jax.grad(expected)(jnp.log(jnp.array(optimum))), [0, 0, 0], tolerance)
    assert np.abs(jax.grad(expected)(jnp.log(PI))).max() > 0.05


def test_mirror_descent_is_pmd_reweighted():
    def gradient(loss):
        return jax.grad(lambda x: jnp.sum(loss(x, jnp.zeros(4), 3 * L, tau=0.7)))(5 * L)

    close(gradient(losses.mirror_descent), jnp.exp(5 * L) * gradient(losses.pmd), 1e-5)


def test_pmd_per_token_has_no_policy_gradient_outside_its_window():
    log_ratios = jnp.array([[0.05, 0.4], [-0.1, -0.6]])
    given = jnp.array([[0.5, 0.5], [-0.5, -0.5]])

    def mean(x, tau):
        zeros = jnp.zeros((2, 2))
        return jnp.mean(losses.pmd_token(x, zeros, given, tau=tau, log_low=-0.5, log_high=0.3))

    close(-jax.grad(mean)(log_ratios, 0.0), [[0.131409, 0], [-0.113105, 0]])
    pull = jax.grad(mean)(log_ratios, 1.0) - jax.grad(mean)(log_ratios, 0.0)
    close(pull, log_ratios / 2)


def test_self_play_preference():
    loss = losses.self_play_preference(
        jnp.array([0.3, -0.2]), jnp.zeros(2), jnp.array([0.8, 0.2]), eta=10
    )
    close(jnp.mean(loss), 7.565, 1e-5)


def test_the_entropy_bonus_is_subtracted():
    close(jax.grad(lambda h: losses.entropy_bonus(h)[0])(jnp.array([0.7])), -1)
