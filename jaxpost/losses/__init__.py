"""Losses: arrays in, one array out, unreduced. `loss_weights` turns them into a number."""

from jaxpost.losses.divergence import kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_weighted
from jaxpost.losses.likelihood import dft, nll, z_loss
from jaxpost.losses.mirror import mirror_descent, pmd, pmd_token, self_play_preference
from jaxpost.losses.policy import (
    cispo,
    entropy_bonus,
    gspo,
    gspo_token,
    ppo_clip,
    ppo_decoupled,
    ppo_dual_clip,
    reinforce,
    sapo,
    vespo,
)
from jaxpost.losses.value import value_bce, value_clip, value_squared

__all__ = [
    "cispo",
    "dft",
    "entropy_bonus",
    "gspo",
    "gspo_token",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_plus",
    "kl_k3_weighted",
    "mirror_descent",
    "nll",
    "pmd",
    "pmd_token",
    "ppo_clip",
    "ppo_decoupled",
    "ppo_dual_clip",
    "reinforce",
    "sapo",
    "self_play_preference",
    "value_bce",
    "value_clip",
    "value_squared",
    "vespo",
    "z_loss",
]
