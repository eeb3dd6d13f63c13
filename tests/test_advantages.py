"""Advantages, returns, shaping and controllers against numbers worked out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpost import advantages, coefficients, loss_weights, losses, metrics

NAN = float("nan")


def close(actual, expected, atol=2e-6):
    np.testing.assert_allclose(actual, expected, atol=atol, rtol=0)


# Every function of a group's rewards alone.
GROUPS = {
    "group_centered": advantages.group_centered,
    "group_normalized": advantages.group_normalized,
    "batch_normalized": advantages.batch_normalized,
    "leave_one_out": advantages.leave_one_out,
    "partition_centered": lambda *given: advantages.partition_centered(*given, tau=0.5),
    "leave_one_out_partition": lambda *given: advantages.leave_one_out_partition(*given, tau=0.5),
    "mean_normalized": advantages.mean_normalized,
    "contrast_scaled": advantages.contrast_scaled,
    "optimal_baseline": lambda rewards, counted=None: advantages.optimal_baseline(
        rewards, jnp.arange(1, rewards.shape[1] + 1) * jnp.ones((len(rewards), 1)), counted
    ),
}
LONE_SUCCESS = [1.0, 0, 0, 0]


@pytest.mark.parametrize(
    ("function", "rewards", "expected"),
    [
        ("group_centered", LONE_SUCCESS, [0.75, -0.25, -0.25, -0.25]),
        ("group_normalized", LONE_SUCCESS, [1.499997, -0.499999, -0.499999, -0.499999]),
        ("group_normalized", [1, 0, 0, 0, 0], [1.788850, *[-0.447213] * 4]),
        ("group_normalized", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("group_normalized", [1, NAN, 0], [0.707106, 0, -0.707106]),
        ("group_normalized", [0.571429, 1, -1, 0], [0.495433, 0.990866, -1.321155, -0.165144]),
        ("group_normalized", [0.980583, 1, -1, 0.5], [0.647849, 0.668456, -1.454118, 0.137813]),
        ("group_normalized", [1.06, 0.27, 1.24, 0.03], [0.694681, -0.643851, 0.999663, -1.050494]),
        ("group_centered", [0.06, 0.27, 0.24, 0.03], [-0.09, 0.12, 0.09, -0.12]),
        ("leave_one_out", LONE_SUCCESS, [1, -1 / 3, -1 / 3, -1 / 3]),
        ("leave_one_out", [1, 0, 0, 1], [0.666667, -0.666667, -0.666667, 0.666667]),
        ("mean_normalized", LONE_SUCCESS, [3, -1, -1, -1]),
        ("partition_centered", LONE_SUCCESS, [0.522771, -0.477229, -0.477229, -0.477229]),
        ("leave_one_out_partition", LONE_SUCCESS, [1, -0.570466, -0.570466, -0.570466]),
        ("optimal_baseline", LONE_SUCCESS, [0.9, -0.1, -0.1, -0.1]),
    ],
)
def test_groups(function, rewards, expected):
    close(GROUPS[function](jnp.array([rewards], float))[0], expected)


@pytest.mark.parametrize(
    ("ddof", "epsilon", "expected"),
    [
        (0, 1e-6, [1.732047, -0.577349, -0.577349, -0.577349]),
        (1, 1e-4, [1.499700, -0.499900, -0.499900, -0.499900]),
        (1, 0.0, [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_conventions_of_the_deviation(ddof, epsilon, expected):
    rewards = jnp.array([LONE_SUCCESS])
    close(advantages.group_normalized(rewards, ddof=ddof, epsilon=epsilon)[0], expected)


def test_rloo_with_a_divergence_in_the_reward():
    """The whole completion's, once: not at every token."""
    rewards = jnp.array([[1.0, 0.0]]) - 1.0 * jnp.array([[0.1 + 0.1, 0.0]])
    close(rewards, [[0.8, 0]])
    close(advantages.leave_one_out(rewards), [[0.8, -0.8]])


