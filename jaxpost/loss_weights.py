"""Weights that turn per-token losses into one number: Σ loss_weights · loss.

Each is normalised over everything it is given, which must be the whole update, on all devices and
before it is split into microbatches. They take a mask or importances (0 outside the mask).
"""

import jax
import jax.numpy as jnp

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
