"""One door to attention: causal, grouped-query, segment-aware, with sliding window and soft-cap."""

import jax
import jax.numpy as jnp

from jaxpost.typing import Array, Bool, Float, Int

NEGATIVE = -1e30  # a masked score: finite, so that a row without any visible key stays finite
MIN_CHUNK = 128
MAX_CHUNKS = 8


def attend(
    q: Float[Array, "B T H hd"],
    k: Float[Array, "B T K hd"],
    v: Float[Array, "B T K hd"],
    segment_ids: Int[Array, "B T"],
    *,
    scale: float,
    window: Int[Array, ""] | int | None = None,
    softcap: float | None = None,
) -> Float[Array, "B T H hd"]:
    """Causal attention within segments: softmax(softcap · tanh(scale · q·k / softcap)) · v.

    Query t sees key s iff s <= t, both lie in one segment and, with a window, t - s < window.
    Queries are taken in chunks that skip the keys after them, so that no [T, T] array of scores
    exists for long rows. Scores and the softmax are float32.
    """
    length = q.shape[1]
    size = max(MIN_CHUNK, -(-length // MAX_CHUNKS))
    chunks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        rows, cols = jnp.arange(start, stop)[:, None], jnp.arange(stop)[None, :]
        visible = (cols <= rows) & (segment_ids[:, start:stop, None] == segment_ids[:, None, :stop])
        if window is not None:
            visible &= rows - cols < window
        chunks.append(
            attend_masked(
                q[:, start:stop], k[:, :stop], v[:, :stop], visible, scale=scale, softcap=softcap
            )
        )
    return jnp.concatenate(chunks, axis=1) if len(chunks) > 1 else chunks[0]


def attend_masked(
    q: Float[Array, "B T H hd"],
    k: Float[Array, "B S K hd"],
    v: Float[Array, "B S K hd"],
    visible: Bool[Array, "B T S"],
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "B T H hd"]:
    """Attention of T queries over S keys under an explicit mask; H is a multiple of K."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible[:, None, None], scores, NEGATIVE)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", probabilities, v).reshape(q.shape)
