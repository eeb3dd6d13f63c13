"""Advantages: rewards in, constants out. [P, G] for groups, [B, T] for tokens."""

from jaxpost.advantages.groups import (
    batch_normalized,
    contrast_scaled,
    greedy_baseline,
    group_centered,
    group_normalized,
    leave_one_out,
    leave_one_out_partition,
    mean_normalized,
    optimal_baseline,
    partition_centered,
)
from jaxpost.advantages.prompts import mixed_groups, prompt_priorities, trajectory_limit
from jaxpost.advantages.returns import (
    discounted_returns,
    gae,
    per_token,
    process_advantages,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
    whiten,
)
from jaxpost.advantages.shaping import (
    budgeted_rewards,
    length_rewards,
    overlong_penalty,
    stop_penalty,
)

__all__ = [
    "batch_normalized",
    "budgeted_rewards",
    "contrast_scaled",
    "discounted_returns",
    "gae",
    "greedy_baseline",
    "group_centered",
    "group_normalized",
    "leave_one_out",
    "leave_one_out_partition",
    "length_rewards",
    "mean_normalized",
    "mixed_groups",
    "optimal_baseline",
    "overlong_penalty",
    "partition_centered",
    "per_token",
    "process_advantages",
    "prompt_priorities",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "stop_penalty",
    "token_rewards",
    "trajectory_limit",
    "whiten",
]