@pytest.mark.parametrize(
    ("tau", "expected"), [(0.5, [1, -0.570466]), (0.01, [1, -0.989014]), (1.0, [1, -0.452832])]
)
def test_the_lone_success_is_not_lost_in_a_small_tau(tau, expected):
    given = advantages.leave_one_out_partition(jnp.array([LONE_SUCCESS]), tau=tau)[0]
    close(given, [expected[0], *[expected[1]] * 3], 1e-5)


def test_partition_of_a_mixed_group():
    rewards = jnp.array([[1.0, 0, 0, 1]])
    close(1 - advantages.partition_centered(rewards, tau=1.0)[0, 0], 0.620115)
    given = advantages.leave_one_out_partition(rewards, tau=1.0)[0]
    close(given, [0.547168, -0.763383, -0.763383, 0.547168])


def test_scale_of_the_group_or_of_the_batch():
    rewards = jnp.array([[0.0, 1], [10, 30]])
    close(advantages.group_centered(rewards), [[-0.5, 0.5], [-10, 10]])
    close(advantages.group_normalized(rewards, epsilon=0), np.array([[-1, 1], [-1, 1]]) * 0.707107)
    batch = [[-0.03594, 0.03594], [-0.71873, 0.71873]]
    close(advantages.batch_normalized(rewards), batch, 5e-6)


def test_composites_sum_before_or_after_the_normalisation():
    right, liked = jnp.array([[1.0, 0, 1, 0]]), jnp.array([[0.2, 0.9, 0.8, 0.1]])
    normalized = advantages.group_normalized
    close(
        (normalized(right) + 0.3 * normalized(liked))[0],
        [0.645570, -0.572086, 1.086477, -1.159962],
    )
    amplified = normalized(0.3 * liked)[0]
    close(amplified, [-0.734841, 0.979788, 0.734841, -0.979788], 5e-6)


def test_gpg_scales_by_the_groups_that_differ():
    rewards = jnp.array([[1.0, 0], [1, 1], [0, 0], [0, 1]])
    close(advantages.contrast_scaled(rewards), [[1, -1], [0, 0], [0, 0], [-1, 1]])


def test_opo_weighs_by_length():
    given = advantages.optimal_baseline(jnp.array([[1.0, 0]]), jnp.array([[30, 10]]))
    close(given, [[0.25, -0.75]])


def test_remax_takes_the_greedy_reward_off():
    rewards, greedy = jnp.array([[1.0], [0.0], [NAN], [1.0]]), jnp.array([0.5, 1.0, 0.0, NAN])
    close(advantages.greedy_baseline(rewards, greedy), [[0.5], [-1], [0], [0]])


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0, -7.3, 1e6])
def test_equal_rewards_have_no_advantage_at_all(name, reward):
    rewards = jnp.full((3, 7), reward)
    np.testing.assert_array_equal(GROUPS[name](rewards), np.zeros((3, 7)))


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_one_are_refused(name):
    with pytest.raises(ValueError, match=r"\(3, 1\) are groups of one.*at least 2 completions"):
        GROUPS[name](jnp.ones((3, 1)))


@pytest.mark.parametrize("name", GROUPS)
def test_a_missing_reward_is_as_if_it_had_not_been_sampled(name):
    rewards = jnp.array([[0.5, 2.0, 1.0, 0.0], [1.0, 0.0, 1.0, 3.0]])
    missing = jnp.pad(rewards, ((0, 1), (0, 2)), constant_values=NAN)
    given = GROUPS[name](missing)
    if name == "contrast_scaled":  # a group of its own, though an empty one
        given = given * 2 / 3
    close(given[:2, :4], GROUPS[name](rewards))
    np.testing.assert_array_equal(given[:, 4:], 0)
    np.testing.assert_array_equal(given[2], 0)
    there = jnp.pad(jnp.ones((2, 4), bool), ((0, 1), (0, 2)))
    close(GROUPS[name](jnp.pad(rewards, ((0, 1), (0, 2))), there), GROUPS[name](missing))


