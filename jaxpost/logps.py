"""Log-probabilities of tokens: the only place with a vocabulary axis, and the door to float32.

Tokens are scored in chunks before the vocabulary projection, forward and backward, and only where
the completion mask asks for it. So no [B, T, V] array ever exists, and prompts and padding cost no
vocabulary product.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost import sampling
from jaxpost.models.model import Model
from jaxpost.typing import Array, Float, Hidden, Int, Mask, Params, PerToken, Tokens

CHUNK_TOKENS = 2048  # tokens scored at once
CPU_TILE = 2048  # vocabulary entries scored at once on a CPU: a chunk's logits stay in its cache


class TokenScores(NamedTuple):
    """What the model makes of each target; every field is [B, T] and 0 outside the mask.

    Attributes:
      logps: log π(target), nats. Differentiable.
      log_normalizers: log Σ_v exp(logit_v), for the z-loss. Differentiable.
      correct: 1.0 where no token scores higher than the target, else 0.0. Not differentiable.
    """

    logps: Array
    log_normalizers: Array
    correct: Array


class Settings(NamedTuple):
    """The sampled distribution (static): see `sampling.truncate`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    softcap: float | None
    chunk: int


def token_logps(model: Model, params: Params, batch: Any, **distribution: Any) -> PerToken:
    """log π(target) [B, T] in nats, float32, exactly 0 outside `batch.completion_mask`.

    π is the distribution that is sampled from: pass the sampler's `temperature`, `top_k`, `top_p`
    and `min_p` (see `token_scores`). Differentiable in `params`.
    """
    return token_scores(model, params, batch, **distribution).logps


def token_scores(
    model: Model,
    params: Params,
    batch: Any,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    noise: Float[Array, "B T D"] | None = None,
    chunk: int = CHUNK_TOKENS,
) -> TokenScores:
    """Scores of the targets of `batch` (inputs, targets, completion_mask, segment_ids, positions).

    `noise` is added to the token embeddings (NEFTune). The largest array is the logits of `chunk`
    tokens, [chunk, V] float32 (on a CPU [chunk, 2048], unless the distribution is truncated).
    """
    hidden = model.apply(params, batch.inputs, batch.segment_ids, batch.positions, noise)
    settings = Settings(temperature, top_k, top_p, min_p, model.config.final_softcap, chunk)
    return score_hidden(hidden, model.head(params), batch.targets, batch.completion_mask, settings)


def score_hidden(
    hidden: Hidden, head: Float[Array, "V D"], targets: Tokens, mask: Mask, settings: Settings
) -> TokenScores:
    """Scores of `targets` [B, T] under `softmax(transform(hidden @ head.T))`, where `mask`."""
    layout = layout_of(mask, settings.chunk)
    gather = functools.partial(jnp.take_along_axis, indices=layout.order, axis=1)
    packed = jnp.take_along_axis(hidden, layout.order[..., None], axis=1)
    scores = _score(settings, layout.size, packed, head, gather(targets), layout.chunks)
    restored = (jnp.take_along_axis(field, layout.inverse, axis=1) for field in scores)
    return TokenScores(*(jnp.where(mask, field, 0.0) for field in restored))


class Layout(NamedTuple):
    """Each row's masked positions moved to its front, and how many chunks hold them all."""

    order: Array  # [B, n * size], indices into T
    inverse: Array  # [B, T], indices into n * size
    size: int  # positions of a row in one chunk
    chunks: Array  # scalar: chunks that hold a masked position


