"""Policy mirror descent: each iteration solves max_π E[A] − τ KL(π ‖ π_old) by regression.

Per sequence, with `logps` summed over the completion, unless it says otherwise; l = log π/π_old.
π_old is the policy of the previous iteration, which the samples come from. There is no clip and no
importance weight, and since the objective changes from one iteration to the next, the optimizer's
state should be reset with it. A group of equal rewards still pulls back towards π_old.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import PerSequence, PerToken


def pmd(
    logps: PerSequence, old_logps: PerSequence, advantages: PerSequence, *, tau: float
) -> PerSequence:
    """(A − τ l)² / (2 τ) (Kimi k1.5, arXiv 2501.12599, eqs. 2–3; K2, arXiv 2507.20534).

    The reports' (r − r̄ − τ l)² is divided by 2τ, which makes the descent direction their eq. 3,
    (A − τ l) ∇log π, at any τ; at l = 0 it is REINFORCE's. A is `group_centered` (both reports),
    `partition_centered` (τ log Z as a log-mean-exp), `leave_one_out` or `leave_one_out_partition`.
    Divide the weights by the lengths for OpenKimi's form. τ > 0; Kimi's is not disclosed.
    """
    residuals = jax.lax.stop_gradient(advantages) - tau * ratios.log_ratio(logps, old_logps)
    return jnp.square(residuals) / (2 * tau)


def mirror_descent(
    logps: PerSequence, old_logps: PerSequence, advantages: PerSequence, *, tau: float
) -> PerSequence:
    """−ρ A + τ (ρ log ρ − ρ + 1): the step itself, on samples of π_old (MDPO, arXiv 2005.09814).

    The second term is τ KL(π ‖ π_old) in expectation and never negative. The gradient is
    −ρ (A − τ l) ∇log π: `pmd`'s, reweighted to samples of π. So its minimiser is exactly
    π_old exp(A/τ)/Z, where `pmd`'s with a mean baseline stays closer to π_old.
    """
    log_rho = ratios.bounded(ratios.log_ratio(logps, old_logps))
    rho = jnp.exp(log_rho)
    return tau * (rho * log_rho - rho + 1) - rho * jax.lax.stop_gradient(advantages)


def pmd_token(
    logps: PerToken,
    old_logps: PerToken,
    advantages: PerToken,
    *,
    tau: float,
    log_low: float,
    log_high: float,
) -> PerToken:
    """−ρ A 1[log_low ≤ log ρ ≤ log_high] + τ (log ρ)², per token (Kimi K2.5, arXiv 2602.02276).

    Outside the window a token has no policy gradient, whatever the sign of its advantage. Weights
    are `token_mean`. A reconstruction: transcriptions of the report's equation disagree; the square
    is averaged over tokens here like the rest. The report gives no numbers.
    """
    log_ratios = ratios.log_ratio(logps, old_logps)
    inside = (log_low <= log_ratios) & (log_ratios <= log_high)
    surrogate = jnp.where(inside, ratios.exponential(log_ratios), 0.0)
    return tau * jnp.square(log_ratios) - surrogate * jax.lax.stop_gradient(advantages)


def self_play_preference(
    logps: PerSequence, old_logps: PerSequence, win_rates: PerSequence, *, eta: float = 1000.0
) -> PerSequence:
    """(l − η (P − ½))² (Self-Play Preference Optimization, arXiv 2405.00675).

    P is the probability that the completion beats the policy's own, for winners and losers alike.
    Not to be confused with Sequence-Level PPO, which shares the acronym.
    """
    targets = eta * (jax.lax.stop_gradient(win_rates) - 0.5)
    return jnp.square(ratios.log_ratio(logps, old_logps) - targets)