@pytest.mark.parametrize("name", GROUPS)
def test_the_only_reward_of_a_group_is_no_baseline(name):
    others = [] if name == "batch_normalized" else [[1.0, 0.0, 0.5]]
    given = GROUPS[name](jnp.array([[NAN, 5.0, NAN], *others]))
    np.testing.assert_array_equal(given[0], 0)


def test_a_reward_of_zero_is_a_reward():
    zeros = advantages.leave_one_out(jnp.array([[1.0, 0.0, NAN]]))
    close(zeros, [[1, -1, 0]])
    assert metrics.missing_rewards(jnp.array([[1.0, 0.0, NAN]])) == 1
    assert metrics.equal_groups(jnp.array([[1.0, 1, NAN], [1, 0, 1], [NAN] * 3])) == 2


def test_identities_of_groups():
    rewards = jax.random.normal(jax.random.key(0), (5, 8))
    centered = advantages.group_centered(rewards)
    close(centered.mean(1), np.zeros(5))
    close(advantages.leave_one_out(rewards), 8 / 7 * centered)
    close(advantages.group_normalized(rewards).std(1, ddof=1), np.ones(5), 1e-5)
    close(advantages.partition_centered(rewards, tau=1e4), centered, 1e-3)
    order = jax.random.permutation(jax.random.key(1), 8)
    for name, function in GROUPS.items():
        if name != "optimal_baseline":
            close(function(rewards[:, order]), function(rewards)[:, order], 1e-5)


def test_advantages_are_constants():
    rewards = jnp.array([[0.5, 2.0, 1.0]])
    functions = [
        *GROUPS.values(),
        lambda r: advantages.gae(r, r, r > 0, gamma=0.9, lam=0.9)[0],
        lambda r: advantages.gae(r, r, r > 0, gamma=0.9, lam=0.9)[1],
        lambda r: advantages.whiten(r, r > 0),
        lambda r: advantages.token_rewards(r[:, 0], r, r > 0, kl_coef=0.1),
    ]
    for function in functions:
        gradient = jax.grad(lambda r, f=function: jnp.sum(jnp.square(f(r))))(rewards)
        np.testing.assert_array_equal(gradient, 0)


def row(*numbers):
    return jnp.array([numbers], float)


def test_gae_skips_observations():
    mask = jnp.array([[True, True, False, False, True]])
    given, returns = advantages.gae(
        row(0, 0, 0, 0, 1), row(0.1, 0.2, 9, 9, 0.5), mask, gamma=1.0, lam=0.95
    )
    close(given, [[0.83625, 0.775, 0, 0, 0.5]])
    close(returns, [[0.93625, 0.975, 0, 0, 1]])


@pytest.mark.parametrize(
    ("rewards", "values", "lam", "expected"),
    [
        ([0, 0, 1], [0.5, 0.4, 0.6], 0.95, [0.451, 0.58, 0.4]),
        ([-0.02, 0.01, 1.05], [0.2, 0.4, 0.6], 0.95, [0.785625, 0.6375, 0.45]),
        ([0, 0, 0.7], [0.2, 0.4, 0.6], 0.95, [0.48025, 0.295, 0.1]),  # cut short at a value of .7
        ([0, 0, 1], [0.2, 0.4, 0.6], 1.0, [0.8, 0.6, 0.4]),
        ([0, 0], [0.3, 0.1], 1.0, [-0.3, -0.1]),
    ],
)
def test_gae(rewards, values, lam, expected):
    mask = jnp.ones((1, len(values)), bool)
    given, returns = advantages.gae(row(*rewards), row(*values), mask, gamma=1.0, lam=lam)
    close(given, [expected])
    close(returns, given + row(*values))


def test_gae_against_the_sum_that_defines_it():
    key = jax.random.key(0)
    rewards, values = jax.random.normal(key, (2, 3, 6))
    given, _ = advantages.gae(rewards, values, jnp.ones((3, 6), bool), gamma=0.9, lam=0.8)
    ahead = jnp.pad(values, ((0, 0), (0, 1)))[:, 1:]
    deltas = rewards + 0.9 * ahead - values
    for t in range(6):
        powers = 0.72 ** jnp.arange(6 - t)
        close(given[:, t], jnp.sum(powers * deltas[:, t:], axis=1))


