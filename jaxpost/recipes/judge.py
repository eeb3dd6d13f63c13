"""What judges completions in RL: reward functions, a model, or both; or a judge of pairs.

R = R_verifier + λ · s, with s the model's score between 0 and 1 (σ(r) of a reward model's r) and
λ = `reward.model_weight` below 1, so that no wrong answer that people like beats a right one
(`rewards.combine`). A model alone gives its score as it is (`scoring`). Functions run in processes
while the device samples; the model scores a group when the rollout waits for its rewards.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jaxpost import rewards
from jaxpost.recipes import scoring

NAME = "reward_model"  # of its part in what is logged, and of its failures


@runtime_checkable
class Scores(Protocol):
    """Rewards that are on their way."""

    def result(self) -> list[rewards.Scored]: ...


@runtime_checkable
class Scorer(Protocol):
    """What takes completions and gives their rewards later."""

    def submit(self, items: Sequence[rewards.Item]) -> Scores: ...


@contextlib.contextmanager
def opened(config: rewards.RewardConfig | rewards.JudgeConfig) -> Iterator[Scorer]:
    """The scorer that a configuration describes; its processes end with the context."""
    with contextlib.ExitStack() as stack:
        if isinstance(config, rewards.JudgeConfig):
            yield stack.enter_context(rewards.Duels(config))
            return
        functions = None
        if config.function is not None:
            functions = stack.enter_context(rewards.Scorer(config))
        if config.model is None:
            assert functions is not None  # RewardConfig sees to one of the two
            yield functions
        else:
            yield Judge(functions, scoring.opened(config), config.model_weight)


class Judge:
    """Rewards of functions, if there are any, and of a model."""

    def __init__(self, functions: Scorer | None, model: scoring.ScoringModel, weight: float):
        self._functions, self._model, self._weight = functions, model, weight

    def submit(self, items: Sequence[rewards.Item]) -> "Judged":
        """Hands the items to the functions; the model's turn comes with `result`."""
        functions = None if self._functions is None else self._functions.submit(items)
        return Judged(items, functions, self._model, self._weight)


class Judged(NamedTuple):
    """Items that functions are judging."""

    items: Sequence[rewards.Item]
    functions: Scores | None
    model: scoring.ScoringModel
    weight: float

    def result(self) -> list[rewards.Scored]:
        """One an item. What a function could not judge stays without a reward."""
        values = self.model(self.items).tolist()
        if self.functions is None:
            return [alone(self.weight * value) for value in values]
        found = self.functions.result()
        return [self.added(*pair) for pair in zip(found, values, strict=True)]

    def added(self, one: rewards.Scored, value: float) -> rewards.Scored:
        """R_verifier + λ s."""
        if math.isnan(value):
            return alone(value)._replace(parts=one.parts)
        total = one.value + self.weight * self.model.unit(value)
        return rewards.Scored(total, {**one.parts, NAME: value}, one.reason, one.failure)


def alone(value: float) -> rewards.Scored:
    """The model's score as the reward; NaN where a conversation is too long for it."""
    if math.isnan(value):
        return rewards.Scored(math.nan, {}, "too long for the reward model", NAME)
    return rewards.Scored(value, {NAME: value}, "", None)
