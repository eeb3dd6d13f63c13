"""Metrics: pure functions beside the losses, never inside one.

A mean is one division, of sums over all that was counted; means of microbatches or devices are
never averaged.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import Array, Float, Mask, PerSequence, PerToken


def ratio(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator in float32, for two sums; 0 where nothing was counted.

    >>> float(ratio(jnp.asarray(3), jnp.asarray(4)))  # 3 of 4 targets predicted
    0.75
    """
    counted = denominator != 0
    return jnp.where(counted, numerator / jnp.where(counted, denominator, 1), 0.0)


def perplexity(nll: Array, count: Array) -> Array:
    """exp(Σ nll / count): `nll` in nats, summed over `count` targets; 1 where there are none."""
    return jnp.exp(ratio(nll, count))


def clip_fraction(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerToken,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> PerToken:
    """1 where the clip takes `ppo_clip`'s gradient away, else 0: their mean is the fraction."""
    rho = ratios.ratio(logps, old_logps)
    above = (advantages > 0) & (rho > 1 + clip_high)
    below = (advantages < 0) & (rho < 1 - clip_low)
    return (above | below).astype(jnp.float32)


def approx_kl(logps: PerToken, old_logps: PerToken) -> PerToken:
    """ρ − 1 − log ρ ≥ 0, nats: estimates KL(π_old ‖ π) on samples of π_old."""
    log_ratios = ratios.bounded(ratios.log_ratio(logps, old_logps))
    return jnp.expm1(log_ratios) - log_ratios


def explained_variance(values: PerToken, returns: PerToken, mask: Mask) -> Array:
    """1 − var(returns − values) / var(returns) over the mask: 1 perfect, 0 no better than a mean.

    Of a whole batch. 0 where the returns do not vary.
    """
    spread = jnp.var(returns, where=mask)
    left = jnp.var(returns - values, where=mask)
    return jnp.where(spread > 0, 1.0 - left / jnp.where(spread > 0, spread, 1.0), 0.0)


def effective_samples(importances: Array, mask: Mask) -> Array:
    """(Σ w)² / (Σ w² · count), in (0, 1]: how much of a batch is left after reweighting it."""
    weights = jnp.where(mask, importances, 0.0)
    return ratio(jnp.square(jnp.sum(weights)), jnp.sum(jnp.square(weights)) * jnp.sum(mask))


def missing_rewards(rewards: Array) -> Array:
    """How many completions have no reward (NaN): counted, and neither 0 nor in a baseline."""
    return jnp.sum(jnp.isnan(rewards))


def equal_groups(rewards: Float[Array, "P G"]) -> Array:
    """How many groups have no two different rewards, and so no advantage; missing ones aside."""
    largest = jnp.max(rewards, axis=1, where=~jnp.isnan(rewards), initial=-jnp.inf)
    smallest = jnp.min(rewards, axis=1, where=~jnp.isnan(rewards), initial=jnp.inf)
    return jnp.sum(largest <= smallest)


def preference_accuracy(chosen_rewards: PerSequence, rejected_rewards: PerSequence) -> PerSequence:
    """1 where the chosen completion has the higher reward, else 0, ties too.

    Rewards are a model's, or β log π/π_ref; their difference is the margin.
    """
    return (chosen_rewards > rejected_rewards).astype(jnp.float32)


def calibration(margins: PerSequence, mask: Array, *, bins: int = 10) -> Float[Array, "3 bins"]:
    """Pairs, right predictions and confidences, each summed in bins of confidence: sums add up.

    The model prefers one of a pair, with confidence σ(|margin|) in [½, 1]; it is right where the
    margin is positive, half right where it is 0. The bins share [½, 1] equally.
    """
    confidences = jax.nn.sigmoid(jnp.abs(margins))
    right = jnp.where(margins == 0, 0.5, margins > 0)
    return in_bins((confidences - 0.5) * 2, right, confidences, mask, bins)


def reliability(
    logits: PerSequence, labels: PerSequence, mask: Array, *, bins: int = 10
) -> Float[Array, "3 bins"]:
    """Predictions, labels and probabilities, each summed in bins of probability: sums add up.

    A step (or completion) is said to be right with the probability σ(logit) in [0, 1]; its label
    is 0, 1 or in between.
    """
    probabilities = jax.nn.sigmoid(logits)
    return in_bins(probabilities, labels, probabilities, mask, bins)


def in_bins(
    places: PerSequence, right: Array, confidences: PerSequence, mask: Array, bins: int
) -> Float[Array, "3 bins"]:
    """Counts and two sums in equal bins of `places`, which lie in [0, 1]."""
    of_bin = jnp.clip(jnp.floor(places * bins).astype(int), 0, bins - 1)
    rows = jnp.where(mask, jnp.stack([jnp.ones_like(confidences), right, confidences]), 0.0)
    return jax.vmap(lambda row: jnp.zeros(bins).at[of_bin].add(row))(rows)


def calibration_error(sums: Float[Array, "3 bins"]) -> Array:
    """Σ_bins |right − confidence| / count, of the sums of the two above, in [0, 1]; 0 is best."""
    counts, right, confidences = sums
    return ratio(jnp.sum(jnp.abs(right - confidences)), jnp.sum(counts))
