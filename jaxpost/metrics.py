"""Metrics: pure functions beside the losses, never inside one.

A mean is one division, of sums over all that was counted; means of microbatches or devices are
never averaged.
"""

import jax.numpy as jnp

from jaxpost.typing import Array


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
