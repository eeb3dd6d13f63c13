"""The sampler's state and its steps, as pure functions: empty, prefill, insert, step, advance.

A slot holds one sequence. Prompts are read into a prefix cache of their own and inserted into
slots, so that several completions share one reading of their prompt and a slot can be taken by
another sequence as soon as it is done.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost import sampling
from jaxpost.models.model import Cache, Model
from jaxpost.rollout.shapes import CHUNK
from jaxpost.typing import Array, Bool, Float, Int, Params, Tokens

STOP, LENGTH, STRING, UNFINISHED = 0, 1, 2, 3  # why a completion ended
REASONS = ("stop", "length", "stop_string", "unfinished")  # their names


class Forward(NamedTuple):
    """What sampling needs of a Model; hashable, so it can be a static argument of `jax.jit`.

    Attributes:
      cache_dtype: by default that of the model's activations; may be int8.
      sharding: of an array [B] whose axis lies over devices.
    """

    decode: Callable
    unembed: Callable
    init_cache: Callable
    cache_dtype: str | None = None
    sharding: jax.sharding.NamedSharding | None = None


class Rules(NamedTuple):
    """How tokens are drawn and which end a completion; numbers that may change without a compile.

    Attributes:
      temperature: None is greedy.
      top_p, min_p: as in `sampling.truncate`.
      stop_ids: [n] tokens that end a completion.
    """

    temperature: Float[Array, ""] | None
    top_p: Float[Array, ""] | None
    min_p: Float[Array, ""] | None
    stop_ids: Int[Array, " n"]


class Slots(NamedTuple):
    """The sampler's state: B slots, completions of at most N tokens.

    Attributes:
      cache: keys and values of the tokens read.
      newest: [B], the last token of each sequence, which is not read yet.
      positions: [B], its position.
      keys: [B], the random key of each sequence.
      limits: [B], the most tokens to sample.
      lengths: [B], tokens sampled.
      done: [B]; a done slot changes no more (and the cache of one is of no use).
      stop_reasons: [B], STOP, LENGTH or STRING, once done.
      tokens, logps: [B, N], what was sampled; no meaning after `lengths`.
    """

    cache: Cache
    newest: Array
    positions: Array
    keys: Array
    limits: Array
    lengths: Array
    done: Array
    stop_reasons: Array
    tokens: Array
    logps: Array


class Entries(NamedTuple):
    """Sequences to put into slots; the first `number` of the M that the arrays have room for.

    Attributes:
      number: scalar.
      slots: [M], where each goes.
      sources: [M], which row of the prefix cache holds its prompt.
      newest, positions, limits: [M], as in Slots: the prompt's last token and its position.
      sample_ids: [M]; a sequence draws with `fold_in(key, sample id)`.
    """

    number: Any
    slots: Any
    sources: Any
    newest: Any
    positions: Any
    limits: Any
    sample_ids: Any


def forward_of(
    model: Model,
    cache_dtype: str | None = None,
    sharding: jax.sharding.NamedSharding | None = None,
) -> Forward:
    return Forward(model.decode, model.unembed, model.init_cache, cache_dtype, sharding)


def spread(forward: Forward, state: Any, axis: int = 0) -> Any:
    """Arrays with their `axis` over the devices, if there are several."""
    if forward.sharding is None:
        return state
    spec = jax.sharding.PartitionSpec(*[None] * axis, *forward.sharding.spec)
    return jax.lax.with_sharding_constraint(
        state, jax.sharding.NamedSharding(forward.sharding.mesh, spec)
    )


def spread_slots(forward: Forward, slots: Slots) -> Slots:
    return Slots(spread(forward, slots.cache, axis=1), *spread(forward, slots[1:]))


def empty(forward: Forward, rows: int, length: int, width: int, key: Array) -> Slots:
    """`rows` free slots for sequences of `length` tokens, of which `width` are sampled."""
    zeros = jnp.zeros(rows, jnp.int32)
    slots = Slots(
        cache=forward.init_cache(rows, length, forward.cache_dtype),
        newest=zeros,
        positions=zeros,
        keys=jnp.broadcast_to(key, (rows, *key.shape)),
        limits=zeros,
        lengths=zeros,
        done=jnp.ones(rows, bool),
        stop_reasons=jnp.full(rows, LENGTH, jnp.int32),
        tokens=jnp.zeros((rows, width), jnp.int32),
        logps=jnp.zeros((rows, width), jnp.float32),
    )
    return spread_slots(forward, slots)


def prefill(forward: Forward, params: Params, tokens: Tokens, lengths: Int[Array, " R"]) -> Cache:
    """The cache of R prompts, right-padded to [R, P]; P is at most CHUNK or a multiple of it.

    `lengths` counts the tokens to read: a prompt's last is left to `step`, which needs its logits
    (so nothing is unembedded here). Padding after the longest is not computed.
    """
    rows, width = tokens.shape
    size = min(width, CHUNK)

    def read(index, cache: Cache) -> Cache:
        chunk = jax.lax.dynamic_slice_in_dim(tokens, index * size, size, axis=1)
        read = forward.decode(params, chunk, cache, jnp.full(rows, index * size))[1]
        return spread(forward, read, axis=1)

    cache = spread(forward, forward.init_cache(rows, width, forward.cache_dtype), axis=1)
    if width == size:
        return read(0, cache)
    return jax.lax.fori_loop(0, (jnp.max(lengths) + size - 1) // size, read, cache)


def insert(forward: Forward, slots: Slots, prefix: Cache, entries: Entries, key: Array) -> Slots:
    """Puts sequences into slots, with the cache of what was read of their prompts."""
    real = jnp.arange(len(entries.slots)) < entries.number
    places = jnp.where(real, entries.slots, len(slots.done))  # out of bounds: dropped

    def put(field: Array, values) -> Array:
        return field.at[places].set(values, mode="drop")

    if forward.sharding is None:
        cache = copied(slots.cache, prefix, entries)
    else:
        sources = put(jnp.zeros(len(slots.done), jnp.int32), entries.sources)
        cache = gathered(slots.cache, prefix, sources, put(jnp.zeros(len(slots.done), bool), True))
    inserted = slots._replace(
        cache=cache,
        newest=put(slots.newest, entries.newest),
        positions=put(slots.positions, entries.positions),
        keys=put(slots.keys, jax.vmap(jax.random.fold_in, (None, 0))(key, entries.sample_ids)),
        limits=put(slots.limits, entries.limits),
        lengths=put(slots.lengths, 0),
        done=put(slots.done, entries.limits <= 0),
        stop_reasons=put(slots.stop_reasons, LENGTH),
    )
    return spread_slots(forward, inserted)


def copied(cache: Cache, prefix: Cache, entries: Entries) -> Cache:
    """The cache with rows of `prefix`, one after the other: only they are touched."""

    def copy(index, cache: Cache) -> Cache:
        source, slot = entries.sources[index], entries.slots[index]

        def place(there: Array, here: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(here, source, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(there, row, slot, axis=1)

        return jax.tree.map(place, cache, prefix)

    return jax.lax.fori_loop(0, entries.number, copy, cache)


def gathered(cache: Cache, prefix: Cache, sources: Array, fresh: Array) -> Cache:
    """The same for rows that lie on several devices: each takes what its own rows need."""

    def place(there: Array, here: Array) -> Array:
        read = here.shape[3]
        rows = jnp.where(fresh[:, None, None, None], here[:, sources], there[:, :, :, :read])
        return jax.lax.dynamic_update_slice_in_dim(there, rows, 0, axis=3)

    return jax.tree.map(place, cache, prefix)


def step(forward: Forward, top_k: int | None, params: Params, slots: Slots, rules: Rules) -> Slots:
    """Reads the newest token of every slot and draws the next where the slot is not done.

    A draw uses `fold_in(the sequence's key, the position of the token drawn)`.
    """
    starts = jnp.where(slots.done, 0, slots.positions)  # the longest decides how much is read
    hidden, cache = forward.decode(params, slots.newest[:, None], slots.cache, starts)
    drawn, logps = sampling.sample_token(
        jax.vmap(jax.random.fold_in)(slots.keys, slots.positions + 1),
        forward.unembed(params, hidden[:, 0]),
        temperature=0.0 if rules.temperature is None else rules.temperature,
        top_k=top_k,
        top_p=rules.top_p,
        min_p=rules.min_p,
    )
    running = ~slots.done
    rows = jnp.arange(len(drawn))
    columns = jnp.where(running, slots.lengths, slots.tokens.shape[1])  # out of bounds: dropped
    lengths = slots.lengths + running
    stopped = running & jnp.isin(drawn, rules.stop_ids)
    after = slots._replace(
        cache=cache,
        newest=jnp.where(running, drawn, slots.newest),
        positions=slots.positions + running,
        lengths=lengths,
        done=slots.done | stopped | (lengths >= slots.limits),
        stop_reasons=jnp.where(stopped, STOP, slots.stop_reasons),
        tokens=slots.tokens.at[rows, columns].set(drawn, mode="drop"),
        logps=slots.logps.at[rows, columns].set(logps, mode="drop"),
    )
    return spread_slots(forward, after)


def advance(
    forward: Forward,
    top_k: int | None,
    params: Params,
    slots: Slots,
    rules: Rules,
    steps: Int[Array, ""],
    until: Int[Array, ""],
) -> Slots:
    """Takes `steps` steps, or fewer if `until` slots are done before."""

    def unfinished(carry: tuple[Array, Slots]) -> Array:
        return (carry[0] < steps) & (jnp.sum(carry[1].done) < until)

    def once(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        return carry[0] + 1, step(forward, top_k, params, carry[1], rules)

    return jax.lax.while_loop(unfinished, once, (jnp.int32(0), slots))[1]


def pick(forward: Forward, slots: Slots, rows: Int[Array, " M"]) -> Slots:
    """Some of the slots."""
    cache = jax.tree.map(lambda part: part[:, rows], slots.cache)
    return spread_slots(forward, Slots(cache, *(field[rows] for field in slots[1:])))


def cut(slots: Slots, ended: Bool[Array, " B"], lengths: Int[Array, " B"]) -> Slots:
    """Ends the completions in which a stop string was found, at the given lengths."""
    return slots._replace(
        lengths=jnp.where(ended, lengths, slots.lengths),
        done=slots.done | ended,
        stop_reasons=jnp.where(ended, STRING, slots.stop_reasons),
    )
