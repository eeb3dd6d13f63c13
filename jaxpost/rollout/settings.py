"""How a call samples, and what it refuses."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpost import sampling
from jaxpost.models.model import Model
from jaxpost.rollout.slots import Rules
from jaxpost.rollout.text import Ids, Tokenizer


class Settings(NamedTuple):
    """How tokens are drawn and where a completion ends."""

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def rules(self) -> Rules:
        def number(value: float | None) -> Any:
            return None if value is None else np.float32(value)

        temperature = None if sampling.is_greedy(self.temperature) else number(self.temperature)
        stop_ids: Any = np.array(self.stop_ids, np.int32)
        return Rules(temperature, number(self.top_p), number(self.min_p), stop_ids)


def rows_of(prompts: Sequence[Ids] | np.ndarray, lengths: Ids | None) -> list[np.ndarray]:
    """The prompts without their padding."""
    if lengths is None:
        if isinstance(prompts, np.ndarray | jax.Array):
            raise ValueError(
                "prompts in an array are padded, so say how long they are: lengths=[...]"
            )
        return [np.asarray(prompt, np.int32) for prompt in prompts]
    if len(lengths) != len(prompts):
        raise ValueError(f"{len(lengths)} lengths were given for {len(prompts)} prompts")
    pairs = zip(prompts, lengths, strict=True)
    return [np.asarray(prompt, np.int32)[:length] for prompt, length in pairs]


def check(
    model: Model,
    prompts: Sequence[np.ndarray],
    settings: Settings,
    tokenizer: Tokenizer | None,
) -> None:
    """Raises ValueError for what cannot be sampled; see `sample`."""
    sampling.check_settings(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    if settings.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {settings.max_new_tokens}; it must be 0 or more")
    if settings.stop_strings and tokenizer is None:
        raise ValueError("stop_strings are looked for in text: give the tokenizer= that decodes it")
    if "" in settings.stop_strings:
        raise ValueError("a stop string is empty: it would end every completion; leave it out")
    if not prompts:
        raise ValueError("there are no prompts to complete")
    for row, prompt in enumerate(prompts):
        check_prompt(model, row, prompt, settings.max_new_tokens)


def check_prompt(model: Model, row: int, prompt: np.ndarray, max_new_tokens: int) -> None:
    most, vocab_size = model.config.max_positions, model.config.vocab_size
    if len(prompt) == 0:
        raise ValueError(f"prompt {row} is empty; give it at least one token, such as BOS")
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        outside = next(int(token) for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"prompt {row} holds token {outside}; the vocabulary has {vocab_size}")
    if len(prompt) + max_new_tokens > most:
        left = most - len(prompt)
        way_out = f"max_new_tokens can be {left}" if left > 0 else "shorten the prompt"
        raise ValueError(
            f"prompt {row} has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}: "
            f"{len(prompt) + max_new_tokens} positions, over the model's {most}; {way_out}"
        )


def counted(name: str, values: Ids | None, default: Sequence[int], most: int | None = None) -> Ids:
    """One number a prompt: those given, or the default ones."""
    if values is None:
        return default
    if len(values) != len(default):
        raise ValueError(f"{len(values)} {name} were given for {len(default)} prompts")
    if most is not None and not all(0 <= value <= most for value in values):
        outside = next(int(value) for value in values if not 0 <= value <= most)
        raise ValueError(f"{name} has {outside}; each must be from 0 to max_new_tokens ({most})")
    return values
