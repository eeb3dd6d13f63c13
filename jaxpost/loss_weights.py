"""Weights that turn per-token losses into one number: Σ loss_weights · loss.

Each is normalised over everything it is given, which must be the whole update, on all devices and
before it is split into microbatches. They take a mask or importances (0 outside the mask).
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import Array, Float, Int, PerToken


def token_mean(weights: Array) -> PerToken:
    """Mean over tokens: w_t / Σ w. All zero where there is nothing to train on."""
    weights = weights.astype(jnp.float32)
    return weights / nonzero(jnp.sum(weights))


def sequence_mean(weights: Array, segment_ids: Int[Array, "B T"] | None = None) -> PerToken:
    """Mean over sequences of their token means; a sequence without any weight does not count."""
    weights = weights.astype(jnp.float32)
    totals = sequence_totals(weights, segment_ids)
    means = weights / nonzero(totals)
    return means / nonzero(jnp.sum(means))


def sequence_sum_mean(weights: Array, segment_ids: Int[Array, "B T"] | None = None) -> PerToken:
    """Mean over sequences of their token sums: w_t / (number of sequences with any weight)."""
    weights = weights.astype(jnp.float32)
    means = weights / nonzero(sequence_totals(weights, segment_ids))
    return weights / nonzero(jnp.sum(means))


def fixed_length(weights: Array, length: int, sequences: int) -> PerToken:
    """Σ w · loss / (sequences · length), whatever the sequences' own lengths (arXiv 2503.20783)."""
    return weights.astype(jnp.float32) / (length * sequences)


def sequence_totals(weights: Float[Array, "B T"], segment_ids: Array | None) -> PerToken:
    """Total weight of the sequence that each token belongs to; a row is one without segments."""
    if segment_ids is None:
        return jnp.broadcast_to(jnp.sum(weights, axis=1, keepdims=True), weights.shape)
    rows, length = weights.shape
    numbers = jnp.arange(rows)[:, None] * (length + 1) + segment_ids
    totals = jax.ops.segment_sum(weights.ravel(), numbers.ravel(), rows * (length + 1))
    return totals[numbers]


def nonzero(total: Array) -> Array:
    """A divisor: 1 in the place of 0, where the numerator is 0 too."""
    return jnp.where(total == 0, 1.0, total)


def sequence_means(
    values: PerToken, weights: Array, segment_ids: Int[Array, "B T"] | None = None
) -> PerToken:
    """Weighted mean of `values` over each token's sequence; 0 for a sequence without any weight."""
    weights = weights.astype(jnp.float32)
    totals = sequence_totals(jnp.where(weights != 0, weights * values, 0.0), segment_ids)
    return totals / nonzero(sequence_totals(weights, segment_ids))


# Corrections for a sampler that is not the policy: factors of the loss weights above, constants.
# w = exp(old_logps − sampler_logps), per token, or per sequence where both are sums over one (as
# `sequence_totals` gives them at each token). Where the trainer's old_logps are the sampler's own,
# w is 1. `token_mean(mask) * factor` keeps the number of tokens in the divisor where a factor is 0,
# `token_mean(mask * factor)` leaves those tokens out of it.


def importance(old_logps: Array, sampler_logps: Array) -> Array:
    """w, its exponent within ±20."""
    return jax.lax.stop_gradient(ratios.ratio(old_logps, sampler_logps))


def truncated_importance(old_logps: Array, sampler_logps: Array, *, cap: float = 2.0) -> Array:
    """min(w, cap): truncated importance sampling. Per token biased, but of low variance."""
    return jnp.minimum(importance(old_logps, sampler_logps), cap)


def banded_importance(
    old_logps: Array, sampler_logps: Array, *, low: float = 0.5, high: float = 2.0
) -> Array:
    """w where low ≤ w ≤ high, 0 elsewhere: IcePop's mask, per token or sequence."""
    w = importance(old_logps, sampler_logps)
    return jnp.where((low <= w) & (w <= high), w, 0.0)


def mean_one(importances: Array, mask: Array) -> Array:
    """Importances divided by their mean over the mask of the whole batch."""
    weights = mask.astype(jnp.float32)
    return importances / nonzero(jnp.sum(weights * importances) / nonzero(jnp.sum(weights)))


def near_in_mean(
    old_logps: PerToken,
    sampler_logps: PerToken,
    mask: Array,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> PerToken:
    """1 for tokens of sequences with low ≤ exp(mean log w) ≤ high, else 0: at any length alike."""
    log_w = jax.lax.stop_gradient(old_logps - sampler_logps)
    means = ratios.exponential(sequence_means(log_w, mask, segment_ids))
    return ((low <= means) & (means <= high)).astype(jnp.float32)


def near_in_divergence(
    old_logps: PerToken,
    sampler_logps: PerToken,
    mask: Array,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    limit: float = 0.01,
) -> PerToken:
    """1 for tokens of sequences with mean(w − log w − 1) ≤ limit, else 0."""
    w = importance(old_logps, sampler_logps)
    means = sequence_means(w - jnp.log(w) - 1.0, mask, segment_ids)
    return (means <= limit).astype(jnp.float32)
