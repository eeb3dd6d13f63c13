"""Preference and reward losses against numbers worked out by hand, and at the edge."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import losses
from jaxpost.losses import implicit_rewards, unpaired

WITH_REFERENCE = [
    *("dpo", "robust", "hinge", "ipo", "exo", "discopop", "dpop", "nca", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "aot", "aot_unpaired"),
]
WITH_LENGTHS = ["dpo_norm", "ipo_average"]
LENGTHS_ALONE = ["simpo", "alphapo", "orpo"]


def rows(*values) -> list[jax.Array]:
    return [jnp.array([value], float) for value in values]


def close(actual, expected, atol=2e-6):
    np.testing.assert_allclose(actual, np.broadcast_to(expected, np.shape(actual)), atol=atol)


# One pair: chosen, rejected, their reference, their lengths.
PAIR = rows(-10, -14, -11, -12)
LENGTHS = rows(5, 8)
# Another, of three and two tokens; u_w = .6, u_l = −.5, Δ = 1.1.
CHOSEN, REF_CHOSEN = jnp.array([[-0.5, -1.0, -0.3]]), jnp.array([[-0.7, -1.1, -0.6]])
REJECTED, REF_REJECTED = jnp.array([[-1.2, -0.8]]), jnp.array([[-0.9, -0.6]])
SUMS = [jnp.sum(a, axis=1) for a in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)]
COUNTS = rows(3, 2)
NLL = -SUMS[0]
NO_REFERENCE = rows(0, 0)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (losses.dpo, 0.554355),
        (losses.robust, 0.516855),
        (losses.hinge, 0.7),
        (functools.partial(losses.exo, label_smoothing=0.1), 0.358383),
        (losses.nca, 1.315664),
        (losses.bco_pair, 1.242536),
        (losses.sppo_hard, 25.0),
        (losses.apo_zero, 0.925187),
        (losses.apo_down, 0.950537),
        (losses.discopop, 0.740357),
    ],
)
def test_losses_of_the_first_pair(loss, expected):
    close(loss(*PAIR), expected)


def test_losses_of_the_first_pairs_lengths():
    close(losses.ipo_average(*PAIR, *LENGTHS), 20.7025)
    close(losses.dpo_norm(*PAIR, *LENGTHS, beta=0.1), 0.670900)
    close(losses.simpo(*PAIR[:2], *LENGTHS, beta=2, gamma_beta_ratio=0.25), 1.313262)
    odds = losses.orpo(*PAIR[:2], *LENGTHS)
    close(odds, 0.851757)
    close(-jnp.log(jnp.expm1(odds)), -0.295473)  # odds = −log σ(log-odds)
    close(2.0 + 0.1 * odds, 2.085176)
    close(losses.cpo(*PAIR[:2]), 0.513015)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (implicit_rewards.forward_kl, 0.402484),
        (implicit_rewards.jensen_shannon, 0.606570),
    ],
)
def test_divergences(reward, expected):
    chosen, rejected = reward(PAIR[0], PAIR[2]), reward(PAIR[1], PAIR[3])
    close(losses.dpo(chosen, rejected, *NO_REFERENCE), expected)


def test_an_alpha_divergence_lies_between_the_two_of_kullback_and_leibler():
    logps, ref_logps = jnp.array([-1.0, -3, -0.2]), jnp.array([-1.5, -2, -0.2])
    alpha = functools.partial(implicit_rewards.alpha_divergence, logps, ref_logps)
    close(alpha(alpha=0.5), 2 * (1 - jnp.exp(-0.5 * (logps - ref_logps))))
    close(alpha(alpha=0.0), implicit_rewards.forward_kl(logps, ref_logps))
    close(alpha(alpha=0.999), logps - ref_logps, atol=2e-3)


def test_single_completions():
    kto = functools.partial(
        losses.kto, jnp.array([-10.0, -14]), jnp.array([-11.0, -12]), jnp.array([True, False])
    )
    close(kto(jnp.array(0.5)), [0.487503, 0.437823])
    close(kto(jnp.array(0.0)), [0.475021, 0.450166])
    close(losses.apo_zero(*PAIR), jnp.sum(kto(jnp.array(0.0))))


def test_bradley_terry():
    close(losses.bradley_terry(*rows(1.5, 0.5)), 0.313262)
    close(losses.bradley_terry(*rows(1.5, 0.5), margin=0.3), 0.403186)
    rewards = rows(1.2, 0.3)
    close(losses.bradley_terry(*rewards), 0.341154)
    close(losses.bradley_terry(*rewards, margin=2 / 3), 0.583271)
    close(losses.bradley_terry(*rewards, margin=jnp.array([2 / 3])), 0.583271)
    centred = 0.01 * losses.reward_centering(*rewards)
    close(losses.bradley_terry(*rewards) + centred, 0.363654)
    close(losses.bradley_terry(*rewards, margin=2 / 3) + centred, 0.605771)


def test_the_margin_is_data():
    gradient = jax.grad(lambda m: jnp.sum(losses.bradley_terry(*rows(1, 0), margin=m)))
    assert gradient(jnp.array([0.5])) == 0


def test_outcomes_and_steps_are_judged_by_binary_cross_entropy():
    outcomes = losses.value_bce(jnp.array([0.8, -0.2]), jnp.array([1.0, 0]))
    close(jnp.mean(outcomes), 0.484620)
    close(jnp.mean(losses.value_bce(jnp.array([0.8, -0.4, 1.5]), jnp.ones(3))), 0.495176)
    logits = jnp.array([1, 0.2, -0.6])
    soft = losses.value_bce(logits, jnp.array([1, 0.5, 0]))
    hard = losses.value_bce(logits, jnp.array([1.0, 1, 0]))
    close([jnp.sum(soft), jnp.mean(soft)], [1.448889, 0.482963])
    close([jnp.sum(hard), jnp.mean(hard)], [1.348889, 0.449630])
    good, bad = logits + 0.3, jnp.full(3, 0.3)
    of_two_words = jax.nn.log_softmax(jnp.stack([good, bad], axis=1))[:, 0]
    close(losses.value_bce(good - bad, jnp.ones(3)), -of_two_words)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (losses.dpo, 0.639659),
        (functools.partial(losses.dpo, beta=0.3), 0.541698),
        (functools.partial(losses.dpo, label_smoothing=0.1), 0.650659),
        (losses.robust, 0.625909),
        (losses.ipo, 15.21),
        (losses.hinge, 0.89),
        (losses.bco_pair, 1.332057),
        (losses.apo_zero, 0.972507),
        (losses.apo_down, 0.987523),
        (losses.dpop, 0.541698),
        (losses.aot, 0.639659),
        (losses.aot_unpaired, 0.639659),
    ],
)
def test_losses_of_the_second_pair(loss, expected):
    close(loss(*SUMS), expected)


def test_losses_of_the_second_pairs_lengths():
    close(losses.ipo_average(*SUMS, *COUNTS), 20.7025)
    close(losses.dpo_norm(*SUMS, *COUNTS, beta=0.1), 0.670900)
    close(losses.dpo_norm(*SUMS, *COUNTS), 0.100207)
    close(losses.simpo(*SUMS[:2], *COUNTS), 0.798139)
    close(losses.simpo(*SUMS[:2], *COUNTS, beta=2.5, gamma_beta_ratio=0.55), 0.898123)


def test_likelihoods_are_added():
    close(losses.dpo(*SUMS) + NLL / 3, 1.239659)
    close(losses.cpo(*SUMS[:2]), 0.683197)
    close(losses.cpo(*SUMS[:2]) + NLL / 3, 1.283197)
    close(losses.cpo(*SUMS[:2]) + NLL, 2.483197)
    close(losses.slic(*SUMS[:2]), 0.8)
    close(losses.slic(*SUMS[:2]) + 0.1 * NLL, 0.98)
    odds = losses.orpo(*SUMS[:2], *COUNTS)
    close(odds, 0.390997)
    close(NLL / 3 + 0.1 * odds, 0.639100)
    mixed = 0.8 * losses.dpo(*SUMS) + 0.2 * losses.bco_pair(*SUMS) + NLL / 3
    close(mixed, 0.8 * 0.639659 + 0.2 * 1.332057 + 0.6)


def test_the_slope_of_dpo():
    close(jax.grad(lambda x: jnp.sum(losses.dpo(x, *SUMS[1:])))(SUMS[0]), -0.047253)
    close(jax.grad(lambda x: jnp.sum(losses.dpo(SUMS[0], x, *SUMS[2:])))(SUMS[1]), 0.047253)


def test_dpop_where_the_chosen_completion_is_less_likely_than_it_was():
    pair = rows(-0.2, -0.5, 0, 0)
    close(losses.dpop(*pair, penalty=5), 0.803650)
    close(losses.dpop(*pair), 2.963044)
    close(losses.dpop(*pair, penalty=0), 0.649159)


U, REFERENCE, DESIRABLE = jnp.array([0.6, -0.5]), jnp.zeros(2), jnp.array([True, False])


def test_bco():
    bco = functools.partial(losses.bco, U, REFERENCE, DESIRABLE)
    close(bco(jnp.array(0.05)), [0.688160, 0.644397])
    close(jnp.mean(bco(jnp.array(0.05))), 0.666278)
    shift, count = unpaired.running_shift(jnp.zeros(()), jnp.zeros(()), 0.1 * U)
    close([shift, count], [0.005, 2])
    close(bco(shift), 0.666025)
    close(losses.bco_pair(*SUMS), jnp.sum(bco(jnp.array(0.0))))


def test_the_shift_of_bco_is_the_mean_of_all_rewards():
    rewards = jax.random.normal(jax.random.key(0), (7,))
    state = jnp.zeros(()), jnp.zeros(())
    for part in jnp.split(rewards, [2, 5]):
        state = unpaired.running_shift(*state, part)
    close(state, [jnp.mean(rewards), 7])


def test_density_ratio_weights():
    weights = unpaired.density_ratio_weights(jnp.array([0.0, 0.5, 0.75, 0.99, 1]))
    close(weights, [0.5, 1, 3, 10, 10], atol=1e-5)


def test_kto():
    kto = functools.partial(losses.kto, U, REFERENCE, DESIRABLE)
    close(kto(jnp.array(0.2)), [0.490001, 0.482507])
    close(jnp.mean(kto(jnp.array(0.2))), 0.486254)
    close(jnp.mean(kto(jnp.array(0.2), undesirable_weight=1.33)), 0.565868)
    close(kto(jnp.array(0.2), desirable_weight=2.0), [0.980002, 0.482507])
    z = unpaired.mismatched_kl(jnp.array([-1.0, -2.6]), jnp.array([-1.5, -1.5]))
    close(z, 0)  # of −.3
    close(kto(z), [0.485004, 0.487503])
    close(unpaired.mismatched_kl(jnp.array([-1.0, -1.6]), jnp.array([-1.5, -1.5])), 0.2)


@pytest.mark.parametrize("desirable", [True, False])
def test_a_batch_of_one_kind(desirable):
    both = losses.kto(U, REFERENCE, jnp.full(2, desirable), jnp.zeros(2))
    close(both, jax.nn.sigmoid(-0.1 * U if desirable else 0.1 * U))


def test_one_step_after_a_right_prefix():
    """Step-DPO; the prefix may be trained or not."""
    pair = [-1.0, -0.9, -1.4, -0.9]
    close(losses.dpo(*rows(*pair), beta=0.4), 0.616344)
    prefix = [-2.5, -2.5, -3.1, -3.1]
    close(losses.dpo(*rows(*np.add(pair, prefix)), beta=0.4), 0.616344)


def test_segments_of_turns():
    policy_w, ref_w = jnp.array([-1.0, -0.8]), jnp.array([-1.3, -0.7])
    policy_l, ref_l = jnp.array([-1.5, -0.9]), jnp.array([-1.2, -1.0])
    turns = policy_w, policy_l, ref_w, ref_l
    close(losses.dpo(*(jnp.sum(t, keepdims=True) for t in turns)), 0.673347)
    close(losses.dpo(*(t[:1] for t in turns)), 0.663597)
    weights = implicit_rewards.turn_weights(jnp.arange(2), 2)
    close(weights, [1, 0.588235])
    close(losses.dpo(*(jnp.sum(weights * t, keepdims=True) for t in turns)), 0.669320)


def test_a_hierarchy_of_spans():
    zeros = rows(0, 0, 0)
    total = sum(losses.dpo(*rows(delta), *zeros, beta=0.3) for delta in (1.1, 0.5, -0.2))
    close(total + losses.nll(jnp.array([[-0.3, -0.24]])).sum(), 2.426253)


def test_preferences_that_are_judged_while_training():
    """The first of two samples is the better, or the worse by a penalty for having no end."""
    close(losses.dpo(*SUMS), 0.639659)
    close(losses.dpo(SUMS[1], SUMS[0], SUMS[3], SUMS[2]), 0.749659)
    win_rate = jax.nn.sigmoid(jnp.array([0.8]))
    implicit = [0.1 * (SUMS[0] - SUMS[2]), 0.1 * (SUMS[1] - SUMS[3])]
    close(losses.soft_bradley_terry(*implicit, win_rate), 0.673762)
    sample = rows(-3)
    close(losses.xpo(*SUMS[:2], *sample, *SUMS[2:], alpha=0.01), 0.609659)
    close(losses.xpo(*SUMS[:2], *sample, *SUMS[2:]), 0.639629)
    logps, ref_logps = jnp.array([[-0.8, -1.2]]), jnp.array([[-1.0, -1.3]])
    close(jnp.sum(losses.nash_md(logps, ref_logps, jnp.array([[0.7]]))), 0.372)


def test_a_tie_leaves_nash_md_its_divergence_alone():
    logps, ref_logps = jnp.array([[-0.8, -1.2]]), jnp.array([[-1.0, -1.3]])
    gradient = jax.grad(lambda x: jnp.sum(losses.nash_md(x, ref_logps, jnp.array([[0.5]]))))
    close(gradient(logps), 0.1 * (logps - ref_logps))


LOG_2 = float(np.log(2))
AT_REFERENCE = {
    "dpo": LOG_2,
    "robust": LOG_2,
    "hinge": 1.0,
    "ipo": 25.0,
    "exo": -0.5 * (np.log(2 * 0.999) + np.log(2 * 0.001)),
    "discopop": 0.5 * LOG_2 + 0.5,
    "dpop": LOG_2,
    "nca": 2 * LOG_2,
    "bco_pair": 2 * LOG_2,
    "sppo_hard": 50.0,
    "apo_zero": 1.0,
    "apo_down": 1.0,
    "aot": LOG_2,
    "aot_unpaired": LOG_2,
    "dpo_norm": LOG_2,
    "ipo_average": 25.0,
}


@pytest.mark.parametrize("name", AT_REFERENCE)
def test_values_at_the_reference(name):
    logps = jnp.array([-3.0, -700, 0]), jnp.array([-5.0, -1, -2e4])
    lengths = [jnp.array([2, 90, 0]), jnp.array([4, 3, 5000])] if name in WITH_LENGTHS else []
    close(getattr(losses, name)(*logps, *logps, *lengths), AT_REFERENCE[name], atol=1e-5)


@pytest.mark.parametrize("name", [*WITH_REFERENCE, *WITH_LENGTHS])
def test_a_margin_does_not_see_what_it_cancels(name):
    """Nor does a loss of each completion see what policy and reference share."""
    loss, lengths = getattr(losses, name), COUNTS if name in WITH_LENGTHS else []
    plain = loss(*SUMS, *lengths)
    shared = [logps + jnp.array(shift) for logps, shift in zip(SUMS, (-4, -7, -4, -7), strict=True)]
    close(loss(*shared, *lengths), plain, atol=1e-5)
    if name in {"dpo", "robust", "hinge", "ipo", "exo", "discopop", "aot"}:
        prefix = [logps + jnp.array(s) for logps, s in zip(SUMS, (-4, -4, -6, -6), strict=True)]
        close(loss(*prefix), plain, atol=1e-5)


@pytest.mark.parametrize("name", WITH_REFERENCE + WITH_LENGTHS + LENGTHS_ALONE + ["cpo", "slic"])
@pytest.mark.parametrize(
    "pair", [(-1e4, 0), (1e4, 0), (0, -1e4), (0, 1e4), (-1e4, 1e4), (1e4, -1e4)]
)
def test_ten_thousand_nats_do_not_overflow(name, pair):
    data = rows(0, 0) if name in WITH_REFERENCE + WITH_LENGTHS else []
    data += rows(7, 1) if name in WITH_LENGTHS + LENGTHS_ALONE else []

    def total(chosen, rejected):
        return jnp.sum(getattr(losses, name)(chosen, rejected, *data))

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(*rows(*pair))
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradients))


def test_far_from_the_reference_dpo_is_linear():
    close(losses.dpo(*rows(-1e4, 0, 0, 0)), 1000)
    close(losses.dpo(*rows(1e4, 0, 0, 0)), 0)
    close(losses.dpo(*rows(1e4, 0, 0, 0), label_smoothing=0.1), 100)
    close(losses.bradley_terry(*rows(-1e4, 1e4)), 2e4)


def test_an_empty_completion():
    close(losses.dpo(SUMS[0], jnp.zeros(1), SUMS[2], jnp.zeros(1)), 0.663597)
    empty = jnp.zeros(1), jnp.zeros(1, int)
    close(losses.simpo(SUMS[0], empty[0], COUNTS[0], empty[1]), jnp.logaddexp(0, 2 * 0.6 + 1))
    assert np.isfinite(losses.orpo(SUMS[0], empty[0], COUNTS[0], empty[1]))


def test_equal_completions_teach_a_margin_nothing():
    logps, ref_logps = jnp.array([-4.2]), jnp.array([-3.9])

    def both(logps):
        return jnp.sum(losses.dpo(logps, logps, ref_logps, ref_logps))

    close(both(logps), 0.693147)
    assert jax.grad(both)(logps) == 0


def test_losses_that_are_others():
    pair = [jax.random.normal(key, (9,)) for key in jax.random.split(jax.random.key(0), 4)]
    lengths = [jnp.arange(1, 10), jnp.arange(9, 0, -1)]
    means = [logps / length for logps, length in zip(pair, lengths * 2, strict=True)]
    close(losses.dpo_norm(*pair, *lengths), losses.dpo(*means, beta=5.0))
    close(losses.ipo_average(*pair, *lengths), losses.ipo(*means), atol=1e-5)
    close(losses.robust(*pair, label_smoothing=0.0), losses.dpo(*pair))
    close(losses.dpop(*pair, penalty=0), losses.dpo(*pair, beta=0.3))
    flipped = losses.dpo(pair[1], pair[0], pair[3], pair[2])
    both = 0.7 * losses.dpo(*pair) + 0.3 * flipped
    close(losses.dpo(*pair, label_smoothing=0.3), both)
    noisy = 0.7 * losses.robust(*pair, label_smoothing=0.3)
    noisy += 0.3 * losses.robust(pair[1], pair[0], pair[3], pair[2], label_smoothing=0.3)
    close(noisy, losses.dpo(*pair))  # in expectation over flipped labels
    zeros = [jnp.zeros(9)] * 2
    close(losses.cpo(*pair[:2]), losses.dpo(*pair[:2], *zeros))
    close(losses.bradley_terry(*pair[:2]), losses.cpo(*pair[:2], beta=1.0))
    wins = losses.self_play_preference(pair[0], pair[2], jnp.ones(9), eta=10.0)
    wins += losses.self_play_preference(pair[1], pair[3], jnp.zeros(9), eta=10.0)
    close(losses.sppo_hard(*pair), wins, atol=1e-4)


def test_alphapo_becomes_simpo():
    lengths = [jnp.array([5, 3]), jnp.array([2, 4])]
    pair = jnp.array([-10.0, -2]), jnp.array([-3.0, -9])
    limit = losses.alphapo(*pair, *lengths, alpha=1e-3, beta=2.0)
    close(limit, losses.simpo(*pair, *lengths), atol=0.01)
    rewards = [(1 - jnp.exp(p / n) ** -0.25) / 0.25 for p, n in zip(pair, lengths, strict=True)]
    expected = jnp.logaddexp(0, -2.5 * (rewards[0] - rewards[1] - 0.5))
    close(losses.alphapo(*pair, *lengths), expected)


def test_exo_is_least_at_the_smoothed_label():
    margins = jnp.linspace(-30, 60, 9001)
    zeros = jnp.zeros(9001)
    loss = losses.exo(margins, zeros, zeros, zeros, label_smoothing=0.1)
    assert jnp.min(loss) >= -1e-6
    close(margins[jnp.argmin(loss)], np.log(0.9 / 0.1) / 0.1, atol=0.2)


def test_transport_compares_equal_ranks():
    keys = jax.random.split(jax.random.key(3), 4)
    w, r, ref_w, ref_r = (jax.random.normal(key, (7,)) for key in keys)
    expected = -jax.nn.log_sigmoid(0.1 * (jnp.sort(w - r) - jnp.sort(ref_w - ref_r)))
    close(losses.aot(w, r, ref_w, ref_r)[jnp.argsort(w - r)], expected)
    expected = -jax.nn.log_sigmoid(0.1 * (jnp.sort(w - ref_w) - jnp.sort(r - ref_r)))
    close(losses.aot_unpaired(w, r, ref_w, ref_r)[jnp.argsort(w - ref_w)], expected)
    order = jnp.array([3, 0, 6, 1, 2, 5, 4])
    shuffled = losses.aot_unpaired(w, r[order], ref_w, ref_r[order])
    close(jnp.sum(shuffled), jnp.sum(expected))


def test_the_gradient_of_transport_goes_to_the_completion_compared():
    chosen, rejected, zeros = jnp.array([2.0, 1.0]), jnp.array([0.5, -0.5]), jnp.zeros(2)
    gradient = jax.grad(lambda x: jnp.sum(losses.aot_unpaired(chosen, x, zeros, zeros)))(rejected)
    close(gradient, 0.1 * jax.nn.sigmoid(-0.1 * jnp.array([1.5, 1.5])))
    first = jax.grad(lambda x: losses.aot_unpaired(chosen, x, zeros, zeros)[0])(rejected[::-1])
    close(first, [0, 0.1 * jax.nn.sigmoid(-0.15)])


def test_orpo_of_a_certain_completion():
    loss = jax.value_and_grad(lambda x: jnp.sum(losses.orpo(x, *rows(-1, 1, 1))))
    value, gradient = loss(jnp.zeros(1))
    assert 0 <= value < 1e-5
    assert gradient == 0
    close(losses.orpo(*rows(-1, 0, 1, 1)), np.log(1e6) + np.log(np.e - 1), atol=0.1)


@pytest.mark.parametrize(("win_rate", "expected"), [(1, 0.341154), (0, 1.241154), (0.5, 0.791154)])
def test_graded_preferences(win_rate, expected):
    close(losses.soft_bradley_terry(*rows(1.2, 0.3, win_rate)), expected)


def test_ordered_grades_have_probabilities():
    thresholds = jnp.array([-jnp.inf, -1.5, -0.5, 0.5, 1.5, jnp.inf])
    first, second = jnp.full(5, 1.2), jnp.full(5, 0.3)
    loss = losses.ordered_logit(first, second, thresholds[:-1], thresholds[1:])
    close(jnp.exp(-loss), jnp.diff(jax.nn.sigmoid(thresholds - 0.9)))
    close(jnp.sum(jnp.exp(-loss)), 1)
    gradients = jax.grad(lambda *x: jnp.sum(losses.ordered_logit(*x)), argnums=(0, 1, 2, 3))
    found = gradients(first, second, thresholds[:-1], thresholds[1:])
    assert np.all(np.isfinite(found))
    two = losses.ordered_logit(*rows(1.2, 0.3, 0, jnp.inf))
    close(two, losses.bradley_terry(*rows(1.2, 0.3)))


def test_the_rankings_of_a_list_have_probabilities():
    rewards = jnp.array([0.3, -1.0, 2.0])
    ranked = jnp.stack([rewards[jnp.array(order)] for order in itertools.permutations(range(3))])
    loss = losses.plackett_luce(ranked, jnp.ones_like(ranked, bool))
    close(jnp.sum(jnp.exp(-jnp.sum(loss, axis=1))), 1)
    e = np.exp([0.3, -1.0, 2.0])
    close(loss[0], [np.log(e.sum() / e[0]), np.log((e[1] + e[2]) / e[1]), 0])


def test_short_lists_are_as_if_alone():
    rewards, mask = jnp.array([1.2, 0.3, 50.0]), jnp.array([True, True, False])
    loss = losses.plackett_luce(rewards, mask)
    close(loss, [0.341154, 0, 0])
    gradient = jax.grad(lambda x: jnp.sum(losses.plackett_luce(x, mask)))(rewards)
    close(gradient, [-0.289050, 0.289050, 0])
    nothing = jax.grad(lambda x: jnp.sum(losses.plackett_luce(x, jnp.zeros(3, bool))))(rewards)
    close(nothing, 0)


def test_all_pairs_of_a_ranking():
    ranked = jnp.array([2.0, 0.5, -1.0])
    pairs = losses.bradley_terry(
        jnp.broadcast_to(ranked[:, None], (3, 3)), jnp.broadcast_to(ranked, (3, 3))
    )
    weights = jnp.triu(jnp.ones((3, 3)), 1) / 3
    expected = np.mean([np.log1p(np.exp(-d)) for d in (1.5, 3.0, 1.5)])
    close(jnp.sum(weights * pairs), expected)


def test_words_beyond_the_shorter_completion_count_less():
    mask = jnp.array([[False, True, True, True], [True, True, False, False]])
    weigh = implicit_rewards.desensitized_weights
    close(weigh(mask, mask[::-1], alpha=0.25), [[0, 1, 1, 0.25], [1, 1, 0, 0]])
    close(weigh(mask, mask[::-1], alpha=1.0), mask)
    close(weigh(mask, mask[::-1], alpha=0.0), [[0, 1, 1, 0], [1, 1, 0, 0]])


def test_a_pair_weighs_what_it_is_probable():
    weigh = implicit_rewards.pair_weights
    close(weigh(*PAIR[:2], *LENGTHS), np.exp(-2 - 1.75))
    close(weigh(*rows(0, 0, 0, 0)), 1)
    assert jax.grad(lambda x: jnp.sum(weigh(x, PAIR[1], *LENGTHS)))(PAIR[0]) == 0
