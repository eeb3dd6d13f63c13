"""Which prompts to learn from, and when to ask for more."""

import jax.numpy as jnp

from jaxpost.typing import Array, Bool, Float


def mixed_groups(
    correct: Bool[Array, "P G"], counted: Bool[Array, "P G"] | None = None
) -> Bool[Array, " P"]:
    """DAPO's dynamic sampling (arXiv 2503.14476, eq. 11): some, not all of a group are correct.

    Judge by correctness, not by the shaped reward, which differs among correct answers as well.
    """
    counted = jnp.ones(correct.shape, bool) if counted is None else counted
    right = jnp.any(correct & counted, axis=1)
    wrong = jnp.any(~correct & counted, axis=1)
    return right & wrong


def prompt_priorities(success_rates: Float[Array, " N"]) -> Float[Array, " N"]:
    """Kimi k1.5's prioritised sampling (§2.3.4): p_i ∝ 1 − s_i; uniform where all are solved."""
    failures = 1.0 - success_rates
    total = jnp.sum(failures)
    uniform = jnp.full(failures.shape, 1.0 / failures.size)
    return jnp.where(total > 0, failures / jnp.where(total > 0, total, 1.0), uniform)


def trajectory_limit(version: int, *, batch_size: int, staleness: int) -> int:
    """How many trajectories may have been asked for at a policy `version` (AReaL, 2505.24298).

    The largest N with ⌊(N − 1) / batch_size⌋ ≤ version + staleness; N counts those in flight.
    A staleness of 0 is synchronous.
    """
    return batch_size * (version + staleness + 1)
