"""One door to attention: causal, grouped-query, segment-aware, with sliding window and soft-cap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import ad_checkpoint

from jaxpost.typing import Array, Bool, Float, Int

NEGATIVE = -1e30  # a masked score: finite, so that a row without any visible key stays finite
RESULT = "attention"  # the name under which a remat policy may keep output and normalizers
MIN_CHUNK = 128
MAX_CHUNKS = 8
BRANCH = 1 << 16  # above the segments of a row


class Scoring(NamedTuple):
    """How scores are made of q·k (static)."""

    scale: float
    softcap: float | None


class Seeing(NamedTuple):
    """Who sees whom: see `attend`."""

    segment_ids: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    window: Int[Array, ""] | None


def attend(
    q: Float[Array, "B T H hd"],
    k: Float[Array, "B T K hd"],
    v: Float[Array, "B T K hd"],
    segment_ids: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None = None,
    *,
    scale: float,
    window: Int[Array, ""] | int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H hd"]:
    """Causal attention within segments: softmax(softcap · tanh(scale · q·k / softcap)) · v.

    Query t sees key s iff s <= t, both lie in one segment and, with a window, their positions
    (None: their places in the row) are less than it apart. A segment s may have branches
    s + BRANCH · b: they see it and themselves, not one another. Queries are taken in chunks that
    skip the keys after them; the backward pass computes the scores again (as in arXiv 2205.14135),
    so that no [T, T] array outlives its chunk. Scores and the softmax are float32.
    """
    batch, length, heads, width = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, length, -1, groups, width).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, hd]
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)  # [B, K, T, hd]
    if positions is None:
        positions = jnp.arange(length)[None]
    seeing = Seeing(segment_ids, positions, None if window is None else jnp.asarray(window))
    out = _causal(Scoring(scale, softcap), q, k, v, seeing)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)


def query_chunks(length: int) -> list[tuple[int, int]]:
    size = max(MIN_CHUNK, -(-length // MAX_CHUNKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def visible_keys(seeing: Seeing, start: int, stop: int) -> Bool[Array, "B Q S"]:
    """Which of the first `stop` keys the queries start … stop-1 see."""
    segments, positions, window = seeing
    of_key = segments[:, None, :stop]
    visible = (segments[:, start:stop, None] == of_key) | (
        (segments % BRANCH)[:, start:stop, None] == of_key
    )
    visible &= jnp.arange(stop) <= jnp.arange(start, stop)[:, None]
    if window is not None:
        visible &= positions[:, start:stop, None] - positions[:, None, :stop] < window
    return visible


def scores_of(scoring: Scoring, q: Array, k: Array) -> Float[Array, "B K G Q S"]:
    """Scores of queries [B,K,G,Q,hd] over keys [B,K,S,hd]: one matrix product per KV head."""
    batch, kv_heads, groups, length, width = q.shape
    rows = q.reshape(batch, kv_heads, groups * length, width)
    scores = jnp.einsum("bkqd,bksd->bkqs", rows, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, kv_heads, groups, length, -1) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    return scores


def weighted(weights: Float[Array, "B K G Q S"], v: Float[Array, "B K S hd"]) -> Array:
    batch, kv_heads, groups, length, keys = weights.shape
    rows = weights.reshape(batch, kv_heads, groups * length, keys).astype(v.dtype)
    return jnp.einsum("bkqs,bksd->bkqd", rows, v).reshape(*weights.shape[:4], -1)


def softmax_over(
    scoring: Scoring, q: Array, k: Array, v: Array, visible: Bool[Array, "B Q S"]
) -> tuple[Array, Array]:
    """Attention output [B,K,G,Q,hd] and log-normalizers [B,K,G,Q] of one set of queries."""
    scores = jnp.where(visible[:, None, None], scores_of(scoring, q, k), NEGATIVE)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = weighted(weights, v) / total.astype(v.dtype)
    return out, (highest + jnp.log(total))[..., 0]


def _causal_plain(scoring: Scoring, q, k, v, seeing: Seeing):
    return _causal_forward(scoring, q, k, v, seeing)[0]


_causal = jax.custom_vjp(_causal_plain, nondiff_argnums=(0,))


def _causal_forward(scoring, q, k, v, seeing):
    outs, normalizers = [], []
    for start, stop in query_chunks(q.shape[3]):
        visible = visible_keys(seeing, start, stop)
        here = q[:, :, :, start:stop]
        out, normalizer = softmax_over(scoring, here, k[:, :, :stop], v[:, :, :stop], visible)
        outs.append(out)
        normalizers.append(normalizer)
    out, normalizer = (
        ad_checkpoint.checkpoint_name(jnp.concatenate(parts, axis=3), RESULT)
        for parts in (outs, normalizers)
    )
    return out, (q, k, v, seeing, out, normalizer)


def _causal_backward(scoring, saved, gradient):
    """With P the attention weights: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ − rowsum(dO ⊙ O))."""
    q, k, v, seeing, out, normalizer = saved
    dq, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    means = jnp.sum(gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    for start, stop in query_chunks(q.shape[3]):
        here = slice(start, stop)
        keys, values = k[:, :, :stop], v[:, :, :stop]
        visible = visible_keys(seeing, start, stop)[:, None, None]
        queries = q[:, :, :, here]
        scores = scores_of(scoring, queries, keys)
        weights = jnp.where(visible, jnp.exp(scores - normalizer[:, :, :, here, None]), 0.0)
        of_out = gradient[:, :, :, here]
        of_weights = scores_of(Scoring(1.0, None), of_out, values)
        of_scores = weights * (of_weights - means[:, :, :, here, None])
        if scoring.softcap is not None:
            of_scores *= 1 - jnp.square(scores / scoring.softcap)
        of_scores *= scoring.scale
        dq.append(weighted(of_scores, keys))
        dk = dk.at[:, :, :stop].add(gathered(of_scores, queries))
        dv = dv.at[:, :, :stop].add(gathered(weights, of_out))
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), None


def gathered(weights: Float[Array, "B K G Q S"], x: Float[Array, "B K G Q hd"]) -> Array:
    """Σ over queries and groups of weights · x: [B, K, S, hd], float32."""
    batch, kv_heads, groups, length, keys = weights.shape
    rows = weights.reshape(batch, kv_heads, groups * length, keys).astype(x.dtype)
    x = x.reshape(batch, kv_heads, groups * length, -1)
    return jnp.einsum("bkqs,bkqd->bksd", rows, x, preferred_element_type=jnp.float32)


_causal.defvjp(_causal_forward, _causal_backward)


def attend_masked(
    q: Float[Array, "B T H hd"],
    k: Float[Array, "B K S hd"],
    v: Float[Array, "B K S hd"],
    visible: Bool[Array, "B T S"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H hd"]:
    """Attention of T queries over a cache of S keys under an explicit mask."""
    batch, length, heads, width = q.shape
    q = q.reshape(batch, length, k.shape[1], -1, width).transpose(0, 2, 3, 1, 4)
    out, _ = softmax_over(Scoring(scale, softcap), q, k, v, visible)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, width)