def test_gae_does_not_depend_on_padding_packing_or_what_is_masked():
    one = row(0.3, -1, 2), row(0.1, 0.2, 0.5), jnp.array([[True, False, True]])
    two = row(5, 1), row(0.7, -0.4), jnp.array([[True, True]])
    alone = [advantages.gae(*arrays, gamma=0.9, lam=0.8) for arrays in (one, two)]
    # the first ends in an observation; padding follows
    end = row(7), row(8), jnp.array([[False]])
    packed = [jnp.concatenate(arrays, axis=1) for arrays in zip(one, end, two, end, strict=True)]
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 0]])
    together = advantages.gae(*packed, gamma=0.9, lam=0.8, segment_ids=segments)
    for part in (0, 1):
        zero = jnp.zeros((1, 1))
        close(together[part], jnp.concatenate([alone[0][part], zero, alone[1][part], zero], 1))


def test_returns_of_the_research_agent():
    mask = jnp.ones((1, 4), bool)
    close(advantages.discounted_returns(row(0, 0, 0, 1), mask, gamma=0.9), [[0.729, 0.81, 0.9, 1]])


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [(0, [1.174159, 0.095571, -1.269730]), (1, [0.958697, 0.078033, -1.036730])],
)
def test_whitened_advantages(ddof, expected):
    mask = jnp.array([[True, True, True, False]])
    white = advantages.whiten(row(0.785625, 0.6375, 0.45, 77), mask, ddof=ddof)
    close(white, [[*expected, 0]])
    assert advantages.whiten(row(1.0, 2.0), jnp.zeros((1, 2), bool)).tolist() == [[0, 0]]


def test_whitening_unbiased():
    mask = jnp.ones((1, 3), bool)
    white = advantages.whiten(row(0.451, 0.58, 0.4), mask, ddof=1)
    close(white, [[-0.280251, 1.110225, -0.829975]])


def test_whitened_rewards_keep_their_mean():
    mask = jnp.array([[True, True, True, False]])
    white = advantages.whiten(row(-0.02, 0.01, 1.05, 9), mask, shift_mean=False)
    close(white, [[-0.390378, -0.330074, 1.760452, 0]])


@pytest.mark.parametrize("value", [0.1, -3.7])
def test_equal_values_whiten_to_nothing(value):
    mask = jnp.array([[True, True, True, False]])
    values = jnp.full((1, 4), value)
    np.testing.assert_array_equal(advantages.whiten(values, mask), np.zeros((1, 4)))
    close(advantages.whiten(values, mask, shift_mean=False), [[value, value, value, 0]])


def test_whitening_over_a_batch():
    values = jnp.array([[0.8, 0.6, 0.4], [-0.3, -0.1, 0]])
    mask = jnp.array([[True, True, True], [True, True, False]])
    white = advantages.whiten(values, mask)
    close(white, [[1.248040, 0.768025, 0.288009], [-1.392045, -0.912029, 0]])


def test_token_rewards():
    old, ref = row(-1, -0.5, -2, 0, 0), row(-1.2, -0.4, -1.5, 0, 0)
    mask = jnp.array([[True, True, True, False, False]])
    scores = jnp.ones(1)
    given = advantages.token_rewards(scores, losses.kl_k1(old, ref), mask, kl_coef=0.1)
    close(given, [[-0.02, 0.01, 1.05, 0, 0]])
    close(advantages.token_rewards(scores, 0 * old, mask, kl_coef=0.1), [[0, 0, 1, 0, 0]])
    total = advantages.token_rewards(scores, row(0.2, 0, 0, 0, 0), mask, kl_coef=0.5).sum()
    assert (float(total), float(scores[0])) == (pytest.approx(0.9), 1.0)


