"""Completions as text: all at once for evaluation, or in pieces as they come for the terminal."""

from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np

from jaxpost.models.model import Model
from jaxpost.rollout import text
from jaxpost.rollout.sampler import Capacity, Rollout, Settings, blocks, check_prompt
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
    sampled = blocks(
        model,
        params,
        prompts,
        key,
        settings,
        sample_ids=[0],
        tokenizer=tokenizer,
        capacity=Capacity(),
        block=STREAM_BLOCK,
        watched=True,
    )
    shown = 0
    for rollout, finished in sampled:
        ready = text_of(rollout, 0, tokenizer, settings)
        if not finished:
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

    Prompts of like length are sampled together, `batch_size` at a time, and each draws by its
    index, so the texts do not depend on `batch_size`. A stop string or stop id (by default the
    tokenizer's `eos_ids`) is no part of the text. Without a `key`, `jax.random.key(0)` is used.

    Raises:
      ValueError: as `sample`.
    """
    ends = tuple(sorted(tokenizer.eos_ids if stop_ids is None else stop_ids))
    settings = Settings(max_new_tokens, temperature, top_k, top_p, min_p, ends, tuple(stop_strings))
    key = jax.random.key(0) if key is None else key
    ids = [np.array(text.prompt_ids(tokenizer, prompt), np.int32) for prompt in prompts]
    for row, prompt in enumerate(ids):
        check_prompt(model, row, prompt, max_new_tokens)
    size = min(batch_size, len(ids))
    capacity = Capacity(size, size, max(map(len, ids), default=1), max_new_tokens)
    order = sorted(range(len(ids)), key=lambda index: (len(ids[index]), index))
    texts = [""] * len(ids)
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        rows = [ids[index] for index in batch]
        *_, (rollout, _) = blocks(model, params, rows, key, settings, batch, tokenizer, capacity)
        for row, index in enumerate(batch):
            texts[index] = text_of(rollout, row, tokenizer, settings)
    return texts


def text_of(rollout: Rollout, row: int, tokenizer: text.Tokenizer, settings: Settings) -> str:
    """The text of a completion, without its stop id or stop string."""
    ids = rollout.tokens[row, : rollout.lengths[row]].tolist()
    found = tokenizer.decode(text.without_stop_id(ids, settings.stop_ids))
    return text.before(found, settings.stop_strings)
