"""GRPO's advantages: from rewards of groups to each token; and which tokens are trained.

`config` is GRPO's.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpost import advantages, writer
from jaxpost.recipes import accuracy, course, draws, experience
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params

NORMALIZED = {
    "group_normalized": advantages.group_normalized,
    "batch_normalized": advantages.batch_normalized,
}
GROUPED = {
    "group_centered": advantages.group_centered,
    "leave_one_out": advantages.leave_one_out,
    "mean_normalized": advantages.mean_normalized,
    "contrast_scaled": advantages.contrast_scaled,
}


class Gains(NamedTuple):
    """Which tokens are trained, and the advantage of each [B, T]."""

    trained: Array
    advantages: Array


def in_groups(config: Any, found: Experience, rows: experience.Rows) -> Gains:
    """Each completion against the others of its prompt."""
    trained = trained_tokens(config, found, rows, ~np.isnan(found.rewards))
    values, lengths = shaped(config, found), jnp.asarray(found.lengths)
    if config.advantage == "reinforce_plus_plus_baseline":
        return Gains(trained, advantages.reinforce_plus_plus_baseline(values, trained))
    if config.advantage == "optimal_baseline":
        gains = advantages.optimal_baseline(values, lengths)
    elif config.advantage in NORMALIZED:
        gains = NORMALIZED[config.advantage](values, epsilon=config.std_epsilon)
    else:
        gains = GROUPED[config.advantage](values)
    return Gains(trained, advantages.per_token(gains, jnp.asarray(rows.completion_mask)))


def against_greedy(
    config: Any, found: Experience, greedy: Experience, rows: experience.Rows
) -> Gains:
    """Each completion against the most probable one of its prompt (ReMax); both are shaped."""
    baselines = shaped(config, greedy)[:, 0]
    there = ~np.isnan(found.rewards) & ~np.isnan(greedy.rewards)
    gains = advantages.greedy_baseline(shaped(config, found), baselines)
    return Gains(
        trained_tokens(config, found, rows, there),
        advantages.per_token(gains, jnp.asarray(rows.completion_mask)),
    )


def shaped(config: Any, found: Experience) -> Array:
    """[P, G]: rewards, with the penalty of what is nearly too long."""
    values = jnp.asarray(found.rewards)
    if not config.overlong_margin:
        return values
    return values + advantages.overlong_penalty(
        jnp.asarray(found.lengths),
        max_length=config.rollout.max_new_tokens,
        margin=config.overlong_margin,
    )


def trained_tokens(
    config: Any, found: Experience, rows: experience.Rows, there: np.ndarray
) -> Array:
    """[B, T]: of completions that are `there` [P, G], the tokens that are not too stale."""
    if config.mask_truncated:
        there = there & ~found.truncated
    return jnp.asarray((rows.loss_weights != 0) & there.reshape(-1, 1))


def greedy_completions(
    config: Any,
    opened: course.Opened,
    params: Params,
    found: Experience,
    key: Array,
    watch: writer.Stopwatch,
) -> Experience:
    """The most probable completion of each prompt, for ReMax."""
    sampling = accuracy.greedy(config.rollout)
    return draws.collect(opened.policy, params, found.prompts, key, sampling, opened.scorer, watch)
