"""Rollouts: completions sampled from the trainer's own parameters.

Shapes are rounded up to a few sizes, so that nothing is compiled again after warm-up. What a
sequence draws depends on its own sample id and positions: not on its batch, slot or padding.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpost import sampling
from jaxpost.models.model import Model
from jaxpost.rollout import slots as engine
from jaxpost.rollout import text
from jaxpost.rollout.slots import CHUNK, Entries, Rules, Slots
from jaxpost.typing import Array, Params

BLOCK = 8  # tokens decoded between two looks at the text
SMALLEST = 16  # the least length that is compiled for
PREFILL_ROWS = 32  # prompts read at once

_empty = jax.jit(engine.empty, static_argnums=(0, 1, 2, 3))
_prefill = jax.jit(engine.prefill, static_argnums=0)
_insert = jax.jit(engine.insert, donate_argnums=0)
_advance = jax.jit(engine.advance, static_argnums=(0, 1), donate_argnums=3)
_cut = jax.jit(engine.cut, donate_argnums=0)


class Rollout(NamedTuple):
    """Completions [B, N], N = max_new_tokens, on the host; 0 (and False) after their end.

    Attributes:
      tokens: the sampled ids, the stop id included.
      logps: log-probabilities (nats) under the distribution sampled from; 0 outside `mask`.
      mask: True on the completion, its stop id included, nothing after it.
      lengths: [B], tokens of each completion.
      stop_reasons: [B], STOP, LENGTH or STRING; `REASONS` names them.
    """

    tokens: np.ndarray
    logps: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    stop_reasons: np.ndarray


class Capacity(NamedTuple):
    """The shapes to compile for; they are rounded up, and raised where a call needs more.

    Give the largest that is to come, and a first small batch compiles for all.

    Attributes:
      rows: sequences sampled at once.
      prompts: different prompts among them.
      prompt_tokens: of the longest prompt.
      new_tokens: the largest `max_new_tokens`.
    """

    rows: int = 1
    prompts: int = 1
    prompt_tokens: int = 1
    new_tokens: int = 1


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


def sample(
    model: Model,
    params: Params,
    prompts: Sequence[text.Ids] | np.ndarray,
    key: Array,
    *,
    max_new_tokens: int,
    lengths: text.Ids | None = None,
    sample_ids: text.Ids | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: text.Tokenizer | None = None,
    capacity: Capacity | None = None,
) -> Rollout:
    """Samples a completion of each prompt.

    The distribution is that of `sampling.truncate`; give the same settings to `logps.token_logps`
    and the trainer sees the same log-probabilities. Equal prompts are read once.

    Args:
      prompts: B lists of tokens, or an array [B, P] padded on the right with its `lengths`.
      key: the token at position p of sequence i is drawn with
        `fold_in(fold_in(key, sample_ids[i]), p)`.
      max_new_tokens: the longest completion.
      lengths: [B], tokens of each prompt; needed with an array.
      sample_ids: [B], 0 … B-1 by default. A sequence with the same id and prompt draws the same
        completion in any batch.
      stop_ids: a completion ends with the first of these, and includes it.
      stop_strings: a completion ends with the token that completes one of these in its text.
      tokenizer: reads that text; needed for `stop_strings`.
      capacity: shapes to compile for, so that later and larger batches do not compile again.

    Raises:
      ValueError: an empty prompt, one too long for the model or with a token outside its
        vocabulary, or a setting out of range.
    """
    settings = Settings(
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        tuple(sorted(stop_ids)),
        tuple(stop_strings),
    )
    rows = rows_of(prompts, lengths)
    ids = range(len(rows)) if sample_ids is None else sample_ids
    pieces = blocks(model, params, rows, key, settings, ids, tokenizer, capacity or Capacity())
    *_, (rollout, _) = pieces
    return rollout


def blocks(
    model: Model,
    params: Params,
    prompts: Sequence[np.ndarray],
    key: Array,
    settings: Settings,
    sample_ids: text.Ids,
    tokenizer: text.Tokenizer | None,
    capacity: Capacity,
    block: int = BLOCK,
    watched: bool = False,
) -> Iterator[tuple[Rollout, bool]]:
    """Samples and yields, after each block of tokens, all so far and whether all are done.

    Without stop strings, and unless someone watches, there is one block.
    """
    check(model, prompts, settings, sample_ids, tokenizer)
    forward, rules = engine.forward_of(model), settings.rules()
    slots = start(model, params, prompts, key, settings.max_new_tokens, sample_ids, capacity)
    decode = None if tokenizer is None or not settings.stop_strings else tokenizer.decode
    seen = [0] * len(prompts)
    steps = np.int32(block if watched or decode else settings.max_new_tokens)
    while True:
        slots = _advance(forward, settings.top_k, params, slots, rules, steps)
        if decode is not None:
            slots = cut_at_strings(slots, seen, settings, decode)
        finished = bool(np.array(slots.done).all())
        yield collect(slots, len(prompts), settings.max_new_tokens), finished
        if finished:
            return


def start(
    model: Model,
    params: Params,
    prompts: Sequence[np.ndarray],
    key: Array,
    max_new_tokens: int,
    sample_ids: text.Ids,
    capacity: Capacity,
) -> Slots:
    """Slots that have read their prompts, but for the last token of each."""
    users: dict[tuple[int, ...], list[int]] = {}  # prompt → the sequences that begin with it
    for row, prompt in enumerate(prompts):
        users.setdefault(tuple(prompt.tolist()), []).append(row)
    distinct = list(users)
    longest = max(capacity.prompt_tokens, *map(len, distinct), 1)
    new_tokens = max(capacity.new_tokens, max_new_tokens)
    rows = bucket(max(capacity.rows, len(prompts)))
    together = bucket(min(max(capacity.prompts, len(distinct)), PREFILL_ROWS))

    forward = engine.forward_of(model)
    length, width = bucket_length(longest + new_tokens), bucket_length(new_tokens)
    slots = _empty(forward, rows, length, width, key)
    for first in range(0, len(distinct), together):
        group = distinct[first : first + together]
        tokens, read = padded([prompt[:-1] for prompt in group], together, bucket_length(longest))
        prefix = _prefill(forward, params, tokens, read)
        taken = [(source, row) for source, prompt in enumerate(group) for row in users[prompt]]
        entries = Entries(*np.zeros((7, rows), np.int32))
        for place, (source, row) in enumerate(taken):
            entries.slots[place], entries.sources[place] = row, source
            entries.newest[place] = prompts[row][-1]
            entries.positions[place] = len(prompts[row]) - 1
            entries.limits[place], entries.sample_ids[place] = max_new_tokens, sample_ids[row]
        slots = _insert(slots, prefix, entries._replace(number=np.int32(len(taken))), key)
    return slots


def bucket(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is not under `count`."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def bucket_length(length: int) -> int:
    """The least of 16, 32, 64, CHUNK and multiples of CHUNK by a `bucket` that is not under it."""
    if length > CHUNK:
        return CHUNK * bucket(-(-length // CHUNK))
    return max(SMALLEST, 1 << max(length - 1, 0).bit_length())


def padded(sequences: Sequence[text.Ids], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequences as an array [rows, width], 0 after their ends, and their lengths [rows]."""
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], lengths[row] = sequence, len(sequence)
    return tokens, lengths


