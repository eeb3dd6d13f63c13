"""Preference losses that hold each completion of a pair to the reference by itself: minimised.

u = log π/π_ref, a sum over the trained tokens; w the chosen, l the rejected completion. Per pair,
differentiable in the policy's two. A shared prefix does not cancel: mask it.
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.typing import PerSequence


def nca(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """−log σ(r_w) − ½ log σ(−r_w) − ½ log σ(−r_l), r = β u (NCA, arXiv 2402.05369, pairs)."""
    chosen = beta * ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = beta * ratios.log_ratio(rejected_logps, ref_rejected_logps)
    noise = 0.5 * (jax.nn.softplus(chosen) + jax.nn.softplus(rejected))
    return jax.nn.softplus(-chosen) + noise


def bco_pair(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """−log σ(r_w) − log σ(−r_l), r = β u: `bco` of both with no shift (arXiv 2404.04656).

    As TRL computes it; its documentation prints DPO's formula.
    """
    chosen = beta * ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = beta * ratios.log_ratio(rejected_logps, ref_rejected_logps)
    return jax.nn.softplus(-chosen) + jax.nn.softplus(rejected)


def sppo_hard(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """(u_w − 1/(2β))² + (u_l + 1/(2β))² (arXiv 2405.00675, eq. 4.7 at P = 1 and 0).

    `self_play_preference` of both completions, η = 1/β.
    """
    chosen = ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = ratios.log_ratio(rejected_logps, ref_rejected_logps)
    return jnp.square(chosen - 0.5 / beta) + jnp.square(rejected + 0.5 / beta)


def apo_zero(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """1 − σ(β u_w) + σ(β u_l) (APO-zero, arXiv 2408.06266, eq. 7).

    Chosen up, rejected down: for chosen completions better than the model's own.
    """
    chosen = beta * ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = beta * ratios.log_ratio(rejected_logps, ref_rejected_logps)
    return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)


def apo_down(
    chosen_logps: PerSequence,
    rejected_logps: PerSequence,
    ref_chosen_logps: PerSequence,
    ref_rejected_logps: PerSequence,
    *,
    beta: float = 0.1,
) -> PerSequence:
    """σ(β u_w) + 1 − σ(β (u_w − u_l)) (APO-down, arXiv 2408.06266, eq. 8).

    Both down, the rejected more: for chosen completions worse than the model's own.
    """
    chosen = beta * ratios.log_ratio(chosen_logps, ref_chosen_logps)
    rejected = beta * ratios.log_ratio(rejected_logps, ref_rejected_logps)
    return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)
