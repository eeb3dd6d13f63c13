"""The cache of keys and values: made, written in place, read as far as it is used."""

import itertools

import jax
import jax.numpy as jnp

from jaxpost.models.model import Cache, TransformerConfig
from jaxpost.typing import Array, Float, Int

FIRST_PART = 64
INT8_MOST = 127.0


def empty(config: TransformerConfig, batch: int, length: int, dtype=None) -> Cache:
    """Zeros. With int8 there is a float32 scale for each token and head, largest value / 127."""
    dtype = jnp.dtype(dtype or config.compute_dtype)
    shape = (config.layers, batch, config.kv_heads, length, config.head_dim)
    if dtype == jnp.int8:
        scales = (*shape[:-1], 1)
        return Cache(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(scales), jnp.zeros(scales)
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"a cache of {dtype} cannot be made; use a floating type or int8")
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(
    cache: Cache,
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    layer: Array,
    starts: Int[Array, " B"],
) -> Cache:
    """Writes each row's S new entries at its own start, in place where the cache is donated."""
    new = [jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)]
    if cache.key_scales is not None:
        new = [part for pair in zip(*map(quantized, new), strict=True) for part in pair]
    old = [part for part in cache if part is not None]
    return Cache(*(put(*pair, layer, starts) for pair in zip(old, new, strict=True)))


def quantized(x: Float[Array, "B K S hd"]) -> tuple[Array, Array]:
    """int8 values, and the scales [B, K, S, 1] that turn them back."""
    x = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / INT8_MOST
    return jnp.round(x / jnp.maximum(scales, 1e-30)).astype(jnp.int8), scales


def put(cache: Array, entries: Array, layer: Array, starts: Int[Array, " B"]) -> Array:
    """On a CPU row by row: XLA's scatter there goes element by element, and for bfloat16 converts
    the whole cache to float32 and back.
    """
    return jax.lax.platform_dependent(
        cache,
        entries.astype(cache.dtype),
        layer,
        starts,
        cpu=put_by_row,
        default=put_by_scatter,
    )


def put_by_row(cache: Array, entries: Array, layer: Array, starts: Array) -> Array:
    def put_row(row, cache):
        entry = jax.lax.dynamic_slice_in_dim(entries, row, 1)[None]
        return jax.lax.dynamic_update_slice(cache, entry, (layer, row, 0, starts[row], 0))

    return jax.lax.fori_loop(0, entries.shape[0], put_row, cache)


def put_by_scatter(cache: Array, entries: Array, layer: Array, starts: Array) -> Array:
    rows = jnp.arange(entries.shape[0])[:, None]
    slots = starts[:, None] + jnp.arange(entries.shape[2])
    return cache.at[layer, rows, :, slots].set(jnp.swapaxes(entries, 1, 2))


def parts(length: int) -> list[int]:
    """The beginnings of a cache that may be read in place of all: 64, 128, 256, … and the whole."""
    doubled = (FIRST_PART << n for n in itertools.count())
    return [*itertools.takewhile(lambda part: part < length, doubled), length]


def read(cache: Cache, layer: Array, count: int, dtype) -> tuple[Array, Array]:
    """The first `count` keys and values [B, K, count, hd] of a layer."""

    def of(part: Array) -> Array:
        shape = (1, *part.shape[1:3], count, part.shape[4])
        return jax.lax.dynamic_slice(part, (layer, 0, 0, 0, 0), shape)[0].astype(dtype)

    if cache.key_scales is None or cache.value_scales is None:
        return of(cache.keys), of(cache.values)
    return of(cache.keys) * of(cache.key_scales), of(cache.values) * of(cache.value_scales)
