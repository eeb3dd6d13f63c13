"""What judges completions in RL: reward functions, a reward model, or both; or a judge of pairs.

R = R_verifier + λ · σ(r), with r the reward model's score and λ = `reward.model_weight` below 1, so
that no wrong answer that people like beats a right one (`rewards.combine`). A reward model alone
gives r itself. Functions run in processes while the device samples; the model scores a group when
the rollout waits for its rewards.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import hub, rewards
from jaxpost.batch import Example
from jaxpost.data import chat, tokenizers
from jaxpost.data.rows import CompletionRow, Dropped, Noted, PromptRow
from jaxpost.models import heads
from jaxpost.rollout import shapes
from jaxpost.typing import Array, Params

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
            yield Judge(functions, RewardModel(config.model), config.model_weight)


class Judge:
    """Rewards of functions, if there are any, and of a reward model."""

    def __init__(self, functions: Scorer | None, model: "RewardModel", weight: float):
        self._functions, self._model, self._weight = functions, model, weight

    def submit(self, items: Sequence[rewards.Item]) -> "Judged":
        """Hands the items to the functions; the model's turn comes with `result`."""
        functions = None if self._functions is None else self._functions.submit(items)
        return Judged(items, functions, self._model, self._weight)


class Judged(NamedTuple):
    """Items that functions are judging."""

    items: Sequence[rewards.Item]
    functions: Scores | None
    model: "RewardModel"
    weight: float

    def result(self) -> list[rewards.Scored]:
        """One an item. What a function could not judge stays without a reward."""
        values = self.model(self.items).tolist()
        if self.functions is None:
            return [alone(self.weight * value) for value in values]
        found = self.functions.result()
        return [with_model(one, r, self.weight) for one, r in zip(found, values, strict=True)]


def alone(value: float) -> rewards.Scored:
    """The model's score as the reward; NaN where a conversation is too long for it."""
    if math.isnan(value):
        return rewards.Scored(math.nan, {}, "too long for the reward model", NAME)
    return rewards.Scored(value, {NAME: value}, "", None)


def with_model(one: rewards.Scored, value: float, weight: float) -> rewards.Scored:
    """R_verifier + λ σ(r)."""
    if math.isnan(value):
        return rewards.Scored(math.nan, one.parts, "too long for the reward model", NAME)
    human = 0.5 * (1.0 + math.tanh(0.5 * value))
    parts = {**one.parts, NAME: value}
    return rewards.Scored(one.value + weight * human, parts, one.reason, one.failure)


class RewardModel:
    """A reward model from its folder: items → [n], the reward of each conversation."""

    def __init__(self, path: str):
        self._model, self._params, self._head = hub.load_reward_model(path)
        self._tokenizer = tokenizers.load_tokenizer(path)
        self._score = self._make_score()

    def _make_score(self) -> Callable[[Params, Params, Array, Array], Array]:
        @jax.jit
        def score(params: Params, head: Params, tokens: Array, lengths: Array) -> Array:
            places = jnp.arange(tokens.shape[1])
            segments = (places < lengths[:, None]).astype(jnp.int32)
            positions = jnp.where(segments, places, 0)
            hidden = self._model.apply(params, tokens, segments, positions, None)
            last = jnp.maximum(lengths - 1, 0)[:, None, None]
            return heads.reward(head, jnp.take_along_axis(hidden, last, axis=1)[:, 0])

        return score

    def __call__(self, items: Sequence[rewards.Item]) -> np.ndarray:
        """[n], NaN for a conversation that the model has no room for."""
        rows = [self.tokens_of(item) for item in items]
        most = self._model.config.max_positions
        fitting = [row if len(row) <= most else row[:0] for row in rows]
        width = min(shapes.bucket_length(max(map(len, fitting), default=1)), most)
        tokens, lengths = shapes.padded(fitting, shapes.bucket(len(rows)), width)
        found = self._score(self._params, self._head, jnp.asarray(tokens), jnp.asarray(lengths))
        return np.where(lengths > 0, np.asarray(found), np.nan)[: len(rows)]

    def tokens_of(self, item: rewards.Item) -> np.ndarray:
        """The conversation as the reward model was trained on such: to the end of its last turn."""
        said: str | list = item.completion
        prompt = item.prompt if isinstance(item.prompt, str) else list(item.prompt)
        if not isinstance(prompt, str):
            said = [{"role": "assistant", "content": item.completion}]
        row = CompletionRow(prompt, said, where="a completion")
        options = chat.ChatOptions(reasoning_open="")
        found = chat.Tokenize(self._tokenizer, options, self._model.config.vocab_size)(row)
        if isinstance(found, Dropped):  # it says nothing: the prompt and an end
            asked = chat.prompt_ids(PromptRow(prompt), self._tokenizer, options)
            return np.asarray([*asked, *sorted(self._tokenizer.eos_ids)[:1]], np.int32)
        example = found.example if isinstance(found, Noted) else found
        assert isinstance(example, Example)
        return np.asarray(example.tokens, np.int32)
