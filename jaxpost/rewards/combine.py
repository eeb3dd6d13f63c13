"""Rewards of several sources as one, over [P, G]: G completions of each of P prompts; NaN: missing.

Two ways to weigh them differ: summed, then normalised in each group; or each normalised, then
summed (as GDPO does), which gives every part its weight whatever its spread. By a
standard deviation, even a tiny part is brought to full size in a group where the others agree.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rewards = NDArray[np.floating]


def verifier_and_human(
    verifier: ArrayLike, human: ArrayLike, weight: float, *, levels: Sequence[float] = (0.0, 1.0)
) -> Rewards:
    """R = R_verifier + λ · R_human, where λ = `weight`.

    Raises ValueError where λ · (max − min of R_human) is not below the smallest gap between the
    verifier's `levels`: a wrong answer that people like could then beat a right one.
    """
    verifier, human = np.asarray(verifier, float), np.asarray(human, float)
    steps = np.diff(np.unique(np.asarray(levels, float)))
    if not steps.size:
        raise ValueError(f"levels are {list(levels)}; give at least two different ones")
    known = human[np.isfinite(human)]
    spread = abs(weight) * float(np.ptp(known)) if known.size else 0.0
    gap = float(steps.min())
    if spread >= gap:
        raise ValueError(
            f"the human reward spans {spread:.6g} (weight {weight:g}), the verifier's levels are "
            f"{gap:g} apart: lower the weight, or bring the reward to [0, 1] (combine.to_unit)"
        )
    return verifier + weight * human


def to_unit(rewards: ArrayLike) -> Rewards:
    """Any real reward to (0, 1): the logistic function, which keeps the order."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(rewards, float))))


def weighted(parts: Mapping[str, ArrayLike], weights: Mapping[str, float]) -> Rewards:
    """Σ_k w_k r_k over the parts that have a weight. Raises KeyError for a weight without part."""
    missing = sorted(set(weights) - set(parts))
    if missing:
        raise KeyError(f"no part {', '.join(missing)}; there are {', '.join(sorted(parts))}")
    return np.sum([weights[name] * np.asarray(parts[name], float) for name in weights], axis=0)


def sum_then_normalize(
    parts: Mapping[str, ArrayLike],
    weights: Mapping[str, float],
    *,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Rewards:
    """The group-normalised weighted sum."""
    return normalized(weighted(parts, weights), ddof, epsilon)


def normalize_then_sum(
    parts: Mapping[str, ArrayLike],
    weights: Mapping[str, float],
    *,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Rewards:
    """The weighted sum of parts that are normalised in each group; NaN where one is missing."""
    return weighted(
        {name: normalized(part, ddof, epsilon) for name, part in parts.items()}, weights
    )


def normalized(rewards: ArrayLike, ddof: int, epsilon: float) -> Rewards:
    """(r − mean) / (std + ε) along the last axis, of what is there; 0 where all are equal."""
    rewards = np.asarray(rewards, float)
    there = np.isfinite(rewards)
    count = there.sum(-1, keepdims=True)
    mean = np.where(there, rewards, 0).sum(-1, keepdims=True) / np.maximum(count, 1)
    centred = np.where(there, rewards - mean, 0)
    highest = np.where(there, rewards, -np.inf).max(-1, keepdims=True)
    equal = highest <= np.where(there, rewards, np.inf).min(-1, keepdims=True)
    variance = (centred**2).sum(-1, keepdims=True) / np.maximum(count - ddof, 1)
    scaled = np.where(equal, 0, centred / np.where(equal, 1, np.sqrt(variance) + epsilon))
    return np.where(there, scaled, np.nan)


def hero(
    verifier: ArrayLike, human: ArrayLike, *, alpha: float = 0.1, beta: float = 0.1
) -> Rewards:
    """The human reward, min-max scaled per group and class: right to 1 ± β, wrong to ± α.

    HERO (arXiv 2510.07242), read from third-party code. `verifier` is 1 (right) or 0; a class whose
    human rewards are all equal gets its centre.
    """
    verifier, human = np.asarray(verifier, float), np.asarray(human, float)
    out = np.full(verifier.shape, np.nan)
    for level, half in ((0.0, alpha), (1.0, beta)):
        chosen = (verifier == level) & np.isfinite(human)
        low = np.where(chosen, human, np.inf).min(-1, keepdims=True)
        span = np.where(chosen, human, -np.inf).max(-1, keepdims=True) - low
        place = np.where(chosen, human - np.where(chosen, low, 0), 0)
        place = np.where(span > 0, 2 * place / np.where(span > 0, span, 1) - 1, 0)
        out = np.where(chosen, level + half * place, out)
    return out


def hero_weights(deviations: ArrayLike, mean_deviation: float) -> Rewards:
    """A prompt's weight: 0.5 + 1.5 / (1 + exp(−5 (σ_u − mean σ))), σ_u of its human rewards."""
    return np.asarray(0.5 + 1.5 * to_unit(5 * (np.asarray(deviations, float) - mean_deviation)))
