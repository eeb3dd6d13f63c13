"""Completions to be judged, by the reward and by the scorer, and what comes of it."""

import collections
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxpost import config as configs
from jaxpost import rewards
from jaxpost.commands.candidates.settings import Settings
from jaxpost.data import prompts
from jaxpost.data.rows import PromptRow
from jaxpost.recipes import judge

TOGETHER = 64  # completions in one call of a scorer


class Asked(NamedTuple):
    """A row of DATA; `prompt` has no tokens where nothing is drawn."""

    row: PromptRow
    prompt: prompts.Prompt


class Candidates(NamedTuple):
    """N completions of a prompt.

    Attributes:
      texts, cut: [N], and whether each ended because it was long.
      rewards, scores: [N], NaN where there is none.
      reasons: [N], why one is missing, or "".
    """

    asked: Asked
    texts: Sequence[str]
    cut: Sequence[bool]
    rewards: np.ndarray
    scores: np.ndarray
    reasons: Sequence[str]


Part = Iterable[tuple[Asked, list[rewards.Item]]]  # of a part of the prompts, as they are done


@contextlib.contextmanager
def judges_of(settings: Settings) -> Iterator[list[judge.Scorer]]:
    """The reward and the scorer, if there is one. Raises ConfigError where one cannot be used."""
    with contextlib.ExitStack() as stack:
        found = []
        for name in ("reward", "scorer"):
            config = getattr(settings, name)
            if config is None:
                continue
            try:
                found.append(stack.enter_context(judge.opened(config)))
            except rewards.RewardError as error:
                raise configs.ConfigError(f"{name}: {error}") from error
        yield found


def judged(part: Part, judges: Sequence[judge.Scorer]) -> list[Candidates]:
    """The completions of a part, each handed to the judges as soon as it is there."""
    waiting = [(asked, items, [submitted(one, items) for one in judges]) for asked, items in part]
    return [
        candidates(
            asked, items, [[one for p in several for one in p.result()] for several in pending]
        )
        for asked, items, pending in waiting
    ]


def submitted(scorer: judge.Scorer, items: Sequence[rewards.Item]) -> list[judge.Scores]:
    """A prompt's completions, some at a time: a reward model has room for so many."""
    parts = range(0, len(items), TOGETHER)
    return [scorer.submit(items[first : first + TOGETHER]) for first in parts]


def candidates(
    asked: Asked, items: Sequence[rewards.Item], found: Sequence[Sequence[rewards.Scored]]
) -> Candidates:
    """Items with what the reward says, and the scorer, if there is one."""
    names = ("reward", "scorer")
    values = [np.array([one.value for one in column]) for column in found]
    reasons = [
        next(
            (
                f"{name}: {one.failure}"
                for name, one in zip(names, row, strict=False)
                if one.failure
            ),
            "",
        )
        for row in zip(*found, strict=True)
    ]
    return Candidates(
        asked,
        [item.completion for item in items],
        [item.truncated for item in items],
        values[0],
        values[-1],
        reasons,
    )


def tell_missing(found: Sequence[Candidates]) -> None:
    """Says on standard error how many completions have no reward or score, and why."""
    reasons = collections.Counter(reason for one in found for reason in one.reasons if reason)
    if reasons:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(reasons.items()))
        count = sum(len(one.texts) for one in found)
        print(f"missing for {reasons.total()} of {count} completions: {kinds}", file=sys.stderr)
