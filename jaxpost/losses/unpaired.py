"""Preference losses of single completions, each desirable or not: per sequence, minimised.

u = log π/π_ref, a sum over the trained tokens; differentiable in the policy's alone. `desirable` is
True or 1 where a completion is. A batch may hold one kind only. What u is compared with, z₀ or δ,
is data: computed over the whole update, before it is split.

    KTO           kto    kl = mismatched_kl(...)     1 ≤ (λ_D n_D)/(λ_U n_U) ≤ 4/3
    APO-zero      kto    kl = 0                      of single completions
    BCO           bco    shift = running_shift(...)  undesirable times `density_ratio_weights`
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import Array, Float, PerSequence, Scalar, Shaped


def kto(
    logps: PerSequence,
    ref_logps: PerSequence,
    desirable: Shaped[Array, "*B"],
    kl: Float[Array, "*#B"],
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> PerSequence:
    """λ_D (1 − σ(β (u − z₀))), undesirable λ_U (1 − σ(β (z₀ − u))) (KTO, arXiv 2402.01306)."""
    value = beta * (ratios.log_ratio(logps, ref_logps) - jax.lax.stop_gradient(kl))
    good = desirable_weight * jax.nn.sigmoid(-value)
    return jnp.where(desirable, good, undesirable_weight * jax.nn.sigmoid(value))


def mismatched_kl(logps: PerSequence, ref_logps: PerSequence) -> Scalar:
    """KTO's z₀ = max(0, mean u) ≥ 0, over completions that belong to another row's prompt.

    Each prompt is read with a neighbour's completion, of a fixed pairing, by policy and reference
    alike: here the next one's or, as in TRL, the one before's. Nothing is differentiated.
    """
    return jnp.maximum(jnp.mean(jax.lax.stop_gradient(ratios.log_ratio(logps, ref_logps))), 0.0)


def bco(
    logps: PerSequence,
    ref_logps: PerSequence,
    desirable: Shaped[Array, "*B"],
    shift: Float[Array, "*#B"],
    *,
    beta: float = 0.1,
) -> PerSequence:
    """−log σ(β u − δ), undesirable −log σ(δ − β u) (BCO, arXiv 2404.04656)."""
    value = beta * ratios.log_ratio(logps, ref_logps) - jax.lax.stop_gradient(shift)
    return jax.nn.softplus(jnp.where(desirable, -value, value))


def running_shift(
    shift: Scalar, count: Scalar, rewards: Float[Array, " B"]
) -> tuple[Scalar, Scalar]:
    """BCO's δ: the mean of all rewards β u so far, these included, and how many they are."""
    total = count + rewards.size
    return shift + (jnp.sum(jax.lax.stop_gradient(rewards)) - rewards.size * shift) / total, total


def density_ratio_weights(
    probabilities: PerSequence, *, low: float = 0.5, high: float = 10.0
) -> PerSequence:
    """clip(p/(1 − p), low, high): weights of undesirable completions (BCO, arXiv 2404.04656).

    p: a classifier's probability that the prompt is one that has a desirable completion.
    """
    return jnp.clip(probabilities / jnp.maximum(1 - probabilities, 1e-6), low, high)
