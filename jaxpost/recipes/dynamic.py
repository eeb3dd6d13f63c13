"""Dynamic sampling (DAPO, arXiv 2503.14476): prompts that are solved now and then, and no others.

`config` is GRPO's, of which `rollout`, `refills` and `eval.correct` are read.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import advantages, writer
from jaxpost.recipes import course, draws, experience
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Array, Params


def refilled(
    config: Any,
    opened: course.Opened,
    params: Params,
    seen: Experience,
    key: Array,
    watch: writer.Stopwatch,
) -> Experience:
    """With further rollouts until a rollout's number of groups is mixed, or `refills` are used."""
    for refill in range(config.refills):
        if len(mixed(config, seen)) >= config.rollout.prompts:
            break
        prompts = opened.data.take(config.rollout.prompts)
        here = jax.random.fold_in(key, refill)
        more = draws.collect(
            opened.policy, params, prompts, here, config.rollout, opened.scorer, watch
        )
        seen = experience.join([seen, more])
    return seen


def mixed(config: Any, found: Experience) -> list[int]:
    """The prompts of which some completions are correct and some are not."""
    correct = jnp.asarray(found.rewards >= config.eval.correct)
    kept = advantages.mixed_groups(correct, jnp.asarray(~np.isnan(found.rewards)))
    return np.flatnonzero(np.asarray(kept)).tolist()


def kept_of(config: Any, seen: Experience) -> tuple[Experience, dict[str, float]]:
    """As many prompts as a rollout has: mixed ones, and where they are too few, others.

    Raises:
      ValueError: no group has both right and wrong completions.
    """
    kept, wanted = mixed(config, seen), config.rollout.prompts
    others = [p for p in range(len(seen.prompts)) if p not in kept]
    if not kept:
        raise ValueError(
            f"dynamic_sampling: of {len(seen.prompts)} prompts none has both right and wrong "
            "completions; use easier or harder prompts, more rollout.completions, or leave it out"
        )
    missing = max(wanted - len(kept), 0)
    return seen.groups([*kept[:wanted], *others[:missing]]), {
        "dynamic/sampled": float(len(seen.prompts)),
        "dynamic/equal": float(len(others)),
        "dynamic/left_over": float(max(len(kept) - wanted, 0)),
        "dynamic/filled": float(missing),
    }
