"""What is logged of a rollout: rewards, lengths, the sampler's numbers, and completions in full."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxpost import metrics, rewards, rollout
from jaxpost.recipes.experience import Experience, Rows
from jaxpost.typing import Array


def summary(found: Experience) -> dict[str, float]:
    """Rewards and their parts, missing ones, lengths; of groups only where there are any."""
    values, lengths, cut = found.rewards, found.lengths, found.truncated
    out = {
        "reward": mean(values[~np.isnan(values)]),
        "rewards/missing": float(metrics.missing_rewards(jnp.asarray(values))),
        **spread("completions/{}_length", lengths),
        **spread("completions/{}_terminated_length", lengths[~cut]),
        "completions/clipped_ratio": float(np.mean(cut)),
    }
    if found.completions > 1:
        out |= of_groups(values)
    return out | parts_of(found.scored) | failures_of(found.scored)


def of_groups(values: np.ndarray) -> dict[str, float]:
    """Mean deviation within a group [P, G], and the share of groups without any."""
    there = ~np.isnan(values)
    means = np.where(there, values, 0.0).sum(1) / np.maximum(there.sum(1), 1)
    squares = np.where(there, (values - means[:, None]) ** 2, 0.0).sum(1)
    deviations = np.sqrt(squares / np.maximum(there.sum(1) - 1, 1))
    return {
        "reward_std": mean(deviations),
        "frac_reward_zero_std": float(metrics.equal_groups(jnp.asarray(values))) / len(values),
    }


def staleness(found: Experience) -> dict[str, float]:
    """How far the policy has moved on since tokens were drawn, in rollouts trained on."""
    stale = found.staleness[found.rollout.mask]
    return {"staleness/mean": mean(stale), "staleness/max": float(np.max(stale, initial=0))}


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, min and max; 0 of nothing."""
    return {
        name.format("mean"): mean(values),
        name.format("min"): float(np.min(values)) if values.size else 0.0,
        name.format("max"): float(np.max(values)) if values.size else 0.0,
    }


def mean(values: np.ndarray) -> float:
    """The mean; 0 of nothing."""
    return float(np.mean(values)) if values.size else 0.0


def parts_of(scored: Sequence[rewards.Scored]) -> dict[str, float]:
    """Mean and deviation of each part, over the completions that have it."""
    found: dict[str, list[float]] = {}
    for each in scored:
        for name, value in each.parts.items():
            found.setdefault(name, []).append(value)
    out = {}
    for name, values in sorted(found.items()):
        out[f"rewards/{name}/mean"] = float(np.mean(values))
        out[f"rewards/{name}/std"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return out


def failures_of(scored: Sequence[rewards.Scored]) -> dict[str, float]:
    """How many rewards are missing, by kind."""
    kinds = [each.failure for each in scored if each.failure is not None]
    return {f"rewards/failed/{kind}": float(kinds.count(kind)) for kind in sorted(set(kinds))}


def agreement(old_logps: Array, rows: Rows) -> dict[str, float]:
    """The trainer's numbers before the update, against those that each token was drawn with.

    The difference is of tokens drawn by the same parameters; the ratio π_old / π_sampler of all,
    before any cap.
    """
    gaps = np.asarray(old_logps) - rows.sampler_logps
    ratios = np.exp(np.clip(gaps[rows.completion_mask], -20.0, 20.0))
    out = spread("sampling/importance_sampling_ratio/{}", ratios)
    same = rows.completion_mask & (rows.staleness == 0) & np.isfinite(gaps)
    if same.any():
        name, off = "sampling/sampling_logp_difference", np.abs(gaps[same])
        out |= {f"{name}/mean": mean(off), f"{name}/max": float(np.max(off))}
    return out


def outside(rows: Rows, scored: Mapping[str, Array]) -> dict[str, float]:
    """The share of tokens that each policy that was asked, by name, could not have drawn."""
    return {
        f"outside_support/{name}": mean(~np.isfinite(np.asarray(logps))[rows.completion_mask])
        for name, logps in scored.items()
    }


def of_completions(values: Any, mask: Any) -> np.ndarray:
    """[B]: the mean of each row's values over its mask [B, T]; 0 where that is empty."""
    values, mask = np.asarray(values), np.asarray(mask)
    return np.where(mask, values, 0.0).sum(1) / np.maximum(mask.sum(1), 1)


def records(
    found: Experience,
    split: Literal["train", "eval"],
    count: int,
    advantages: np.ndarray | None = None,
) -> list[Mapping[str, Any]]:
    """The first completions as `samples.jsonl` keeps them; `advantages` are one a completion."""
    out = []
    for row in range(min(count, len(found.texts))):
        prompt, scored = found.prompts[row // found.completions], found.scored[row]
        gained = {} if advantages is None else {"advantage": float(advantages[row])}
        out.append(
            {
                "split": split,
                "prompt": prompt.prompt,
                "completion": found.texts[row],
                "reward": None if np.isnan(scored.value) else scored.value,
                **gained,
                "parts": dict(scored.parts),
                "reason": scored.failure or scored.reason,
                "tokens": int(found.rollout.lengths[row]),
                "stop": rollout.REASONS[int(found.rollout.stop_reasons[row])],
                "where": prompt.where,
            }
        )
    return out
