"""Models that score completions: items → [n], NaN where a model has no room for one.

A reward model gives any number; `unit` brings it between 0 and 1. The score of a process reward
model lies there: what `reward.steps` makes of the probabilities that its steps are right, read
after each of them. So does that of a generative verifier: the probability that it answers yes. A
completion that says nothing has the lowest score of both, 0.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import hub, rewards
from jaxpost.batch import Example
from jaxpost.data import chat, preference_tokens, questions, tokenizers
from jaxpost.data.rows import CompletionRow, Dropped, Noted, PromptRow, StepsRow
from jaxpost.data.trajectories import steps
from jaxpost.models import heads
from jaxpost.models.model import Model
from jaxpost.rollout import shapes
from jaxpost.typing import Array, Params

Read = Callable[[Params, Array, Array], Array]  # (params, hidden [B, T, D], lengths [B]) → [B, …]

# What makes one score of the probabilities of a solution's steps: that of the weakest, that all are
# right were they independent (both arXiv 2305.20050), that of the last, which has seen all.
OF_STEPS: Mapping[str, Callable[[np.ndarray], float]] = {
    "min": lambda right: float(np.min(right)),
    "product": lambda right: float(np.prod(right)),
    "last": lambda right: float(right[-1]),
    "mean": lambda right: float(np.mean(right)),
}


@runtime_checkable
class ScoringModel(Protocol):
    """A model that scores completions after their prompts."""

    def __call__(self, items: Sequence[rewards.Item]) -> np.ndarray: ...
    def unit(self, score: float) -> float: ...


def opened(config: rewards.RewardConfig) -> ScoringModel:
    """The model in the folder `reward.model`.

    Raises:
      FileNotFoundError, ValueError: there is none, or none that scores; a key that is not for it.
    """
    assert config.model is not None  # who calls this has seen to it
    kind = hub.kind_of(config.model)
    if kind == "process_reward_model":
        return ProcessRewardModel(config.model, config.steps or "min")
    if config.steps is not None:
        raise ValueError(
            f"reward.steps is {config.steps}, and {config.model} is no process reward model, which "
            "alone scores steps; remove it"
        )
    return Verifier(config.model) if kind == questions.KIND else RewardModel(config.model)


class RewardModel:
    """A reward model from its folder: the reward of each conversation."""

    def __init__(self, path: str):
        self._model, params, head = hub.load_reward_model(path)
        self._params = {"model": params, "head": head}
        self._tokenizer = tokenizers.load_tokenizer(path)
        self._score = make_score(self._model, reward_at_end)

    def __call__(self, items: Sequence[rewards.Item]) -> np.ndarray:
        """[n], NaN for a conversation that the model has no room for."""
        found, lengths = self._score(self._params, [self.tokens_of(item) for item in items])
        return np.where(lengths > 0, found, np.nan)

    def unit(self, score: float) -> float:
        """σ(r)."""
        return float(sigmoid(np.float64(score)))

    def tokens_of(self, item: rewards.Item) -> np.ndarray:
        """The conversation as the reward model was trained on such: to the end of its last turn."""
        said: str | list = item.completion
        prompt = prompt_of(item)
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


class ProcessRewardModel:
    """A process reward model from its folder: one score of all the steps of a completion."""

    def __init__(self, path: str, how: str):
        self._model, params, head = hub.load_process_reward_model(path)
        self._params = {"model": params, "head": head}
        self._separator, self._how = hub.step_separator(path), OF_STEPS[how]
        self._judge = preference_tokens.Judge(
            tokenizers.load_tokenizer(path),
            self._model.config.max_positions,
            "drop",
            "error",
            vocab_size=self._model.config.vocab_size,
            separator=self._separator,
        )
        self._score = make_score(self._model, logits_everywhere)

    def __call__(self, items: Sequence[rewards.Item]) -> np.ndarray:
        """[n], NaN for a completion that the model has no room for."""
        return np.array([self._how(right) if len(right) else 0.0 for right in self.of_steps(items)])

    def unit(self, score: float) -> float:
        """It is a probability, or a mean of some."""
        return score

    def of_steps(self, items: Sequence[rewards.Item]) -> list[np.ndarray]:
        """The probability that each step is right, in float64; a NaN where there is no room."""
        said = [steps.split(item.completion, self._separator) for item in items]
        read = [self._example(item, each) for item, each in zip(items, said, strict=True)]
        found, _ = self._score(self._params, [one.tokens if one else () for one in read])
        right = sigmoid(np.asarray(found, np.float64))
        nothing = [np.full(min(len(each), 1), np.nan) for each in said]
        return [
            right[row, np.flatnonzero(one.mask)] if one else nothing[row]
            for row, one in enumerate(read)
        ]

    def _example(self, item: rewards.Item, said: Sequence[str]) -> Example | None:
        """The tokens, marked where steps end; None without steps, or without room for them."""
        if not said:
            return None
        row = StepsRow(prompt_of(item), said, [1.0] * len(said), where="a completion")
        found = self._judge.judged(row, 0, [])
        return None if isinstance(found, Dropped) else found.examples[0]


class Verifier:
    """A generative verifier from its folder: how probably it answers that a completion is right."""

    def __init__(self, path: str):
        self._model, params = hub.load_model(path)
        self._params = {"model": params}
        self._tokenizer = tokenizers.load_tokenizer(path)
        self._question = questions.from_note(hub.note_of(path), self._tokenizer, path)
        self._answers = self._question.answer_ids(self._tokenizer)
        self._score = make_score(self._model, self._difference)

    def __call__(self, items: Sequence[rewards.Item]) -> np.ndarray:
        """[n], NaN for a question that the model has no room for."""
        said = np.array([bool(item.completion.strip()) for item in items])
        found, lengths = self._score(self._params, [self.tokens_of(item) for item in items])
        right = np.where(said, sigmoid(np.asarray(found, np.float64)), 0.0)
        return np.where(lengths > 0, right, np.nan)

    def unit(self, score: float) -> float:
        """It is a probability."""
        return score

    def tokens_of(self, item: rewards.Item) -> list[int]:
        """The question, up to its answer."""
        return self._question.tokens(self._tokenizer, prompt_of(item), item.completion)

    def _difference(self, params: Params, hidden: Array, lengths: Array) -> Array:
        """[B]: l_yes − l_no of the token after the question."""
        logits = self._model.unembed(params["model"], at_end(hidden, lengths))
        return logits[:, self._answers[0]] - logits[:, self._answers[1]]


def prompt_of(item: rewards.Item) -> str | list:
    return item.prompt if isinstance(item.prompt, str) else list(item.prompt)


def sigmoid(z: Any) -> Any:
    return 0.5 * (1.0 + np.tanh(0.5 * z))


def make_score(
    model: Model, read: Read
) -> Callable[[Params, Sequence[Any]], tuple[np.ndarray, np.ndarray]]:
    """`(params, rows of tokens) -> (what `read` makes of their states [n, …], their lengths [n])`.

    A row that the model has no room for counts as one of no tokens.
    """

    @jax.jit
    def score(params: Params, tokens: Array, lengths: Array) -> Array:
        places = jnp.arange(tokens.shape[1])
        segments = (places < lengths[:, None]).astype(jnp.int32)
        positions = jnp.where(segments, places, 0)
        return read(
            params, model.apply(params["model"], tokens, segments, positions, None), lengths
        )

    def run(params: Params, rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
        most = model.config.max_positions
        fitting = [row if len(row) <= most else () for row in rows]
        width = min(shapes.bucket_length(max(map(len, fitting), default=1)), most)
        tokens, lengths = shapes.padded(fitting, shapes.bucket(len(rows)), width)
        found = np.asarray(score(params, jnp.asarray(tokens), jnp.asarray(lengths)))
        return found[: len(rows)], lengths[: len(rows)]

    return run


def at_end(hidden: Array, lengths: Array) -> Array:
    """[B, D]: the state after the last token."""
    return jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]


def reward_at_end(params: Params, hidden: Array, lengths: Array) -> Array:
    """[B]: the reward after the last token."""
    return heads.reward(params["head"], at_end(hidden, lengths))


def logits_everywhere(params: Params, hidden: Array, lengths: Array) -> Array:
    """[B, T]: what is read of a step that ends here."""
    return heads.read(params["head"], hidden)
