"""Estimators of KL(π ‖ π_ref) from one sampled token, and which to use where.

With k1 = logps − ref_logps, for samples of π:

    in the reward      kl_k1, times −kl_coef: the exact policy gradient. k2 and k3 are wrong there.
    in the loss        kl_k2: its gradient is in expectation the exact one. kl_k1's is zero,
                       kl_k3's is that of the forward KL(π_ref ‖ π).
    loss, stale data   kl_k3_weighted: exact for samples of any π_old.
    to be reported     kl_k3: never negative, of less variance than k1, and unbiased.

All are per token and zero where both log-probabilities are. k3 takes a log-ratio clamped to ±20.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import PerToken


def kl_k1(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """log π − log π_ref: unbiased, of either sign (Schulman 2020, Approximating KL divergence)."""
    return ratios.log_ratio(logps, ref_logps)


def kl_k2(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """½ (log π − log π_ref)²: biased as a value, exact in its gradient on samples of π."""
    return 0.5 * jnp.square(kl_k1(logps, ref_logps))


def kl_k3(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """π_ref/π − 1 − log(π_ref/π): unbiased and ≥ 0 (GRPO, arXiv 2402.03300, eq. 4).

    Its gradient, 1 − π_ref/π, is the one GRPO trains with: the forward KL's, not the reverse's.
    """
    k1 = ratios.bounded(kl_k1(logps, ref_logps))
    return jnp.expm1(-k1) + k1


def kl_k3_plus(logps: PerToken, ref_logps: PerToken) -> PerToken:
    """The value of `kl_k3` with the gradient of `kl_k2` (straight through; verl's `k3+`)."""
    value, slope = kl_k3(logps, ref_logps), kl_k2(logps, ref_logps)
    return slope + jax.lax.stop_gradient(value - slope)


def kl_k3_weighted(logps: PerToken, old_logps: PerToken, ref_logps: PerToken) -> PerToken:
    """(π/π_old) · k3, differentiated through both (DeepSeek-V3.2, arXiv 2512.02556).

    Value and gradient are unbiased for KL(π ‖ π_ref) on samples of π_old.
    """
    return ratios.ratio(logps, old_logps) * kl_k3(logps, ref_logps)
