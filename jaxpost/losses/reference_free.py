"""Preference losses without a reference: per pair, minimised, differentiable in both `logps`.

`logps` are sums over the trained tokens; those with lengths divide by them. Their likelihood term
is added by the caller, weighted over chosen tokens alone (TRL's ORPO takes the prompt's too):

    CPO        cpo + 1.0 nll       ORPO       nll + 0.1 orpo       SLiC-HF    slic + 0.1 nll
    CPO-SimPO  simpo + nll         SimPO      simpo alone          AlphaPO    alphapo alone

SLiC-HF takes the likelihood of the SFT target, for which the chosen completion usually stands in.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.losses import preference
from jaxpost.typing import Array, PerSequence, Shaped

NEARLY_CERTAIN = -1e-6  # nats; beyond it the odds of a token overflow and have no gradient


def cpo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PerSequence:
    """−log σ(β (log π(w) − log π(l))), smoothed as `dpo` (CPO, arXiv 2401.08417, eq. 3)."""
    return preference.logistic(beta * (chosen_logps - rejected_logps), label_smoothing)


def slic(
    chosen_logps: PerSequence, rejected_logps: PerSequence, *, delta: float = 1.0
) -> PerSequence:
    """max(0, δ − log π(w) + log π(l)) (SLiC-HF, arXiv 2305.10425, without its likelihood)."""
    return jax.nn.relu(delta - chosen_logps + rejected_logps)


def simpo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    chosen_lengths: Shaped[Array, "*B"],
    rejected_lengths: Shaped[Array, "*B"],
    *,
    beta: float = 2.0,
    gamma_beta_ratio: float = 0.5,
    label_smoothing: float = 0.0,
) -> PerSequence:
    """−log σ(β (l_w − l_l) − γ), l = log π/length (SimPO, arXiv 2405.14734, eq. 6).

    γ = beta · gamma_beta_ratio, as in the official code; TRL's `simpo_gamma` is γ.
    """
    chosen = preference.per_token(chosen_logps, chosen_lengths)
    rejected = preference.per_token(rejected_logps, rejected_lengths)
    return preference.logistic(beta * (chosen - rejected - gamma_beta_ratio), label_smoothing)


def alphapo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    chosen_lengths: Shaped[Array, "*B"],
    rejected_lengths: Shaped[Array, "*B"],
    *,
    alpha: float = 0.25,
    beta: float = 2.5,
    gamma_beta_ratio: float = 0.5,
    label_smoothing: float = 0.0,
) -> PerSequence:
    """`simpo` of (1 − p^−α)/α in the place of log p, p = exp(l) (AlphaPO, arXiv 2501.03884).

    α ≠ 0; towards 0 it is `simpo`. |α l| ≤ 20, without a gradient beyond. Defaults are not the
    paper's, which tunes all three for each model.
    """

    def reward(logps: Array, lengths: Array) -> Array:
        return -jnp.expm1(ratios.bounded(-alpha * preference.per_token(logps, lengths))) / alpha

    margins = reward(chosen_logps, chosen_lengths) - reward(rejected_logps, rejected_lengths)
    return preference.logistic(beta * (margins - gamma_beta_ratio), label_smoothing)


def orpo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    chosen_lengths: Shaped[Array, "*B"],
    rejected_lengths: Shaped[Array, "*B"],
) -> PerSequence:
    """−log σ(o_w − o_l), o = l − log(1 − e^l), l = log π/length (ORPO, arXiv 2403.07691, eq. 7)."""
    chosen = log_odds(preference.per_token(chosen_logps, chosen_lengths))
    rejected = log_odds(preference.per_token(rejected_logps, rejected_lengths))
    return preference.logistic(chosen - rejected)


def log_odds(logps: Array) -> Array:
    """log p/(1 − p) of p = exp(logps), for logps up to −1e-6."""
    logps = jnp.minimum(logps, NEARLY_CERTAIN)
    return logps - jax.nn.log1mexp(-logps)
