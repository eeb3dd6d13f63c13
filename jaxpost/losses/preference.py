"""Preference losses of a pair's margin, against a reference: per pair, minimised.

The margin is Δ = u_w − u_l, u = log π/π_ref of a completion, w the chosen and l the rejected one.
`logps` are sums over the trained tokens; those with lengths take sums too and divide by them.
Differentiable in the policy's two. A prefix that both share cancels in Δ, trained or not; not once
it is divided by lengths, nor in the losses of `anchored` and `reference_free`: mask it there.
At the reference, and where chosen and rejected are one, `dpo` is log 2.

A method is a loss, what it is summed over, and what is added:

    DPO, cDPO     dpo                                    label_smoothing 0.1–0.2
    Step-DPO      dpo     one step after a right prefix  beta 0.4 (2406.18629)
    SDPO          dpo     as many turns on either side   from the first wrong turn (2501.01821)
    DMPO          dpo     turns times `turn_weights`     (2406.14868)
    LD-DPO        dpo     times `desensitized_weights`   (2409.06411)
    HPL           dpo     trajectory + suffix + group    beta 0.3, + nll summed (2510.03253)
    f-DPO         any     of `implicit_rewards`          forward KL, Jensen–Shannon, alpha
    WPO           any                                    times `pair_weights` (2406.11827)
    RPO           dpo                                    + alpha nll / length (2404.19733)
    MPO           0.8 dpo + 0.2 bco_pair + 1.0 nll       (2411.10442)
    TR-DPO        any     ref_params moved at times      `optax.incremental_update` (2404.09656)
    Online DPO    dpo     two samples, judged            ties dropped (2402.04792)
    soft labels   soft_bradley_terry of beta u           P = σ(r₁ − r₂) (2409.19605)
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import Array, PerSequence, Shaped


def margin(
    chosen_logps: Array, rejected_logps: Array, ref_chosen_logps: Array, ref_rejected_logps: Array
) -> Array:
    """Δ = u_w − u_l, the reference's constant; each u within ±1e6."""
    chosen = ratios.log_ratio(chosen_logps, ref_chosen_logps)
    return chosen - ratios.log_ratio(rejected_logps, ref_rejected_logps)


def logistic(margins: Array, label_smoothing: Array | float = 0.0) -> Array:
    """−(1 − ε) log σ(v) − ε log σ(−v), of v = log σ(v) − log σ(−v)."""
    return jax.nn.softplus(-margins) + label_smoothing * margins


def per_token(logps: Array, lengths: Array) -> Array:
    """Sums over completions → means over their tokens; 0 of an empty one."""
    return logps / jnp.maximum(jax.lax.stop_gradient(lengths), 1)


def mean_margin(
    chosen_logps: Array,
    rejected_logps: Array,
    ref_chosen_logps: Array,
    ref_rejected_logps: Array,
    chosen_lengths: Array,
    rejected_lengths: Array,
) -> Array:
    """u_w / |w| − u_l / |l|."""
    chosen = ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = ratios.log_ratio(rejected_logps, ref_rejected_logps)
    return per_token(chosen, chosen_lengths) - per_token(rejected, rejected_lengths)


def dpo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> PerSequence:
    """−(1 − ε) log σ(β Δ) − ε log σ(−β Δ) (DPO, arXiv 2305.18290, eq. 7).

    ε, `label_smoothing`, is the chance that a label is wrong: cDPO (Mitchell 2023).
    """
    delta = margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return logistic(beta * delta, label_smoothing)


def dpo_norm(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    chosen_lengths: Shaped[Array, "*B"],
    rejected_lengths: Shaped[Array, "*B"],
    *,
    beta: float = 5.0,
) -> PerSequence:
    """−log σ(β (u_w/|w| − u_l/|l|)): length-normalised DPO (Tülu 3, arXiv 2411.15124)."""
    policy, reference = (chosen_logps, rejected_logps), (ref_chosen_logps, ref_rejected_logps)
    return logistic(beta * mean_margin(*policy, *reference, chosen_lengths, rejected_lengths))


def robust(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> PerSequence:
    """[(1 − ε) L(β Δ) − ε L(−β Δ)] / (1 − 2ε), L(v) = −log σ(v) (arXiv 2403.00409).

    Unbiased for DPO's loss on labels of which a share ε < ½ is flipped. It may be negative.
    """
    delta = margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    clean, flipped = logistic(beta * delta), logistic(-beta * delta)
    return ((1 - label_smoothing) * clean - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """max(0, 1 − β Δ) (RSO, arXiv 2309.06657: SLiC's loss, normalised)."""
    delta = margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return jax.nn.relu(1 - beta * delta)


def ipo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """(Δ − 1/(2β))² (IPO, arXiv 2310.12036, eq. 17, where β is τ).

    Of sums, as DPO's authors and HALOs have it. IPO's own authors averaged: `ipo_average`.
    """
    delta = margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    return jnp.square(delta - 1 / (2 * beta))


def ipo_average(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    chosen_lengths: Shaped[Array, "*B"],
    rejected_lengths: Shaped[Array, "*B"],
    *,
    beta: float = 0.1,
) -> PerSequence:
    """(u_w/|w| − u_l/|l| − 1/(2β))²: `ipo` with the reduction that its authors confirmed to TRL."""
    policy, reference = (chosen_logps, rejected_logps), (ref_chosen_logps, ref_rejected_logps)
    means = mean_margin(*policy, *reference, chosen_lengths, rejected_lengths)
    return jnp.square(means - 1 / (2 * beta))


def exo(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> PerSequence:
    """KL of (σ(β Δ), σ(−β Δ)) from (1 − ε, ε) (EXO, arXiv 2402.00856, eq. 16; 0 < ε < 1)."""
    delta = beta * margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    right = -logistic(delta) - jnp.log1p(-label_smoothing)
    wrong = -logistic(-delta) - jnp.log(label_smoothing)
    return jax.nn.sigmoid(delta) * right + jax.nn.sigmoid(-delta) * wrong


def discopop(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
    tau: float = 0.05,
) -> PerSequence:
    """(1 − m) · −log σ(v) + m e^−v, v = β Δ, m = σ(v/τ) (DiscoPOP, arXiv 2406.08414, eq. 5; τ < 1).

    m e^−v is formed as one exponential, which does not overflow where v is far below zero.
    """
    v = beta * margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    exponential = jnp.exp(jax.nn.log_sigmoid(v / tau) - v)
    return jax.nn.sigmoid(-v / tau) * logistic(v) + exponential


def dpop(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.3,
    penalty: float = 50.0,
) -> PerSequence:
    """−log σ(β (Δ − λ max(0, −u_w))) (DPO-Positive, arXiv 2402.13228; λ is `penalty`).

    It is DPO as long as the chosen completion is no less likely than under the reference.
    """
    delta = margin(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps)
    fallen = jax.nn.relu(-ratios.log_ratio(chosen_logps, ref_chosen_logps))
    return logistic(beta * (delta - penalty * fallen))
