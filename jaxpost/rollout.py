"""Sampling from the trainer's own parameters: prefill, decode, stop.

The sampler's state is one pytree with a slot a sequence (`Slots`). `prefill` fills the slots,
`advance` decodes a block of tokens and returns as soon as every slot is done; both are jitted, and
both see only bucketed shapes, so that nothing is compiled again after warm-up. A slot's draws
depend on its own key and position alone: not on its batch, its slot, or its padding.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpost import sampling
from jaxpost.models.model import Cache, Model
from jaxpost.typing import Array, Params

STOP, LENGTH, STRING = 0, 1, 2  # why a completion ended
REASONS = ("stop", "length", "stop_string")
BLOCK = 16  # tokens decoded between two looks at the text
SMALLEST = 32  # the least number of cache slots


class Decoder(Protocol):
    """What is needed of a tokenizer here."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Sampler(NamedTuple):
    """How tokens are drawn and where a completion ends (static)."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_ids: tuple[int, ...] = ()


class Rollout(NamedTuple):
    """Completions [B, N], padded with 0 after their end.

    Attributes:
      tokens: the sampled ids, the stop id included.
      logps: log-probabilities (nats) in the distribution sampled from; 0 outside `mask`.
      mask: True on the completion, its stop id included, nothing after it.
      lengths: tokens of each completion.
      stop_reasons: STOP, LENGTH or STRING.
    """

    tokens: np.ndarray
    logps: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    stop_reasons: np.ndarray


class Slots(NamedTuple):
    """The sampler's state: a slot a sequence.

    Attributes:
      cache: keys and values of what was read.
      logits: [B, V] of the next token.
      positions: [B], tokens read so far.
      lengths: [B], tokens sampled so far.
      limits: [B], tokens to sample at most.
      done: [B].
      keys: [B], each sequence's own.
      tokens, logps: [B, N], what was sampled.
    """

    cache: Cache
    logits: Array
    positions: Array
    lengths: Array
    limits: Array
    done: Array
    keys: Array
    tokens: Array
    logps: Array


def bucket(length: int, smallest: int = 1) -> int:
    """The next power of two, or one and a half of one, so that few shapes occur."""
    size = smallest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 and size >= 4 else 1 << size.bit_length()
    return size


@functools.lru_cache(maxsize=64)
def compiled(decode: Any, unembed: Any, sampler: Sampler) -> tuple[Any, Any]:
    """The jitted prefill and advance of a model and a way of sampling, made once."""
    settings = sampler._asdict()
    stop_ids = jnp.array(settings.pop("stop_ids"), jnp.int32)

    def prefill(params: Params, prompts, positions, limits, keys, cache: Cache, width: int) -> Slots:
        hidden, cache = decode(params, prompts, cache, jnp.zeros_like(positions))
        last = jnp.take_along_axis(hidden, (positions - 1)[:, None, None], axis=1)[:, 0]
        zeros = jnp.zeros((prompts.shape[0], width), jnp.int32)
        return Slots(
            cache=cache,
            logits=unembed(params, last),
            positions=positions,
            lengths=jnp.zeros_like(positions),
            limits=limits,
            done=limits <= 0,
            keys=keys,
            tokens=zeros,
            logps=zeros.astype(jnp.float32),
        )

    def step(params: Params, slots: Slots) -> Slots:
        keys = jax.vmap(jax.random.fold_in)(slots.keys, slots.positions)
        drawn, logps = sampling.sample_token(keys, slots.logits, **settings)
        rows = jnp.arange(drawn.shape[0])
        column = jnp.where(slots.done, slots.tokens.shape[1], slots.lengths)  # out of bounds: dropped
        lengths = slots.lengths + ~slots.done
        done = slots.done | jnp.isin(drawn, stop_ids) | (lengths >= slots.limits)
        hidden, cache = decode(params, drawn[:, None], slots.cache, slots.positions)
        return Slots(
            cache=cache,
            logits=unembed(params, hidden[:, 0]),
            positions=slots.positions + ~done,
            lengths=lengths,
            limits=slots.limits,
            done=done,
            keys=slots.keys,
            tokens=slots.tokens.at[rows, column].set(drawn, mode="drop"),
            logps=slots.logps.at[rows, column].set(logps, mode="drop"),
        )

    def advance(params: Params, slots: Slots, steps) -> Slots:
        def unfinished(carry):
            return (carry[0] < steps) & ~jnp.all(carry[1].done)

        def once(carry):
            return carry[0] + 1, step(params, carry[1])

        return jax.lax.while_loop(unfinished, once, (0, slots))[1]

    return (
        jax.jit(prefill, static_argnames="width", donate_argnames="cache"),
        jax.jit(advance, donate_argnames="slots"),
    )


def start(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    keys: Array,
    max_new_tokens: int,
    sampler: Sampler,
) -> Slots:
    """Slots that have read their prompts; rows are padded up to a bucket with finished ones.

    Raises:
      ValueError: an empty prompt, or one too long for the model.
    """
    lengths = [len(prompt) for prompt in prompts]
    check_lengths(model, lengths, max_new_tokens)
    rows, longest = bucket(len(prompts)), bucket(max(lengths), SMALLEST)
    tokens, positions = np.zeros((rows, longest), np.int32), np.ones(rows, np.int32)
    limits = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], positions[row] = prompt, len(prompt)
        limits[row] = max_new_tokens
    keys = jnp.concatenate([keys, jnp.broadcast_to(keys[:1], (rows - len(prompts),))])
    width = bucket(max_new_tokens, BLOCK)
    cache = model.init_cache(rows, bucket(longest + width, SMALLEST))
    prefill, _ = compiled(model.decode, model.unembed, sampler)
    return prefill(params, tokens, positions, limits, keys, cache, width=width)


def check_lengths(model: Model, lengths: Sequence[int], max_new_tokens: int) -> None:
    if not lengths:
        raise ValueError("no prompts were given")
    for row, length in enumerate(lengths):
        if length == 0:
            raise ValueError(f"prompt {row} is empty; give at least one token (such as BOS)")
        if length + max_new_tokens > model.config.max_positions:
            raise ValueError(
                f"prompt {row} has {length} tokens and {max_new_tokens} are to be sampled; the "
                f"model takes {model.config.max_positions} in all"
            )


def sample(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    key: Array,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: Sequence[int] = (),
    sample_ids: Sequence[int] | None = None,
) -> Rollout:
    """Samples a completion of each prompt.

    Sequence i draws with `fold_in(key, sample_ids[i])` (by default its index), so the same id gives
    the same completion in any batch. The distribution is that of `sampling.truncate`; give the same
    settings to `logps.token_logps` and the trainer sees the same log-probabilities.

    Raises:
      ValueError: an empty prompt, or one too long for the model.
    """
    sampler = Sampler(temperature, top_k, top_p, min_p, tuple(sorted(stop_ids)))
    ids = jnp.arange(len(prompts)) if sample_ids is None else jnp.asarray(sample_ids)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
    slots = start(model, params, prompts, keys, max_new_tokens, sampler)
    _, advance = compiled(model.decode, model.unembed, sampler)
    slots = advance(params, slots, max_new_tokens)
    return collect(slots, len(prompts), max_new_tokens, sampler.stop_ids)


def collect(slots: Slots, rows: int, width: int, stop_ids: Sequence[int]) -> Rollout:
    """What the first `rows` slots hold, on the host."""
    tokens, logps, lengths = (
        np.array(x)[:rows] for x in (slots.tokens, slots.logps, slots.lengths)
    )
    tokens, logps = tokens[:, :width], logps[:, :width]
    mask = np.arange(width) < lengths[:, None]
    ended = np.isin(tokens, list(stop_ids)) & mask
    return Rollout(tokens, logps, mask, lengths, np.where(ended.any(axis=1), STOP, LENGTH))


def stream(
    model: Model,
    params: Params,
    tokenizer: Decoder,
    prompt: Sequence[int],
    key: Array,
    *,
    max_new_tokens: int,
    stop_strings: Sequence[str] = (),
    **distribution: Any,
) -> Iterator[str]:
    """Yields the completion of one prompt in pieces of text, as they come.

    Incomplete characters, and text that may yet become a stop string, are held back; a stop string
    itself is not part of the text.
    """
    sampler = Sampler(**distribution, stop_ids=tuple(sorted(tokenizer.eos_ids)))
    keys = jax.random.fold_in(key, 0)[None]
    slots = start(model, params, [prompt], keys, max_new_tokens, sampler)
    _, advance = compiled(model.decode, model.unembed, sampler)
    shown = 0
    finished = max_new_tokens == 0
    while not finished:
        slots = advance(params, slots, 1 if shown == 0 else 4)
        finished = bool(slots.done[0])
        ids = text_ids(np.asarray(slots.tokens[0])[: int(slots.lengths[0])], sampler.stop_ids)
        text, found = cut_at(decoded(tokenizer, ids, finished), stop_strings)
        finished = finished or found
        ready = len(text) if finished else len(text) - held_back(text, stop_strings)
        if ready > shown:
            yield text[shown:ready]
            shown = ready


def generate_text(
    model: Model,
    params: Params,
    tokenizer: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_strings: Sequence[str] = (),
    key: Array | None = None,
    batch_size: int = 32,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> list[str]:
    """The completion of each prompt as text, without its stop id or stop string.

    Prompts of like length are batched; the results come in the order of the prompts.
    """
    sampler = Sampler(temperature, top_k, top_p, min_p, tuple(sorted(tokenizer.eos_ids)))
    _, advance = compiled(model.decode, model.unembed, sampler)
    key = jax.random.key(0) if key is None else key
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    texts = [""] * len(prompts)
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.array(chosen))
        batch = [prompts[i] for i in chosen]
        slots = start(model, params, batch, keys, max_new_tokens, sampler)
        found: dict[int, str] = {}
        while not bool(jnp.all(slots.done)):
            slots = advance(params, slots, BLOCK if stop_strings else max_new_tokens)
            found |= stopped(tokenizer, slots, len(chosen), sampler.stop_ids, stop_strings)
            done = np.array(slots.done)
            done[list(found)] = True
            slots = slots._replace(done=jnp.asarray(done))
        rollout = collect(slots, len(chosen), max_new_tokens, sampler.stop_ids)
        for row, index in enumerate(chosen):
            ids = text_ids(rollout.tokens[row][: rollout.lengths[row]], sampler.stop_ids)
            texts[index] = found.get(row, decoded(tokenizer, ids, True))
    return texts


def stopped(
    tokenizer: Decoder, slots: Slots, rows: int, stop_ids: Sequence[int], strings: Sequence[str]
) -> dict[int, str]:
    """The rows whose text holds a stop string by now, with the text before it."""
    if not strings:
        return {}
    tokens, lengths = np.asarray(slots.tokens), np.asarray(slots.lengths)
    cuts = {}
    for row in range(rows):
        ids = text_ids(tokens[row, : lengths[row]], stop_ids)
        text, found = cut_at(decoded(tokenizer, ids, True), strings)
        if found:
            cuts[row] = text
    return cuts


def text_ids(ids: np.ndarray, stop_ids: Sequence[int]) -> list[int]:
    """The ids before the stop id, if there is one."""
    found = ids.tolist()
    return found[:-1] if found and found[-1] in stop_ids else found


def decoded(tokenizer: Decoder, ids: Sequence[int], final: bool) -> str:
    """The text of the ids, without a character whose last bytes may still come."""
    text = tokenizer.decode(ids)
    return text if final else text.rstrip("\ufffd")


def cut_at(text: str, strings: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of the strings, and whether there is one."""
    places = [place for string in strings if (place := text.find(string)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def held_back(text: str, strings: Sequence[str]) -> int:
    """How many of the last characters may be the beginning of a stop string."""
    longest = 0
    for string in strings:
        for size in range(1, min(len(string), len(text) + 1)):
            if text.endswith(string[:size]):
                longest = max(longest, size)
    return longest
