"""Heads that read a number from a hidden state: a value or a reward."""

import jax
import jax.numpy as jnp

from jaxpost.typing import Array, Float, Hidden, Params


def zero_head(width: int) -> Params:
    """A linear head [D] → scalar whose values are all 0 at first."""
    return {"weight": jnp.zeros(width), "bias": jnp.zeros(())}


def read(head: Params, hidden: Hidden) -> Float[Array, "B T"]:
    """hidden · weight + bias in float32: at position t, the value of the state after input t.

    That state is the one in which target t is chosen, so values are aligned to targets.
    """
    hidden = hidden.astype(jnp.float32)
    return hidden @ head["weight"].astype(jnp.float32) + head["bias"].astype(jnp.float32)


def reward_head(width: int) -> Params:
    """A linear head [D] → scalar without a bias, which pairs could not teach; all rewards are 0."""
    return {"weight": jnp.zeros(width)}


def reward(head: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B"]:
    """hidden · weight in float32; a sequence's reward is that of its last token (EOS read)."""
    weight = head["weight"].astype(jnp.float32)
    return jnp.matmul(hidden.astype(jnp.float32), weight, precision=jax.lax.Precision.HIGHEST)
