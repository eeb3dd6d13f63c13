"""Losses of reward models: minimised, differentiable in the rewards, one scalar a completion.

reward model        bradley_terry + 0.01 reward_centering
K ranked            bradley_terry of all pairs, each weighted 1/C(K, 2), or plackett_luce
graded pairs        bradley_terry's margin, soft_bradley_terry or ordered_logit
outcome (ORM)       value_bce of the last token, or of every token with the outcome copied
process (PRM)       value_bce at step ends, labels 0, 1 or the share of rollouts that succeed;
                    of two tokens' logits it takes their difference (arXiv 2312.08935)
direct              any of them of implicit rewards β log π/π_ref
"""

import jax
import jax.numpy as jnp

from jaxpost import ratios
from jaxpost.losses import preference
from jaxpost.typing import Array, Float, PerSequence, Shaped

CLOSEST = 1e-6  # between two thresholds


def bradley_terry(
    chosen_rewards: PerSequence, rejected_rewards: PerSequence, *, margin: Array | float = 0.0
) -> PerSequence:
    """−log σ(r_w − r_l − m) (Bradley & Terry 1952; m: Llama 2, arXiv 2307.09288, eq. 2).

    m, one for all or one a pair, is larger the clearer the preference: 1, ⅔, ⅓, 0 or 3, 2, 1, 0.
    """
    return preference.logistic(chosen_rewards - rejected_rewards - jax.lax.stop_gradient(margin))


def reward_centering(chosen_rewards: PerSequence, rejected_rewards: PerSequence) -> PerSequence:
    """(r_w + r_l)²: fixes the constant that `bradley_terry` leaves free (arXiv 2312.09244)."""
    return jnp.square(chosen_rewards + rejected_rewards)


def soft_bradley_terry(
    first_rewards: PerSequence, second_rewards: PerSequence, win_rates: PerSequence
) -> PerSequence:
    """−P log σ(r₁ − r₂) − (1 − P) log σ(r₂ − r₁) (ordinal feedback, arXiv 2411.12843).

    P: how often the first is preferred, in [0, 1]; ½ for a tie, ¾ where it is slightly better.
    """
    win_rates = jax.lax.stop_gradient(win_rates)
    return preference.logistic(first_rewards - second_rewards, 1.0 - win_rates)


def ordered_logit(
    first_rewards: PerSequence,
    second_rewards: PerSequence,
    lower: PerSequence,
    upper: PerSequence,
) -> PerSequence:
    """−log [σ(upper − Δ) − σ(lower − Δ)], Δ = r₁ − r₂ (ordinal regression, arXiv 2603.02232).

    A grade, from "second much better" to "first much better", is an interval of Δ. Its thresholds
    are given row by row, −inf and inf at the ends, and are learnt with the rewards.
    """
    delta = first_rewards - second_rewards
    width = jnp.maximum(upper - lower, CLOSEST)
    ends = jax.nn.softplus(delta - upper) + jax.nn.softplus(lower - delta)
    return ends - jax.nn.log1mexp(width)


def plackett_luce(
    rewards: Float[Array, "*B K"], mask: Shaped[Array, "*B K"]
) -> Float[Array, "*B K"]:
    """log Σ_{j ≥ k} exp r_j − r_k at each place k, rewards best first (Plackett 1975, Luce 1959).

    Its sum over the list is −log of the ranking's probability; of two it is `bradley_terry`.
    `mask`: the places that a list has, 0 at the others.
    """
    rewards = jnp.where(mask, rewards, -ratios.FAR)
    left = jax.lax.cumlogsumexp(rewards, axis=rewards.ndim - 1, reverse=True)
    return jnp.where(mask, left - rewards, 0.0)
