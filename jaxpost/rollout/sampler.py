"""Rollouts: completions sampled from the trainer's own parameters.

Shapes are rounded up to a few sizes, so that nothing is compiled again after warm-up. What a
sequence draws depends on its own sample id and positions: not on its batch, slot or padding.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxpost.models.model import Model
from jaxpost.rollout import engine, settings, shapes, text
from jaxpost.rollout.shapes import Capacity
from jaxpost.rollout.slots import UNFINISHED, forward_of
from jaxpost.typing import Array, Params


class Rollout(NamedTuple):
    """Completions [B, N], N = max_new_tokens, on the host; 0 (and False) after their end.

    Attributes:
      tokens: the sampled ids, the stop id included.
      logps: log-probabilities (nats) under the distribution sampled from; 0 outside `mask`.
      mask: True on the completion, its stop id included, nothing after it.
      lengths: [B], tokens of each completion.
      stop_reasons: [B], STOP, LENGTH, STRING or UNFINISHED; `REASONS` names them.
    """

    tokens: np.ndarray
    logps: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    stop_reasons: np.ndarray


def sample(
    model: Model,
    params: Params,
    prompts: Sequence[text.Ids] | np.ndarray,
    key: Array,
    *,
    max_new_tokens: int,
    lengths: text.Ids | None = None,
    sample_ids: text.Ids | None = None,
    limits: text.Ids | None = None,
    begun: Rollout | None = None,
    budget: int | None = None,
    slots: int | None = None,
    cache_dtype: str | None = None,
    sharding: jax.sharding.NamedSharding | None = None,
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
      limits: [B], the longest completion of each, where that is not `max_new_tokens`.
      begun: an earlier result for these prompts; its unfinished completions are continued, and
        with the same key and ids draw what they would have drawn at once. The others are kept.
      budget: about how many tokens to draw in all (at most one a slot more); what is not done by
        then comes back as it is, its stop reason UNFINISHED.
      slots: how many sequences are decoded at once, all by default. A slot that is done goes to
        the next prompt, so the time follows the mean length, not the longest.
      cache_dtype: of keys and values, by default as activations; "bfloat16" takes half of float32,
        "int8" (with a scale for each token and head) about a quarter.
      sharding: lays the batch axis over devices, as `NamedSharding(mesh, PartitionSpec("data"))`;
        `params` lie on the same mesh, in any way.
      stop_ids: a completion ends with the first of these, and includes it.
      stop_strings: a completion ends with the token that completes one of these in its text.
      tokenizer: reads that text; needed for `stop_strings`.
      capacity: shapes to compile for, so that later and larger batches do not compile again.

    Raises:
      ValueError: an empty prompt, one too long for the model or with a token outside its
        vocabulary, or a setting out of range.
    """
    how = settings.Settings(
        max_new_tokens, temperature, top_k, top_p, min_p, tuple(sorted(stop_ids)),
        tuple(stop_strings),
    )  # fmt: skip
    rows = settings.rows_of(prompts, lengths)
    running, result = start(
        model,
        params,
        rows,
        key,
        how,
        begun,
        sample_ids,
        limits,
        slots,
        tokenizer,
        capacity,
        cache_dtype,
        sharding,
    )
    for ended in running.run(budget=budget):
        for one in ended:
            add(result, one)
    return result


