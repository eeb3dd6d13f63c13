"""The vocabulary a tile at a time: running softmax forward, gradients backward."""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost.logps.settings import Settings, TokenScores, logits_of
from jaxpost.typing import Array, Float, Int

CPU_TILE = 2048  # vocabulary entries scored at once on a CPU: a chunk's logits stay in its cache


class Tile(NamedTuple):
    """Some neighbouring entries of the vocabulary."""

    number: Array | int | None  # None: the rest, smaller than the others
    start: Array | int
    entries: Float[Array, "S D"]


def over_tiles(
    tile: int, head: Float[Array, "V D"], add: Callable[[Tile, Any], Any], carry: Any
) -> Any:
    """`carry = add(tile, carry)` for every `tile` entries of the head, the rest last."""
    size = min(tile, head.shape[0])

    def add_tile(index, carry):
        entries = jax.lax.dynamic_slice_in_dim(head, index * size, size)
        return add(Tile(index, index * size, entries), carry)

    tiles, rest = divmod(head.shape[0], size)
    carry = jax.lax.fori_loop(0, tiles, add_tile, carry) if tiles > 1 else add_tile(0, carry)
    return add(Tile(None, tiles * size, head[tiles * size :]), carry) if rest else carry


def by_platform(function: Any, settings: Settings, *arguments: Any) -> Any:
    """`function(tile, *arguments)`: tiles that stay in a CPU's cache, all at once on accelerators.

    All at once, too, where the distribution needs a token's logits together.
    """
    return jax.lax.platform_dependent(
        *arguments,
        cpu=functools.partial(function, sys.maxsize if settings.whole else CPU_TILE),
        default=functools.partial(function, sys.maxsize),
    )


def project(hidden: Float[Array, "N D"], tile: Tile) -> Float[Array, "N S"]:
    return jnp.einsum("nd,vd->nv", hidden, tile.entries, preferred_element_type=jnp.float32)


class Running(NamedTuple):
    """What is known of a chunk's logits after some tiles of the vocabulary; [N] each."""

    highest: Array
    total: Array  # Σ exp(logit − highest)
    chosen: Array  # the target's logit
    moment: Array  # Σ exp(logit − highest) · logit, for the entropy


def running(targets: Int[Array, " N"]) -> Running:
    """Before the first tile."""
    zeros = jnp.zeros(targets.shape, jnp.float32)
    return Running(jnp.full(targets.shape, jnp.finfo(jnp.float32).min), zeros, zeros, zeros)


def add_logits(
    settings: Settings, so_far: Running, raw: Float[Array, "N S"], start: Any, targets: Array
) -> Running:
    """The running softmax with the logits of one more tile."""
    logits = logits_of(settings, raw)
    highest = jnp.maximum(so_far.highest, jnp.max(logits, axis=1))
    masses = jnp.exp(logits - highest[:, None])
    place, last = targets - start, raw.shape[1] - 1
    here = (place >= 0) & (place <= last)
    chosen = jnp.take_along_axis(logits, jnp.clip(place, 0, last)[:, None], axis=1)[:, 0]
    shrink = jnp.exp(so_far.highest - highest)
    moment = so_far.moment
    if settings.entropies:
        finite = jnp.where(masses > 0, logits, 0.0)  # what truncation leaves out is at -inf
        moment = moment * shrink + jnp.sum(masses * finite, axis=1)
    return Running(
        highest,
        so_far.total * shrink + jnp.sum(masses, axis=1),
        jnp.where(here, chosen, so_far.chosen),
        moment,
    )


def scores_of(settings: Settings, found: Running) -> TokenScores:
    """After the last tile."""
    normalizers = found.highest + jnp.log(found.total)
    correct = (found.chosen >= found.highest).astype(jnp.float32)
    entropies = jnp.zeros_like(normalizers)
    if settings.entropies:
        entropies = jnp.maximum(normalizers - found.moment / found.total, 0.0)
    return TokenScores(found.chosen - normalizers, normalizers, correct, entropies)


class ScoreGradients(NamedTuple):
    """Of the loss by what a chunk's backward pass starts from; [N] each."""

    logps: Array
    log_normalizers: Array
    entropies: Array


def raw_gradient(
    settings: Settings,
    raw: Float[Array, "N S"],
    start: Any,
    targets: Int[Array, " N"],
    scores: TokenScores,
    gradients: ScoreGradients,
) -> Float[Array, "N S"]:
    """Gradient of a tile's products, from that of the scores.

    By logit v: of logp onehot − p_v, of the log-normalizer p_v, of the entropy −p_v (log p_v + H).
    """
    of_logps, of_normalizers, of_entropies = (g[:, None] for g in gradients)
    logits, back = jax.vjp(functools.partial(logits_of, settings), raw)
    log_probabilities = logits - scores.log_normalizers[:, None]
    probabilities = jnp.exp(log_probabilities)
    columns = start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    onehot = jnp.where(columns == targets[:, None], of_logps, 0.0)
    slope = of_normalizers - of_logps
    if settings.entropies:
        surprise = jnp.where(probabilities > 0, log_probabilities, 0.0)
        slope -= of_entropies * (surprise + scores.entropies[:, None])
    return back(onehot + probabilities * slope)[0]


def add_gradient(
    tile: Tile, hidden: Float[Array, "N D"], gradient: Float[Array, "N S"], carry: Any
) -> tuple[Array, Array]:
    """(hidden's gradient [N, D], the head's [V, D]) with one tile's share added."""
    hidden_gradient, head_gradient = carry
    gradient = gradient.astype(hidden.dtype)
    share = jnp.einsum("nv,nd->vd", gradient, hidden, preferred_element_type=jnp.float32)
    share += jax.lax.dynamic_slice_in_dim(head_gradient, tile.start, tile.entries.shape[0])
    hidden_gradient += jnp.matmul(gradient, tile.entries, preferred_element_type=jnp.float32)
    return hidden_gradient, jax.lax.dynamic_update_slice_in_dim(head_gradient, share, tile.start, 0)
