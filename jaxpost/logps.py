"""Log-probabilities of tokens: the only place with a vocabulary axis, and the door to float32.

Tokens are scored in chunks before the vocabulary projection, forward and backward, and only where
the completion mask asks for it. So no [B, T, V] array ever exists, and prompts and padding cost no
vocabulary product.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpost import sampling
from jaxpost.models.model import Model
from jaxpost.typing import Array, Float, Hidden, Int, Mask, Params, PerToken, Tokens

CHUNK_TOKENS = 1024  # tokens scored at once; their [chunk, V] logits are the largest array here


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

    `noise` is added to the token embeddings (NEFTune). The largest array is [chunk, V] float32.
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
    return sampling.truncate(
        raw, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )


def project(hidden: Float[Array, "N D"], head: Float[Array, "V D"]) -> Float[Array, "N V"]:
    return jnp.einsum("nd,vd->nv", hidden, head, preferred_element_type=jnp.float32)


def cut(x: Array, index: Array, size: int) -> Array:
    """Chunk `index` of x [B, n * size, ...], rows and positions joined: [B * size, ...]."""
    part = jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1)
    return part.reshape(-1, *x.shape[2:])


def paste(x: Array, part: Array, index: Array, size: int) -> Array:
    part = part.reshape(x.shape[0], size, *x.shape[2:])
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), index * size, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _score(
    settings: Settings,
    size: int,
    hidden: Float[Array, "B N D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B N"],
    chunks: Int[Array, ""],
) -> TokenScores:
    head = head.astype(hidden.dtype)

    def score_chunk(index, scores):
        logits = logits_of(settings, project(cut(hidden, index, size), head))
        chosen = jnp.take_along_axis(logits, cut(targets, index, size)[:, None], axis=1)[:, 0]
        highest = jnp.max(logits, axis=1)
        normalizer = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[:, None]), axis=1))
        values = TokenScores(chosen - normalizer, normalizer, (chosen >= highest).astype(jnp.float32))
        return jax.tree.map(lambda x, part: paste(x, part, index, size), scores, values)

    zeros = jnp.zeros(targets.shape, jnp.float32)
    return jax.lax.fori_loop(0, chunks, score_chunk, TokenScores(zeros, zeros, zeros))


def _score_forward(settings, size, hidden, head, targets, chunks):
    scores = _score(settings, size, hidden, head, targets, chunks)
    return scores, (hidden, head, targets, chunks, scores.log_normalizers)


def _score_backward(settings, size, saved, gradients):
    """d logp = onehot − p and d log-normalizer = p, for logits recomputed chunk by chunk."""
    hidden, head, targets, chunks, normalizers = saved
    weights = head.astype(hidden.dtype)

    def add_chunk(index, carry):
        hidden_gradient, head_gradient = carry
        here = cut(hidden, index, size)
        logits, back = jax.vjp(functools.partial(logits_of, settings), project(here, weights))
        of_logps = cut(gradients.logps, index, size)[:, None]
        of_normalizers = cut(gradients.log_normalizers, index, size)[:, None]
        probabilities = jnp.exp(logits - cut(normalizers, index, size)[:, None])
        columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        is_target = columns == cut(targets, index, size)[:, None]
        gradient = jnp.where(is_target, of_logps, 0.0) + probabilities * (of_normalizers - of_logps)
        gradient = back(gradient)[0].astype(hidden.dtype)
        head_gradient += jnp.einsum(
            "nv,nd->vd", gradient, here, preferred_element_type=jnp.float32
        )
        return paste(hidden_gradient, gradient @ weights, index, size), head_gradient

    start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32))
    hidden_gradient, head_gradient = jax.lax.fori_loop(0, chunks, add_chunk, start)
    return hidden_gradient, head_gradient.astype(head.dtype), None, None


_score.defvjp(_score_forward, _score_backward)
