"""Pairs of a rollout's completions: which is chosen, how sure that is, and which pairs count.

`config` is that of online DPO.
"""

from typing import Any, NamedTuple

import numpy as np

from jaxpost.recipes.experience import Experience
from jaxpost.rollout import Rollout

KINDS = ("missing", "identical", "tied")  # why a pair says nothing; the first that holds


class Labels(NamedTuple):
    """One pair of each prompt.

    Attributes:
      numbers: [P, 2], of the chosen completion in its group and of the rejected one.
      win_rates: [P], how probably the chosen one beats the other; ½ where that is not known.
      gaps: [P], by how much its reward is higher; NaN where one is missing.
      kinds: [P], of KINDS, or "compared".
      kept: [P], whether the pair is trained on.
    """

    numbers: np.ndarray
    win_rates: np.ndarray
    gaps: np.ndarray
    kinds: np.ndarray
    kept: np.ndarray


def label(config: Any, found: Experience) -> Labels:
    """The best and the worst completion of each prompt by reward, less `stop_penalty`.

    Of equals the first is called better.
    """
    values = found.rewards - config.stop_penalty * found.truncated
    order = np.argsort(-values, axis=1, kind="stable")  # those without a reward come last
    judged = np.sum(~np.isnan(values), axis=1)
    ends = np.stack([np.zeros_like(judged), np.maximum(judged - 1, 1)], axis=1)
    numbers = np.take_along_axis(order, ends, axis=1)
    best, worst = np.take_along_axis(values, numbers, axis=1).T
    same, gaps = identical(found, numbers), best - worst
    kinds = np.select([judged < 2, same, gaps == 0], KINDS, "compared")
    rates = np.where(np.isin(kinds, KINDS), 0.5, win_rates(config, np.nan_to_num(gaps)))
    kept = (kinds != "missing") if config.keeps_ties else (kinds == "compared")
    return Labels(numbers, rates.astype(np.float32), gaps, kinds, kept)


def win_rates(config: Any, gaps: np.ndarray) -> np.ndarray:
    """P that the first of two wins, of the difference of their rewards.

    A judge's rewards are how often each won, P and 1 − P.
    """
    if config.judge is not None:
        return np.clip(0.5 + gaps / 2, 0.0, 1.0)
    if config.win_rates == "hard":
        return 0.5 + np.sign(gaps) / 2
    return 0.5 * (1.0 + np.tanh(0.5 * config.win_rate_scale * gaps))


def identical(found: Experience, numbers: np.ndarray) -> np.ndarray:
    """[P], whether the two completions are the same tokens."""
    first, second = (taken(found, numbers[:, side : side + 1]).rollout for side in (0, 1))
    return np.all(first.tokens == second.tokens, axis=1) & (first.lengths == second.lengths)


def taken(found: Experience, numbers: np.ndarray) -> Experience:
    """Some completions of each prompt, by their `numbers` [P, n] in its group."""
    places = np.arange(len(numbers))[:, None] * found.completions + numbers
    rows = places.ravel().tolist()
    return Experience(
        found.prompts,
        Rollout(*(field[rows] for field in found.rollout)),
        [found.texts[row] for row in rows],
        [found.scored[row] for row in rows],
        found.staleness[rows],
    )


def counts(labels: Labels) -> dict[str, float]:
    """How many pairs are trained on, how many say nothing and why, and the mean gap of rewards."""
    kept = labels.gaps[labels.kept]
    return {
        "pairs/kept": float(len(kept)),
        **{f"pairs/{kind}": float(np.sum(labels.kinds == kind)) for kind in KINDS},
        "pairs/reward_gap": float(np.mean(kept)) if len(kept) else 0.0,
    }


def sides_of(labels: Labels, completions: int) -> list[str]:
    """What each completion [P · G] is: chosen, rejected, unused, or why its pair says nothing."""
    out = np.full((len(labels.kinds), completions), "unused", dtype=object)
    kinds = labels.kinds[:, None]
    sides = np.where(kinds == "compared", ("chosen", "rejected"), kinds)
    np.put_along_axis(out, labels.numbers, sides.astype(object), axis=1)
    return out.ravel().tolist()
