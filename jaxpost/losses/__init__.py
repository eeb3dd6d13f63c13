"""Losses: arrays in, one array out, unreduced. `loss_weights` turns them into a number."""

from jaxpost.losses.anchored import apo_down, apo_zero, bco_pair, nca, sppo_hard
from jaxpost.losses.divergence import kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_weighted
from jaxpost.losses.likelihood import dft, nll, z_loss
from jaxpost.losses.mirror import mirror_descent, pmd, pmd_token, self_play_preference
from jaxpost.losses.online import nash_md, xpo
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
from jaxpost.losses.preference import (
    discopop,
    dpo,
    dpo_norm,
    dpop,
    exo,
    hinge,
    ipo,
    ipo_average,
    robust,
)
from jaxpost.losses.reference_free import alphapo, cpo, orpo, simpo, slic
from jaxpost.losses.rewards import (
    bradley_terry,
    ordered_logit,
    plackett_luce,
    reward_centering,
    soft_bradley_terry,
)
from jaxpost.losses.transport import aot, aot_unpaired
from jaxpost.losses.unpaired import bco, kto
from jaxpost.losses.value import value_bce, value_clip, value_squared

__all__ = [
    "alphapo",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "bco",
    "bco_pair",
    "bradley_terry",
    "cispo",
    "cpo",
    "dft",
    "discopop",
    "dpo",
    "dpo_norm",
    "dpop",
    "entropy_bonus",
    "exo",
    "gspo",
    "gspo_token",
    "hinge",
    "ipo",
    "ipo_average",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_plus",
    "kl_k3_weighted",
    "kto",
    "mirror_descent",
    "nash_md",
    "nca",
    "nll",
    "ordered_logit",
    "orpo",
    "plackett_luce",
    "pmd",
    "pmd_token",
    "ppo_clip",
    "ppo_decoupled",
    "ppo_dual_clip",
    "reinforce",
    "reward_centering",
    "robust",
    "sapo",
    "self_play_preference",
    "simpo",
    "slic",
    "soft_bradley_terry",
    "sppo_hard",
    "value_bce",
    "value_clip",
    "value_squared",
    "vespo",
    "xpo",
    "z_loss",
]
