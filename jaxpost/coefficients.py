"""How the weight of a term changes between updates: a coefficient and a measurement → the next.

A fixed coefficient is a number and needs no function.
"""

import jax.numpy as jnp

from jaxpost.typing import Array


def adaptive_kl(
    kl_coef: Array | float,
    kl: Array | float,
    sequences: int,
    *,
    target: float = 6.0,
    horizon: float = 10_000.0,
) -> Array:
    """β (1 + clip(KL/target − 1, ±0.2) · sequences/horizon) (arXiv 1909.08593, §2.2).

    `kl` is in nats a sequence: summed over tokens, averaged over the update's sequences.
    """
    error = jnp.clip(kl / target - 1.0, -0.2, 0.2)
    return kl_coef * (1.0 + error * sequences / horizon)


def adaptive_entropy(
    entropy_coef: Array | float,
    entropy: Array | float,
    *,
    target: float = 0.2,
    step: float = 0.005,
) -> tuple[Array, Array]:
    """Entropy held from below (Skywork-OR1, arXiv 2505.22312): (next coefficient, weight now).

    The weight of `entropy_bonus` in this update is the coefficient while `entropy` (nats a token,
    of the rollout) is at most `target`, else 0. The coefficient, 0 at first, then rises by `step`
    where entropy is under the target and falls otherwise, not below 0 (which is our floor).
    """
    weight = jnp.where(jnp.less_equal(entropy, target), entropy_coef, 0.0)
    moved = entropy_coef + jnp.where(jnp.less(entropy, target), step, -step)
    return jnp.maximum(moved, 0.0), weight