def sample_groups(
    model: Model,
    params: Params,
    prompts: Sequence[text.Ids] | np.ndarray,
    key: Array,
    *,
    group_size: int,
    max_new_tokens: int,
    lengths: text.Ids | None = None,
    sample_ids: text.Ids | None = None,
    limits: text.Ids | None = None,
    begun: Rollout | None = None,
    budget: int | None = None,
    enough: int | None = None,
    slots: int | None = None,
    cache_dtype: str | None = None,
    sharding: jax.sharding.NamedSharding | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: Sequence[str] = (),
    tokenizer: text.Tokenizer | None = None,
    capacity: Capacity | None = None,
) -> Iterator[tuple[int, Rollout]]:
    """Samples G = `group_size` completions of each of P prompts, and yields groups as they finish.

    Yields (p, the G completions of prompt p), in the order in which they are done; the device goes
    on with the others meanwhile. Together they are what `sample` gives for every prompt G times in
    a row, and `sample_ids`, `limits` and `begun` have these P · G rows. Sampling ends when `enough`
    groups are done, or with `budget`; then the others come, done or as far as they are.

    Raises:
      ValueError: as `sample`, when the first group is asked for.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be 1 or more")
    how = settings.Settings(
        max_new_tokens, temperature, top_k, top_p, min_p, tuple(sorted(stop_ids)),
        tuple(stop_strings),
    )  # fmt: skip
    rows = [row for row in settings.rows_of(prompts, lengths) for _ in range(group_size)]
    running, result = start(
        model,
        params,
        rows,
        key,
        how,
        begun,
        sample_ids,
        limits,
        slots,
        tokenizer,
        capacity,
        cache_dtype,
        sharding,
    )
    missing = np.sum((result.stop_reasons == UNFINISHED).reshape(-1, group_size), axis=1)
    for group in np.flatnonzero(missing == 0).tolist():
        yield group, group_of(result, group, group_size)
    if enough is not None and np.sum(missing == 0) >= enough:
        running.stop()
    for ended in running.run(promptly=True, budget=budget):
        for one in ended:
            add(result, one)
            group = one.row // group_size
            missing[group] -= 1
            if missing[group] == 0:
                yield group, group_of(result, group, group_size)
        if enough is not None and np.sum(missing == 0) >= enough:
            running.stop()


def group_of(rollout: Rollout, group: int, size: int) -> Rollout:
    return Rollout(*(field[group * size : (group + 1) * size] for field in rollout))


def unstarted(rows: int, max_new_tokens: int) -> Rollout:
    """Completions of which nothing is drawn yet; what `begun` may hold for new prompts."""
    shape = (rows, max_new_tokens)
    return Rollout(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros(shape, bool),
        np.zeros(rows, np.int32),
        np.full(rows, UNFINISHED),
    )


def begun_rollout(begun: Rollout | None, rows: int, max_new_tokens: int) -> Rollout:
    """Arrays for the results, with what an earlier call has drawn."""
    result = unstarted(rows, max_new_tokens)
    if begun is None:
        return result
    if len(begun.lengths) != rows:
        raise ValueError(f"begun has {len(begun.lengths)} completions for {rows} prompts")
    longest = max(begun.lengths, default=0)
    if longest > max_new_tokens:
        raise ValueError(
            f"begun holds a completion of {longest} tokens, and max_new_tokens is {max_new_tokens}"
        )
    for mine, theirs in zip(result[:3], begun[:3], strict=True):
        mine[:, :longest] = theirs[:, :longest]
    return result._replace(
        lengths=np.array(begun.lengths, np.int32), stop_reasons=np.array(begun.stop_reasons)
    )


def start(
    model: Model,
    params: Params,
    prompts: Sequence[np.ndarray],
    key: Array,
    how: settings.Settings,
    begun: Rollout | None,
    sample_ids: text.Ids | None,
    limits: text.Ids | None,
    slots: int | None,
    tokenizer: text.Tokenizer | None,
    capacity: Capacity | None,
    cache_dtype: str | None = None,
    sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[engine.Engine, Rollout]:
    """The engine, what is not finished in its queue, and the results with what is."""
    settings.check(model, prompts, how, tokenizer)
    if slots is not None and slots < 1:
        raise ValueError(f"slots is {slots}; it must be 1 or more, or None for all at once")
    ids = settings.counted("sample_ids", sample_ids, range(len(prompts)))
    most = how.max_new_tokens
    ends = settings.counted("limits", limits, [most] * len(prompts), most)
    result = begun_rollout(begun, len(prompts), most)
    queue = []
    for row in np.flatnonzero(result.stop_reasons == UNFINISHED).tolist():
        drawn = result.tokens[row, : result.lengths[row]]
        left = max(int(ends[row]) - len(drawn), 0)
        prompt = np.concatenate([prompts[row], drawn])
        queue.append(engine.Waiting(row, prompt, len(drawn), left, int(ids[row])))
    different = len({one.prompt.tobytes() for one in queue})
    need = Capacity(len(queue), different, max(map(len, prompts)), most)
    plan = shapes.shapes_for(
        need, capacity or Capacity(), slots, devices_of(sharding), begun is not None
    )
    forward = forward_of(model, cache_dtype, sharding)
    made = engine.Engine(forward, params, key, queue, how, plan, tokenizer)
    return made, result


def devices_of(sharding: jax.sharding.NamedSharding | None) -> int:
    """Over how many devices the first axis lies."""
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return 1
    names = sharding.spec[0]
    sizes = [sharding.mesh.shape[name] for name in ([names] if isinstance(names, str) else names)]
    return math.prod(sizes)


def add(rollout: Rollout, ended: engine.Ended) -> None:
    """Writes what was drawn of a completion behind what it had."""
    first = rollout.lengths[ended.row]
    new = slice(first, first + len(ended.tokens))
    rollout.tokens[ended.row, new], rollout.logps[ended.row, new] = ended.tokens, ended.logps
    rollout.mask[ended.row, new] = True
    rollout.lengths[ended.row] += len(ended.tokens)
    rollout.stop_reasons[ended.row] = ended.reason
