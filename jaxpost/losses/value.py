"""Value losses: minimised, differentiable in the first argument alone.

A value belongs to the state before its token: read it where the model predicts that token. Values
and returns are 0 outside the completion.
"""

import jax
import jax.numpy as jnp

from jaxpost.typing import PerSequence, PerToken


def value_squared(values: PerToken, returns: PerToken) -> PerToken:
    """½ (V − R)² (Open-Reasoner-Zero, arXiv 2503.24290; its code clips as `value_clip`)."""
    return 0.5 * jnp.square(values - jax.lax.stop_gradient(returns))


def value_clip(
    values: PerToken, old_values: PerToken, returns: PerToken, *, clip: float = 0.2
) -> PerToken:
    """½ max((V − R)², (V_old + clip(V − V_old, ±clip) − R)²) (arXiv 2005.12729, §3).

    Moving further than `clip` from the values of the rollout earns nothing: no gradient then,
    unless the value as it stands is the worse of the two.
    """
    old_values = jax.lax.stop_gradient(old_values)
    near = old_values + jnp.clip(values - old_values, -clip, clip)
    return jnp.maximum(value_squared(values, returns), value_squared(near, returns))


def value_bce(logits: PerSequence, rewards: PerSequence) -> PerSequence:
    """−R log σ(z) − (1 − R) log(1 − σ(z)): Sequence-Level PPO's critic (arXiv 2604.08865).

    Per sequence: z is read at the prompt's last token, so the value σ(z) sees the prompt alone.
    Rewards are 0 or 1, or in between; not −1. The advantage is R − σ(z), z from before the update.
    """
    return jax.nn.softplus(logits) - jax.lax.stop_gradient(rewards) * logits
