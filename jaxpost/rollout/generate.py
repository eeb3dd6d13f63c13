"""Completions as text: all at once for evaluation, or in pieces as they come for the terminal."""

from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from jaxpost.models.model import Model
from jaxpost.rollout import sampler, text
from jaxpost.rollout.settings import Settings
from jaxpost.typing import Array, Params

STREAM_BLOCK = 4  # tokens decoded between two pieces


def stream(
    model: Model,
    params: Params,
    tokenizer: text.Tokenizer,
    prompt: str | text.Ids,
    key: Array,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: Collection[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[str]:
    """The completion of one prompt in pieces of text, as they come: what `sample` gives for it.

    Incomplete characters, and text that may yet become a stop string, are held back; a stop string
    or stop id (by default the tokenizer's `eos_ids`) is no part of the text.

    Raises:
      ValueError: as `sample`, when the first piece is asked for.
    """
    ends = tuple(sorted(tokenizer.eos_ids if stop_ids is None else stop_ids))
    settings = Settings(max_new_tokens, temperature, top_k, top_p, min_p, ends, tuple(stop_strings))
    prompts = [np.array(text.prompt_ids(tokenizer, prompt), np.int32)]
    running, _ = sampler.start(
        model, params, prompts, key, settings, None, None, None, None, tokenizer, None
    )
    running.fill()
    shown = 0
    while running.running():
        running.advance(block=STREAM_BLOCK)
        ended = running.collect()
        (one,) = ended or running.so_far()
        ready = text_of(one.tokens, tokenizer, settings)
        if not ended:
            ready = text.settled(ready, stop_strings)
        if len(ready) > shown:
            yield ready[shown:]
            shown = len(ready)


def generate_text(
    model: Model,
    params: Params,
    tokenizer: text.Tokenizer,
    prompts: Sequence[str | text.Ids],
    key: Array | None = None,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: Collection[int] | None = None,
    stop_strings: Sequence[str] = (),
    batch_size: int = 32,
) -> list[str]:
    """The completion of each prompt as text, in the order of the prompts; greedy by default.

    `batch_size` sequences are decoded at once, and each draws by its index, so the texts do not
    depend on it. A stop string or stop id (by default the tokenizer's `eos_ids`) is no part of
    the text. Without a `key`, `jax.random.key(0)` is used.

    Raises:
      ValueError: as `sample`.
    """
    ends = tuple(sorted(tokenizer.eos_ids if stop_ids is None else stop_ids))
    settings = Settings(max_new_tokens, temperature, top_k, top_p, min_p, ends, tuple(stop_strings))
    if not prompts:
        return []
    ids = [text.prompt_ids(tokenizer, prompt) for prompt in prompts]
    rollout = sampler.sample(
        model,
        params,
        ids,
        jax.random.key(0) if key is None else key,
        max_new_tokens=max_new_tokens,
        slots=batch_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop_ids=ends,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )
    pairs = zip(rollout.tokens, rollout.lengths, strict=True)
    return [text_of(tokens[:length], tokenizer, settings) for tokens, length in pairs]


def text_of(tokens: np.ndarray, tokenizer: text.Tokenizer, settings: Settings) -> str:
    """The text of a completion, without its stop id or stop string."""
    found = tokenizer.decode(text.without_stop_id(tokens.tolist(), settings.stop_ids))
    return text.before(found, settings.stop_strings)