def layout_of(mask: Mask, chunk: int) -> Layout:
    batch, length = mask.shape
    size = min(length, max(1, chunk // batch))
    order = jnp.argsort(~mask, axis=1, stable=True)
    inverse = jnp.argsort(order, axis=1)
    padding = -length % size
    order = jnp.pad(order, ((0, 0), (0, padding)), mode="edge")
    longest = jnp.max(jnp.sum(mask, axis=1))
    return Layout(order, inverse, size, (longest + size - 1) // size)


def logits_of(settings: Settings, raw: Array) -> Array:
    """From the product hidden @ head.T to the logits of the distribution that is sampled."""
    if settings.softcap is not None:
        raw = settings.softcap * jnp.tanh(raw / settings.softcap)
    temperature, top_k, top_p, min_p, _, _ = settings
    if (temperature, top_k, top_p, min_p) == (1.0, None, None, None):
        return raw
    return sampling.truncate(raw, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def project(hidden: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    return jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=jnp.float32)


def cut(x: Array, index: Array, size: int) -> Array:
    """Chunk `index` of x [B, n * size, ...], rows and positions joined: [B * size, ...]."""
    part = jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
    return part.reshape(-1, *x.shape[2:])


def paste(x: Array, part: Array, index: Array, size: int) -> Array:
    part = part.reshape(x.shape[0], size, *x.shape[2:])
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), index * size, axis=1)


class Running(NamedTuple):
    """What is known of a chunk's logits after some tiles of the vocabulary; [N] each."""

    highest: Array
    total: Array  # Σ exp(logit − highest)
    chosen: Array  # the target's logit


def over_tiles(
    settings: Settings, tile: int, head: Float[Array, "V D"], add: Callable[..., Any], carry: Any
) -> Any:
    """`carry = add(start, entries, carry)` for every `tile` entries of the head, the rest last.

    All entries at once where the distribution is truncated, which needs them together.
    """
    vocabulary = head.shape[0]
    truncated = (settings.top_k, settings.top_p, settings.min_p) != (None, None, None)
    size = vocabulary if truncated or settings.temperature == 0 else min(tile, vocabulary)

    def add_tile(index, carry):
        entries = jax.lax.dynamic_slice_in_dim(head, index * size, size)
        return add(index * size, entries, carry)

    tiles, rest = divmod(vocabulary, size)
    carry = jax.lax.fori_loop(0, tiles, add_tile, carry) if tiles > 1 else add_tile(0, carry)
    return add(tiles * size, head[tiles * size :], carry) if rest else carry


def forward_chunk(
    settings: Settings, tile: int, hidden: Array, head: Array, targets: Int[Array, " N"]
) -> TokenScores:
    """Scores of N tokens, a tile of the vocabulary at a time with a running softmax."""

    def add(start: Array | int, entries: Float[Array, "S D"], running: Running) -> Running:
        logits = logits_of(settings, project(hidden, entries))
        highest = jnp.maximum(running.highest, jnp.max(logits, axis=1))
        total = jnp.sum(jnp.exp(logits - highest[:, None]), axis=1)
        place, last = targets - start, entries.shape[0] - 1
        here = (place >= 0) & (place <= last)
        chosen = jnp.take_along_axis(logits, jnp.clip(place, 0, last)[:, None], axis=1)[:, 0]
        return Running(
            highest,
            running.total * jnp.exp(running.highest - highest) + total,
            jnp.where(here, chosen, running.chosen),
        )

    least = jnp.full(targets.shape, jnp.finfo(jnp.float32).min)
    zeros = jnp.zeros(targets.shape, jnp.float32)
    highest, total, chosen = over_tiles(settings, tile, head, add, Running(least, zeros, zeros))
    normalizers = highest + jnp.log(total)
    return TokenScores(chosen - normalizers, normalizers, (chosen >= highest).astype(jnp.float32))


def backward_chunk(
    settings: Settings,
    tile: int,
    hidden: Float[Array, "N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " N"],
    normalizers: Float[Array, " N"],
    gradients: tuple[Array, Array],
    head_gradient: Float[Array, "V D"],
) -> tuple[Array, Array]:
    """Gradient of N hidden states, and the head's with this chunk's share added.

    d logp = onehot − p and d log-normalizer = p, for logits computed again.
    """
    of_logps, of_normalizers = (g[:, None] for g in gradients)

    def add(start: Array | int, entries: Float[Array, "S D"], carry):
        hidden_gradient, head_gradient = carry
        logits, back = jax.vjp(functools.partial(logits_of, settings), project(hidden, entries))
        probabilities = jnp.exp(logits - normalizers[:, None])
        columns = start + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        onehot = jnp.where(columns == targets[:, None], of_logps, 0.0)
        gradient = onehot + probabilities * (of_normalizers - of_logps)
        gradient = back(gradient)[0].astype(hidden.dtype)
        share = jnp.einsum("nv,nd->vd", gradient, hidden, preferred_element_type=jnp.float32)
        share += jax.lax.dynamic_slice_in_dim(head_gradient, start, entries.shape[0])
        hidden_gradient += jnp.matmul(gradient, entries, preferred_element_type=jnp.float32)
        return hidden_gradient, jax.lax.dynamic_update_slice_in_dim(head_gradient, share, start, 0)

    start = (jnp.zeros(hidden.shape, jnp.float32), head_gradient)
    return over_tiles(settings, tile, head, add, start)


def by_platform(function: Any, *arguments: Any) -> Any:
    """Tiles of the vocabulary that stay in a CPU's cache; the whole of it on accelerators."""
    return jax.lax.platform_dependent(
        *arguments,
        cpu=functools.partial(function, CPU_TILE),
        default=functools.partial(function, sys.maxsize),
    )


def _score_plain(
    settings: Settings,
    size: int,
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B N"],
    chunks: Int[Array, ""],
) -> TokenScores:
    def score(tile, hidden, head, targets, chunks):
        def score_chunk(index, scores):
            here, wanted = cut(hidden, index, size), cut(targets, index, size)
            values = forward_chunk(settings, tile, here, head, wanted)
            return jax.tree.map(lambda x, part: paste(x, part, index, size), scores, values)

        zeros = jnp.zeros(targets.shape, jnp.float32)
        return jax.lax.fori_loop(0, chunks, score_chunk, TokenScores(zeros, zeros, zeros))

    return by_platform(score, hidden, head.astype(hidden.dtype), targets, chunks)


_score = jax.custom_vjp(_score_plain, nondiff_argnums=(0, 1))


def _score_forward(settings, size, hidden, head, targets, chunks):
    scores = _score(settings, size, hidden, head, targets, chunks)
    return scores, (hidden, head, targets, chunks, scores.log_normalizers)


def _score_backward(settings, size, saved, gradients):
    def back(tile, hidden, head, targets, chunks, normalizers, of_logps, of_normalizers):
        def add_chunk(index, carry):
            hidden_gradient, head_gradient = carry
            here, wanted, known, of_logp, of_normalizer = (
                cut(x, index, size)
                for x in (hidden, targets, normalizers, of_logps, of_normalizers)
            )
            part, head_gradient = backward_chunk(
                settings, tile, here, head, wanted, known, (of_logp, of_normalizer), head_gradient
            )
            return paste(hidden_gradient, part, index, size), head_gradient

        start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
        return jax.lax.fori_loop(0, chunks, add_chunk, start)

    hidden, head, targets, chunks, normalizers = saved
    hidden_gradient, head_gradient = by_platform(
        back,
        hidden,
        head.astype(hidden.dtype),
        targets,
        chunks,
        normalizers,
        gradients.logps,
        gradients.log_normalizers,
    )
    return hidden_gradient, head_gradient.astype(head.dtype), None, None


_score.defvjp(_score_forward, _score_backward)
