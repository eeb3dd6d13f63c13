"""Choosing among the N completions of a prompt: what n of them are worth, by every way to choose.

Each number is an expectation over the C(N, n) subsets of n, so it uses all N completions and is
unbiased for n fresh ones. It is exact, but for weighted votes over many subsets. `values` is what a
completion is worth (1 where it is right), `scores` what it is chosen by, both [N]; `answers` [N]
numbers the different final answers, −1 where a completion has none. Completions are drawn alike, so
their order is chance: where several are equal for the chooser, their mean counts. NumPy, float64.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

MOST = 1024  # completions: C(1024, 512) is the largest such number that float64 holds
CLOSE = 1e-9  # sums of scores this near, as a share, are equal


def sizes(most: int) -> list[int]:
    """1, 2, 4, … up to `most`, and `most` itself."""
    doubled = itertools.takewhile(lambda n: n < most, (1 << power for power in itertools.count()))
    return [*doubled, most]


def chances(count: int, n: int) -> np.ndarray:
    """[count]: how probably the r-th best of all is the best of n, C(N−1−r, n−1) / C(N, n)."""
    ways = math.comb(count, n)
    return np.array([math.comb(count - 1 - r, n - 1) / ways for r in range(count)])


def best_of(scores: np.ndarray, values: np.ndarray, n: int) -> float:
    """The value of the completion with the highest score of n; a NaN score is the lowest."""
    known = np.where(np.isnan(scores), -np.inf, scores)
    order = np.argsort(-known, kind="stable")
    ranked, worth = known[order], np.asarray(values, float)[order]
    equals = np.cumsum(np.concatenate([[False], ranked[1:] != ranked[:-1]]))
    means = np.bincount(equals, worth) / np.bincount(equals)
    return float(chances(len(ranked), n) @ means[equals])


def pass_at(right: np.ndarray, n: int) -> float:
    """Whether any of n is right: 1 − C(N − c, n) / C(N, n), c of N being so (arXiv 2107.03374)."""
    count, wrong = len(right), int(np.sum(~np.asarray(right, bool)))
    return 1.0 - math.comb(wrong, n) / math.comb(count, n)


def majority(answers: np.ndarray, values: np.ndarray, n: int) -> float:
    """The value of the answer that most of n give (self-consistency, arXiv 2203.11171).

    An answer's value is the mean over its completions; those without an answer have no vote, and
    where nobody votes it is 0. Subsets are counted by how many votes the winner has, m, and among
    how many answers t it is tied: `ways[k, t]` of k completions, and `worth[k, t]`, the values of
    the tied answers summed over these.
    """
    counts, means = ballots(answers, values)
    total, silent = 0.0, len(answers) - sum(counts)
    for m in range(1, min(n, max(counts, default=0)) + 1):
        ways = np.zeros((n + 1, n // m + 2))
        ways[:, 0] = [math.comb(silent, k) for k in range(n + 1)]
        worth = np.zeros_like(ways)
        for count, mean in zip(counts, means, strict=True):
            ways, worth = with_answer(ways, worth, count, mean, m)
        total += float(np.sum(worth[n, 1:] / np.arange(1, worth.shape[1])))
    return total / math.comb(len(answers), n)


def with_answer(
    ways: np.ndarray, worth: np.ndarray, count: int, mean: float, m: int
) -> tuple[np.ndarray, np.ndarray]:
    """The tables of `majority` with one answer more, which `count` completions give."""
    more, gained = np.zeros_like(ways), np.zeros_like(ways)
    for votes in range(min(count, m - 1, len(ways) - 1) + 1):  # it loses
        factor, rest = float(math.comb(count, votes)), len(ways) - votes
        more[votes:] += factor * ways[:rest]
        gained[votes:] += factor * worth[:rest]
    if count >= m:  # it wins, with those that already do
        factor = float(math.comb(count, m))
        more[m:, 1:] += factor * ways[:-m, :-1]
        gained[m:, 1:] += factor * (worth[:-m, :-1] + mean * ways[:-m, :-1])
    return more, gained


def weighted(
    answers: np.ndarray, weights: np.ndarray, values: np.ndarray, chosen: np.ndarray
) -> float:
    """The value of argmax_a Σ_{i: answer i is a} w_i, a mean over subsets `chosen` [S, n].

    Weighted self-consistency (Math-Shepherd's verification, arXiv 2312.08935). The weights are 0 or
    more; NaN counts as 0. Answers whose sums are equal share the vote.

    Raises:
      ValueError: a weight is negative, which would take votes away from its answer.
    """
    weights = np.where(np.isnan(weights), 0.0, weights)
    if np.min(weights, initial=0.0) < 0:
        raise ValueError(f"a vote weighs {np.min(weights):g}; weights are 0 or more")
    counts, means = ballots(answers, values)
    if not counts:
        return 0.0
    numbers = np.unique(answers[answers >= 0], return_inverse=True)[1]
    place = np.full(len(answers), len(counts))  # of those without an answer: a column put away
    place[answers >= 0] = numbers
    sums, given = (np.zeros((len(chosen), len(counts) + 1)) for _ in range(2))
    rows = np.arange(len(chosen))[:, None]
    np.add.at(sums, (rows, place[chosen]), weights[chosen])
    np.add.at(given, (rows, place[chosen]), 1.0)
    sums = np.where(given > 0, sums, -np.inf)[:, :-1]
    top = np.max(sums, axis=1, keepdims=True)
    wins = np.isfinite(top) & (sums >= top - CLOSE * np.abs(np.where(np.isfinite(top), top, 0.0)))
    return float(np.mean((wins @ np.array(means)) / np.maximum(wins.sum(1), 1)))


def ballots(answers: np.ndarray, values: np.ndarray) -> tuple[list[int], list[float]]:
    """How many completions give each answer, and the mean of what they are worth."""
    there = answers >= 0
    numbers = np.unique(answers[there], return_inverse=True)[1]
    counts = np.bincount(numbers)
    means = np.bincount(numbers, np.asarray(values, float)[there]) / np.maximum(counts, 1)
    return counts.tolist(), means.tolist()


def subsets(count: int, n: int, most: int, seed: Sequence[int]) -> np.ndarray:
    """[S, n]: all subsets of n if there are at most `most`, else `most` random ones."""
    if math.comb(count, n) <= most:
        return np.array(list(itertools.combinations(range(count), n)))
    random = np.random.default_rng(seed)
    return np.argsort(random.random((most, count)), axis=1)[:, :n]
