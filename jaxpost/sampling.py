"""From logits to a token: temperature, top-k, top-p, min-p. One definition for sampler and trainer."""

import jax
import jax.numpy as jnp

from jaxpost.typing import Array, Float, Int


def truncate(
    logits: Float[Array, "*N V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Float[Array, "*N V"]:
    """Logits of the distribution that is sampled: divided by `temperature`, −inf where cut off.

    The cuts apply in this order, each to what the one before left:
    top_k keeps the k most probable tokens and any that tie with the last of them; top_p keeps the
    smallest set of most probable tokens whose mass reaches p, and ties with its last (at least
    one); min_p keeps tokens with at least min_p times the highest probability. Temperature 0 keeps
    only the most probable token, the first of equals. Differentiable through what is kept.

    Raises:
      ValueError: a setting outside its range.
    """
    check(temperature, top_k, top_p, min_p)
    if temperature == 0:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        columns = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
        return jnp.where(columns == best, 0.0, -jnp.inf).astype(logits.dtype)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        lowest = jax.lax.top_k(jax.lax.stop_gradient(logits), top_k)[0][..., -1:]
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    if top_p is not None and top_p < 1:
        ordered = jnp.flip(jnp.sort(jax.lax.stop_gradient(logits), axis=-1), axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
        before = jnp.concatenate([jnp.zeros_like(mass[..., :1]), mass[..., :-1]], axis=-1)
        lowest = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= lowest, logits, -jnp.inf)
    if min_p is not None and min_p > 0:
        highest = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
        logits = jnp.where(logits >= highest + jnp.log(min_p), logits, -jnp.inf)
    return logits


def check(
    temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    """Raises ValueError at a setting that names no distribution."""
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or above")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None for no limit")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must lie above 0 and up to 1, or be None")
    if min_p is not None and not 0 <= min_p <= 1:
        raise ValueError(f"min_p is {min_p}; it must lie in 0 … 1, or be None")


def sample_token(
    keys: Array,
    logits: Float[Array, "B V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
    """One token a row, and its log-probability (nats) in the distribution it was drawn from.

    A row's draw depends on its own key and logits only.
    """
    logits = truncate(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    if temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, jnp.zeros(tokens.shape, jnp.float32)
    tokens = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    logps = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return tokens, logps - jax.nn.logsumexp(logits, axis=-1)
