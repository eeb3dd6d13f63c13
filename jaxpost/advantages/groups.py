"""Advantages of the G completions of a prompt: rewards [P, G] → advantages [P, G], constants.

A missing reward (a verifier or a sandbox failed) is NaN, or False in `counted`. It enters no mean
and no deviation, and its advantage is 0; take its tokens out of the loss weights too. A reward of 0
is a reward. A group of equal rewards, or with one reward that counts, has advantages of exactly 0.
Groups of one are refused: they have no baseline.
"""

import jax
import jax.numpy as jnp

from jaxpost.typing import Array, Bool, Float, Shaped

Rewards = Shaped[Array, "*P G"]
PerGroup = Float[Array, "*P G"]
Counted = Bool[Array, "*P G"]


def group_centered(rewards: Rewards, counted: Counted | None = None) -> PerGroup:
    """r − mean r of the group: Dr.GRPO (arXiv 2503.20783), Kimi k1.5's and K2's PMD."""
    deviations, there = from_largest(rewards, counted)
    return centered(deviations, there)


def group_normalized(
    rewards: Rewards, counted: Counted | None = None, *, ddof: int = 1, epsilon: float = 1e-6
) -> PerGroup:
    """(r − mean r) / (std r + epsilon) of the group: GRPO (arXiv 2402.03300, §4.1.2).

    The paper leaves `ddof` open: 1 divides by n − 1, as the usual implementations do; 0 by n.
    `epsilon` is 1e-6 in verl, 1e-4 in TRL, 1e-9 in OpenRLHF.
    """
    deviations, there = from_largest(rewards, counted)
    advantages = centered(deviations, there)
    return advantages / (deviation(advantages, there, ddof) + epsilon)


def batch_normalized(
    rewards: Rewards, counted: Counted | None = None, *, ddof: int = 1, epsilon: float = 1e-6
) -> PerGroup:
    """(r − mean r of the group) / (std of all rewards of the batch + epsilon)."""
    deviations, there = from_largest(rewards, counted)
    everything, all_there = from_largest(jnp.reshape(rewards, (1, -1)), jnp.reshape(there, (1, -1)))
    scale = deviation(centered(everything, all_there), all_there, ddof)
    return centered(deviations, there) / (scale + epsilon)


def leave_one_out(rewards: Rewards, counted: Counted | None = None) -> PerGroup:
    """r_i − mean of the others = n/(n − 1) · centred: RLOO (arXiv 2402.14740); 0 without others."""
    deviations, there = from_largest(rewards, counted)
    n = jnp.sum(there, axis=-1, keepdims=True)
    gaps = n * deviations - jnp.sum(deviations, axis=-1, keepdims=True)
    return jnp.where(there, gaps / jnp.maximum(n - 1, 1), 0.0)


def partition_centered(rewards: Rewards, counted: Counted | None = None, *, tau: float) -> PerGroup:
    """r − τ log mean exp(r/τ): PMD with its log-partition (2501.12599, §2.3.2).

    Between r − max r (τ → 0) and `group_centered` (τ → ∞).
    """
    deviations, there = from_largest(rewards, counted)
    return jnp.where(there, deviations - tau * log_mean_exp(deviations / tau, there), 0.0)


def leave_one_out_partition(
    rewards: Rewards, counted: Counted | None = None, *, tau: float
) -> PerGroup:
    """r_i − τ log mean over the others of exp(r_j/τ); 0 where no other counts."""
    deviations, there = from_largest(rewards, counted)
    others = there[..., None, :] & ~jnp.eye(there.shape[-1], dtype=bool)
    baselines = tau * log_mean_exp(deviations[..., None, :] / tau, others)[..., 0]
    return jnp.where(there & jnp.any(others, axis=-1), deviations - baselines, 0.0)