LENGTHS = jnp.array([[2], [3], [4], [1]])
MASK = jnp.arange(4) < LENGTHS
RATIO = jnp.array([[0, 0.1, 0, 0], [-0.2, 0, 0.1, 0], [0, 0, 0.3, -0.1], [0.05, 0, 0, 0]])
DELTA = jnp.array(
    [[0.1, -0.05, 0, 0], [0.3, 0, -0.3, 0], [0.05, 0.05, -0.4, 0.02], [0.25, 0, 0, 0]]
)


def test_reinforce_plus_plus():
    scores = jnp.array([1.0, 0, 0, 1])
    k1 = jnp.where(MASK, -DELTA - RATIO, 0.0)  # log π_old − log π_ref
    rewards = advantages.token_rewards(scores, k1, MASK, kl_coef=0.01)
    returns = advantages.discounted_returns(rewards, MASK)
    expected = [
        [1.0015, 1.0005, 0, 0],
        [-0.001, -0.002, -0.002, 0],
        [-0.0008, -0.0013, -0.0018, -0.0008],
        [1.003, 0, 0, 0],
    ]
    close(returns, expected)
    close(jnp.mean(returns, where=MASK), 0.299530)
    close(jnp.std(returns, where=MASK), 0.459657)
    white = [
        [1.527161, 1.524985, 0, 0],
        [-0.653814, -0.655989, -0.655989, 0],
        [-0.653379, -0.654466, -0.655554, -0.653379],
        [1.530424, 0, 0, 0],
    ]
    close(advantages.reinforce_plus_plus(rewards, MASK), white, 3e-6)


def test_reinforce_plus_plus_with_a_baseline():
    given = advantages.reinforce_plus_plus_baseline(jnp.array([[1.0, 0, 0, 1]]), MASK)
    close(given[:, 0], [1.527525, -0.654654, -0.654654, 1.527525])
    np.testing.assert_array_equal(given, jnp.where(MASK, given[:, :1], 0))
    missing = advantages.reinforce_plus_plus_baseline(
        jnp.array([[1.0, 0, 0, 1, NAN]]), jnp.pad(MASK, ((0, 1), (0, 0)), constant_values=True)
    )
    close(missing, jnp.pad(given, ((0, 1), (0, 0))))


def test_rewards_of_steps():
    rewards = jnp.array([[[1.0, 0, 0, 0], [0, 0, 1, 0]]])
    ends = jnp.array([[[True, False, True, False], [False, True, True, False]]])
    given = advantages.process_advantages(rewards, ends, ddof=0, epsilon=0)
    close(given, [[[0, -1, -1, 0], [0, 0, 1, 0]]])


def test_advantages_reach_the_tokens_of_their_own_completion():
    given = advantages.per_token(jnp.array([[1.0, 2], [3, 4]]), MASK)
    close(given, [[1, 1, 0, 0], [2, 2, 2, 0], [3, 3, 3, 3], [4, 0, 0, 0]])


def test_overlong_penalty():
    penalty = advantages.overlong_penalty(jnp.array([6, 7, 9, 10, 11]), max_length=10, margin=4)
    close(penalty, [0, -0.25, -0.75, -1, -1])


@pytest.mark.parametrize(
    ("lengths", "correct", "expected"),
    [
        ([10, 20, 30, 40], [1, 1, 1, 1], [0.5, 0.166667, -0.166667, -0.5]),
        ([10, 20, 30, 40], [1, 1, 0, 0], [0.5, 0.166667, -0.166667, -0.5]),
        ([10, 20, 30, 40], [0, 1, 1, 0], [0, 0.166667, -0.166667, -0.5]),
        ([7, 7, 7, 7], [1, 0, 1, 0], [0, 0, 0, 0]),
    ],
)
def test_length_rewards(lengths, correct, expected):
    given = advantages.length_rewards(jnp.array([lengths]), jnp.array([correct], bool))
    close(given, [expected])


def test_a_completion_that_did_not_stop_is_penalised_unless_its_reward_is_missing():
    given = advantages.stop_penalty(jnp.array([0.7, 0.7, NAN]), jnp.array([True, False, False]))
    np.testing.assert_allclose(given, [0.7, -1, NAN])


