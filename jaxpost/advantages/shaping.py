"""What changes a reward before advantages are taken. A missing reward (NaN) stays missing."""

import jax.numpy as jnp

from jaxpost.typing import Array, Bool, Float, Shaped


def overlong_penalty(
    lengths: Shaped[Array, "*B"], *, max_length: int, margin: int
) -> Float[Array, "*B"]:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13), added to the reward: 0 down to −1.

    It falls linearly over the last `margin` tokens before `max_length` and stays −1 beyond.
    """
    return jnp.clip((max_length - margin - lengths) / margin, -1.0, 0.0)


def length_rewards(
    lengths: Shaped[Array, "P G"],
    correct: Bool[Array, "P G"],
    counted: Bool[Array, "P G"] | None = None,
) -> Float[Array, "P G"]:
    """Kimi k1.5's length reward (arXiv 2501.12599, §2.3.3), in [−½, ½], added with a small weight.

    λ = ½ − (length − min) / (max − min) over the group if correct, min(0, λ) if not; 0 where all
    lengths are equal, and where a completion is not `counted`, as those without a reward.
    """
    counted = jnp.ones(correct.shape, bool) if counted is None else counted
    lengths = jnp.asarray(lengths, float)
    shortest = jnp.min(lengths, axis=1, keepdims=True, where=counted, initial=jnp.inf)
    longest = jnp.max(lengths, axis=1, keepdims=True, where=counted, initial=-jnp.inf)
    differ = counted & (longest > shortest)
    spread = jnp.where(longest > shortest, longest - shortest, 1.0)
    scale = 0.5 - jnp.where(differ, lengths - shortest, 0.0) / spread
    return jnp.where(differ, jnp.where(correct, scale, jnp.minimum(scale, 0.0)), 0.0)


def stop_penalty(
    rewards: Float[Array, "*B"], stopped: Bool[Array, "*B"], *, penalty: float = -1.0
) -> Float[Array, "*B"]:
    """`penalty` in the place of the reward where a completion did not stop by itself."""
    return jnp.where(stopped | jnp.isnan(rewards), rewards, penalty)


def budgeted_rewards(
    rewards: Float[Array, "P G"],
    correct: Bool[Array, "P G"],
    lengths: Shaped[Array, "P G"],
    budgets: Shaped[Array, " P"],
    *,
    accuracy: float,
) -> Float[Array, "P G"]:
    """r · 1[mean correct < accuracy, or length ≤ budget] (Kimi K2.5's phases with a token budget).

    A prompt's budget is a percentile of the lengths of its correct completions (2602.02276).
    """
    missing = jnp.isnan(rewards)
    hard = jnp.mean(correct, axis=1, keepdims=True, where=~missing) < accuracy
    within = lengths <= jnp.expand_dims(budgets, 1)
    return jnp.where(hard | within | missing, rewards, 0.0)