def cut_at_strings(slots: Slots, seen: list[int], settings: Settings, decode: text.Decode) -> Slots:
    """Ends the completions whose text holds a stop string; `seen` counts the tokens looked at."""
    tokens, lengths = np.array(slots.tokens), np.array(slots.lengths)
    ended = np.zeros(len(lengths), bool)
    for row, known in enumerate(seen):
        if lengths[row] == known:
            continue
        ids = text.without_stop_id(tokens[row, : lengths[row]].tolist(), settings.stop_ids)
        count = text.completed_at(ids, known, settings.stop_strings, decode)
        if count is not None:
            ended[row], lengths[row] = True, count
        seen[row] = int(lengths[row])
    return _cut(slots, ended, lengths) if ended.any() else slots


def collect(slots: Slots, rows: int, width: int) -> Rollout:
    """What the first `rows` slots have sampled, copied to the host."""
    tokens, logps = (np.array(field)[:rows, :width] for field in (slots.tokens, slots.logps))
    lengths, reasons = (np.array(field)[:rows] for field in (slots.lengths, slots.stop_reasons))
    mask = np.arange(width) < lengths[:, None]
    return Rollout(np.where(mask, tokens, 0), np.where(mask, logps, 0), mask, lengths, reasons)


def rows_of(prompts: Sequence[text.Ids] | np.ndarray, lengths: text.Ids | None) -> list[np.ndarray]:
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
    sample_ids: text.Ids,
    tokenizer: text.Tokenizer | None,
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
    if len(sample_ids) != len(prompts):
        raise ValueError(f"{len(sample_ids)} sample_ids were given for {len(prompts)} prompts")
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