def test_budgeted_rewards():
    rewards = jnp.array([[1.0, 1, 0], [1, 0, NAN]])
    lengths, budgets = jnp.array([[5, 9, 9], [9, 9, 9]]), jnp.array([6, 6])
    given = advantages.budgeted_rewards(rewards, rewards == 1, lengths, budgets, accuracy=0.6)
    np.testing.assert_allclose(given, [[1, 0, 0], [1, 0, NAN]])


def test_dynamic_sampling_keeps_groups_that_differ():
    correct = jnp.array([[True, False], [True, True], [False, False], [True, False]])
    assert advantages.mixed_groups(correct).tolist() == [True, False, False, True]
    counted = jnp.array([[True, True], [True, True], [True, True], [True, False]])
    assert advantages.mixed_groups(correct, counted).tolist() == [True, False, False, False]


def test_prompts_that_fail_come_more_often():
    rates = jnp.array([0.9, 0.5, 0.1])
    close(advantages.prompt_priorities(rates), [0.066667, 0.333333, 0.6])
    close(advantages.prompt_priorities(jnp.ones(4)), [0.25] * 4)


@pytest.mark.parametrize(("version", "staleness", "limit"), [(0, 0, 4), (0, 1, 8), (2, 1, 16)])
def test_how_many_trajectories_may_be_in_flight(version, staleness, limit):
    given = advantages.trajectory_limit(version, batch_size=4, staleness=staleness)
    assert given == limit
    assert (limit - 1) // 4 <= version + staleness < limit // 4


@pytest.mark.parametrize(
    ("kl", "expected"), [(9.0, 0.150192), (6.0, 0.15), (6.6, 0.150096), (0.0, 0.149808)]
)
def test_adaptive_kl(kl, expected):
    close(coefficients.adaptive_kl(0.15, kl, 64, target=6, horizon=10_000), expected)


def test_adaptive_entropy():
    coefficient, used = 0.0, []
    for entropy in (0.1, 0.1, 0.3, 0.15, 0.5, 0.5, 0.5):
        coefficient, weight = coefficients.adaptive_entropy(coefficient, entropy)
        used.append(float(weight))
    close(used, [0, 0.005, 0, 0.005, 0, 0, 0])
    assert float(coefficient) == 0


def test_policy_metrics():
    ratios = jnp.log(jnp.array([1.5, 0.5, 1.5, 0.5, 1.0]))
    given = jnp.array([1.0, 1, -1, -1, 0])
    hits = metrics.clip_fraction(ratios, jnp.zeros(5), given)
    assert hits.tolist() == [1, 0, 0, 1, 0]
    slopes = jax.grad(lambda x: losses.ppo_clip(x, jnp.zeros(5), given).sum())(ratios)
    assert (slopes[:4] == 0).tolist() == (hits[:4] == 1).tolist()
    close(metrics.approx_kl(ratios[:1], jnp.zeros(1)), 0.5 - math.log(1.5))


def test_explained_variance_and_effective_samples():
    returns, mask = row(1, 2, 3, 50), jnp.array([[True, True, True, False]])
    close(metrics.explained_variance(returns, returns, mask), 1)
    close(metrics.explained_variance(row(2, 2, 2, 0), returns, mask), 0)
    close(metrics.explained_variance(returns, row(1, 1, 1, 2), mask), 0)
    close(metrics.effective_samples(row(1, 1, 1, 9), mask), 1)
    close(metrics.effective_samples(row(1, 0, 0, 9), mask), 1 / 3)


def test_one_row_of_a_batch_may_be_missing_from_the_loss():
    """A failed sample is in no baseline, and its tokens are in no divisor."""
    rewards = jnp.array([[1.0, 0, NAN]])
    mask = jnp.ones((3, 2), bool)
    there = ~jnp.isnan(rewards).reshape(-1, 1)
    weights = loss_weights.token_mean(mask & there)
    given = advantages.per_token(advantages.leave_one_out(rewards), mask)
    zeros = jnp.zeros((3, 2))
    loss = jnp.sum(weights * jnp.abs(losses.ppo_clip(zeros, zeros, given)))
    assert loss == pytest.approx(1.0)
