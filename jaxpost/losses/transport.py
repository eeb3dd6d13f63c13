"""Alignment by optimal transport: log-ratios are compared by rank, not pair by pair (AOT).

The last axis is sorted; it must be the whole update, whose weights must all be equal, or the loss
depends on the microbatches. Row i of the result is the pair in row i. Differentiable in the
policy's two; ranks have no gradient.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.losses import preference
from jaxpost.typing import Array, PerSequence


def of_same_rank(values: Array, others: Array) -> Array:
    """For each of `values` the one of `others` that has its rank on the last axis."""
    ranks = jnp.argsort(jnp.argsort(values))
    return jnp.take_along_axis(jnp.sort(others), ranks, axis=-1)


def aot(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PerSequence:
    """DPO of the policy's margins and the reference's of equal rank (AOT, arXiv 2406.05882).

    A margin is log π(w) − log π(l). With one pair it is `dpo`.
    """
    policy = chosen_logps - rejected_logps
    reference = jax.lax.stop_gradient(ref_chosen_logps - ref_rejected_logps)
    delta = policy - of_same_rank(policy, reference)
    return preference.logistic(beta * delta, label_smoothing)


def aot_unpaired(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PerSequence:
    """DPO of each chosen log-ratio and the rejected one of equal rank (AOT, arXiv 2406.05882).

    Chosen and rejected need not answer the same prompt, but be equally many.
    """
    chosen = ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = ratios.log_ratio(rejected_logps, ref_rejected_logps)
    return preference.logistic(beta * (chosen - of_same_rank(chosen, rejected)), label_smoothing)