def mean_normalized(rewards: Rewards, counted: Counted | None = None) -> PerGroup:
    """(r − mean r) / mean r: MaxRL (arXiv 2602.02710), for rewards ≥ 0; 0 where the mean is 0."""
    deviations, there = from_largest(rewards, counted)
    n = jnp.sum(there, axis=-1, keepdims=True)
    total = jnp.sum(jnp.where(there, rewards, 0.0), axis=-1, keepdims=True)
    mean = jax.lax.stop_gradient(total) / jnp.maximum(n, 1)
    return jnp.where(mean > 0, centered(deviations, there) / jnp.where(mean > 0, mean, 1.0), 0.0)


def contrast_scaled(rewards: Rewards, counted: Counted | None = None) -> PerGroup:
    """α (r − mean r), α = groups / groups whose rewards differ: GPG (arXiv 2504.02546).

    Groups without contrast contribute nothing; α keeps the gradient's scale in spite of them.
    """
    advantages = group_centered(rewards, counted)
    contrasts = jnp.any(advantages != 0, axis=-1)
    return advantages * contrasts.size / jnp.maximum(jnp.sum(contrasts), 1)


def optimal_baseline(
    rewards: Rewards, lengths: Rewards, counted: Counted | None = None
) -> PerGroup:
    """r − Σ length · r / Σ length of the group: OPO (arXiv 2505.23585), exactly on policy."""
    deviations, there = from_largest(rewards, counted)
    weights = jnp.where(there, lengths, 0).astype(deviations.dtype)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    baseline = jnp.sum(weights * deviations, axis=-1, keepdims=True) / jnp.maximum(total, 1)
    return jnp.where(there, deviations - baseline, 0.0)


def greedy_baseline(
    rewards: Rewards, greedy_rewards: Shaped[Array, "*P"], counted: Counted | None = None
) -> PerGroup:
    """r − reward of the prompt's greedy completion: ReMax (arXiv 2310.10505). G may be 1."""
    advantages = jax.lax.stop_gradient(rewards - jnp.expand_dims(greedy_rewards, -1))
    there = ~jnp.isnan(advantages) if counted is None else counted & ~jnp.isnan(advantages)
    return jnp.where(there, advantages, 0.0)


def from_largest(rewards: Array, counted: Array | None) -> tuple[Array, Array]:
    """Rewards less the largest that counts in the group (0 where missing), and which count.

    Equal rewards become zeros exactly, so that rounding is not blown up by a division.
    """
    rewards = jax.lax.stop_gradient(jnp.asarray(rewards, float))
    if rewards.shape[-1] < 2:
        raise ValueError(
            f"rewards of shape {rewards.shape} are groups of one, which have no baseline: sample "
            "at least 2 completions a prompt, or whiten over the batch (reinforce_plus_plus)"
        )
    there = ~jnp.isnan(rewards) if counted is None else counted & ~jnp.isnan(rewards)
    lowest = jnp.finfo(rewards.dtype).min
    largest = jnp.max(rewards, axis=-1, keepdims=True, where=there, initial=lowest)
    return jnp.where(there, rewards - largest, 0.0), there


def centered(deviations: Array, there: Array) -> Array:
    n = jnp.sum(there, axis=-1, keepdims=True)
    return jnp.where(
        there, deviations - jnp.sum(deviations, -1, keepdims=True) / jnp.maximum(n, 1), 0
    )


def deviation(centred: Array, there: Array, ddof: int) -> Array:
    n = jnp.sum(there, axis=-1, keepdims=True)
    squares = jnp.sum(jnp.square(centred), axis=-1, keepdims=True)
    return jnp.sqrt(squares / jnp.maximum(n - ddof, 1))


def log_mean_exp(exponents: Array, there: Array) -> Array:
    """Over the last axis; 0 where nothing counts. Exact to rounding at small exponents too."""
    n = jnp.maximum(jnp.sum(there, axis=-1, keepdims=True), 1)
    lowest = jnp.finfo(exponents.dtype).min
    largest = jnp.max(exponents, axis=-1, keepdims=True, where=there, initial=lowest)
    largest = jnp.where(largest > lowest, largest, 0.0)
    rest = jnp.where(there, jnp.expm1(exponents - largest), 0.0)
    return largest + jnp.log1p(jnp.sum(rest, axis=-1, keepdims=True) / n)
