"""What a preference loss may be given in the place of summed log-probabilities.

f-DPO (arXiv 2309.16240): f'(π/π_ref) takes the place of u = log π/π_ref; the loss gets it with a
reference of zeros, and any loss of a margin is meant, `ipo_average` too:

    chosen, rejected = forward_kl(chosen_logps, ref_chosen_logps), forward_kl(...)
    losses.dpo(chosen, rejected, zeros, zeros)

Differentiable in the first argument; weights are constants.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.losses import preference
from jaxpost.typing import Array, Float, Mask, PerSequence, Shaped


def forward_kl(logps: PerSequence, ref_logps: PerSequence) -> PerSequence:
    """1 − π_ref/π, of a log-ratio within ±20."""
    return -jnp.expm1(ratios.bounded(-ratios.log_ratio(logps, ref_logps)))


def jensen_shannon(logps: PerSequence, ref_logps: PerSequence) -> PerSequence:
    """log 2ρ/(1 + ρ) = log 2 + log σ(u), ρ = π/π_ref."""
    return jnp.log(2.0) - jax.nn.softplus(-ratios.log_ratio(logps, ref_logps))


def alpha_divergence(
    logps: PerSequence, ref_logps: PerSequence, *, alpha: float = 0.5
) -> PerSequence:
    """(ρ^(α − 1) − 1)/(α − 1), α ≠ 1, its exponent within ±20; towards 1 it is u."""
    exponent = ratios.bounded((alpha - 1) * ratios.log_ratio(logps, ref_logps))
    return jnp.expm1(exponent) / (alpha - 1)


def desensitized_weights(
    mask: Mask, other_mask: Mask, *, alpha: float = 0.5
) -> Float[Array, "*B T"]:
    """LD-DPO (arXiv 2409.06411): 1 up to the shorter completion's length, α ∈ [0, 1] after.

    Sums of `logps` times these take the place of plain sums, for policy and reference. `mask` is of
    the completion weighted, `other_mask` of its pair's other.
    """
    shared = jnp.sum(other_mask, axis=-1, keepdims=True)
    return jnp.where(mask, jnp.where(jnp.cumsum(mask, axis=-1) <= shared, 1.0, alpha), 0.0)


def turn_weights(turns: Shaped[Array, "*B T"], count: Array | int, *, gamma: float = 0.7) -> Array:
    """DMPO (arXiv 2406.14868): (1 − γ^(n − t)) / (1 − γ^n) at turn t = 0, 1, …, n − 1."""
    return (1 - gamma ** (count - turns)) / (1 - gamma**count)


def pair_weights(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    chosen_lengths: Shaped[Array, "*B"],
    rejected_lengths: Shaped[Array, "*B"],
) -> PerSequence:
    """exp(l_w + l_l), l = log π/length: how probable the pair is now (WPO, arXiv 2406.11827).

    For the paper's alignment to samples, and TRL's form, give sums of log π(y_t) − log Σ_v π(v)².
    """
    chosen = preference.per_token(chosen_logps, chosen_lengths)
    rejected = preference.per_token(rejected_logps, rejected_lengths)
    return jax.lax.stop_gradient(ratios.exponential(chosen + rejected))
