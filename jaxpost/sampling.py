"""Logits to tokens: temperature, top-k, top-p and min-p, the same for the sampler and the trainer.

`truncate` turns a model's logits into those of the distribution that is sampled. The sampler draws
from it and `logps.token_logps` scores with it, so their log-probabilities agree. Where two logits
differ by less than the rounding between two programs, a token on the edge of the kept set may be
kept by one and not by the other.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpost.typing import Array, Bool, Float, Int

COLDEST = 1e-20  # below it logits / temperature may overflow, and only the highest is drawn
TOP_P_TOLERANCE = 1e-6  # a sum of float32 probabilities this close to `top_p` reaches it
BLOCK = 256  # tokens in a block of `draw`
ONE = 0x3F800000  # the bits of float32 1.0: those of non-negative floats are ordered as they are


def truncate(
    logits: Float[Array, "*B V"],
    *,
    temperature: float | Array = 1.0,
    top_k: int | None = None,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
) -> Float[Array, "*B V"]:
    """Logits of the distribution sampled: `logits / temperature` where kept, -inf elsewhere.

    Each rule acts on the distribution that the ones before it left, renormalised:

    1. `temperature` divides; 0 (or less than 1e-20) is greedy and keeps only the highest logit
       (unscaled).
    2. `top_k` keeps exactly the k most probable tokens (all, if there are no more than k).
    3. `top_p` keeps the smallest set of most probable tokens whose mass is at least p (within
       1e-6, for float32 sums); always at least one, and all for p = 1 (arXiv 1904.09751).
    4. `min_p` keeps tokens with at least `min_p` times the highest probability (arXiv 2407.01082).

    Of equal logits at the edge of rules 1 to 3 the lower token ids are kept; rule 4 keeps equals
    together. The kept set is a constant to differentiation; gradients pass through kept logits.
    `top_k`, and whether a rule is there and the temperature is greedy, are static; the other
    numbers may be traced (a traced temperature must be 1e-20 or more).

    Raises:
      ValueError: a setting is out of its range.
    """
    check_settings(temperature, top_k, top_p, min_p)
    if is_greedy(temperature):
        return jnp.where(one_hot_of_highest(logits), logits, -jnp.inf)
    logits = logits / temperature
    fixed = jax.lax.stop_gradient(logits)
    if top_k is not None and top_k < logits.shape[-1]:
        fixed = jnp.where(keep_top_k(fixed, top_k), fixed, -jnp.inf)
    if top_p is not None:
        fixed = jnp.where(keep_top_p(jax.nn.softmax(fixed), top_p), fixed, -jnp.inf)
    if min_p is not None:
        floor = jnp.max(fixed, axis=-1, keepdims=True) + jnp.log(min_p)
        fixed = jnp.where(fixed >= floor, fixed, -jnp.inf)
    return logits if (top_k, top_p, min_p) == (None, None, None) else where_kept(fixed, logits)


def sample_token(
    keys: Array | None,
    logits: Float[Array, "*B V"],
    *,
    temperature: float | Array = 1.0,
    top_k: int | None = None,
    top_p: float | Array | None = None,
    min_p: float | Array | None = None,
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Draws a token from each row, and its log-probability (nats) under `truncate`'s distribution.

    `keys` holds one random key a row, and a row's draw depends on its own key and logits only.
    Greedy draws use no key and have log-probability 0.
    """
    check_settings(temperature, top_k, top_p, min_p)
    kept, row = logits, draw
    if is_greedy(temperature):
        keys = None
    else:
        kept = truncate(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for _ in logits.shape[:-1]:
        row = jax.vmap(row)
    return row(keys, kept)


def draw(key: Array | None, logits: Float[Array, " V"]) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """A token and its log-probability; without a key the highest logit, and 0.

    Drawn in two stages, since noise for a whole vocabulary costs more than the layers of a small
    model: first a block of BLOCK tokens by its mass, then a token of that block, each as the
    highest of log-probabilities with Gumbel noise. Exact, and a rounding error of the logits
    changes a draw as rarely as with noise on every token.
    """
    size = min(BLOCK, logits.shape[-1])
    padding = (0, -logits.shape[-1] % size)
    blocks = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(-1, size)
    if key is None:
        block = jnp.argmax(jnp.max(blocks, axis=-1))
        token = jnp.argmax(blocks[block])
        highest = blocks[block, token]
        return (block * size + token).astype(jnp.int32), highest - highest  # NaN stays NaN
    masses = jax.nn.logsumexp(blocks, axis=-1)
    noise = jax.random.gumbel(key, (len(masses) + size,))
    block = jnp.argmax(masses + noise[: len(masses)])
    token = jnp.argmax(blocks[block] + noise[len(masses) :])
    logp = blocks[block, token] - jax.nn.logsumexp(masses)
    return (block * size + token).astype(jnp.int32), logp


def is_greedy(temperature: float | Array) -> bool:
    """Whether a temperature is 0, or as good as that (a traced one never is)."""
    return not isinstance(temperature, jax.Array) and temperature < COLDEST


def check_settings(temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> None:
    """Raises ValueError for a number out of its range; traced numbers are not looked at."""
    bounds = {
        "temperature": (temperature, temperature_ok, "0 (greedy) or more, and finite"),
        "top_k": (top_k, lambda k: k >= 1, "1 or more; leave it out (None) to keep all tokens"),
        "top_p": (top_p, lambda p: 0 < p <= 1, "over 0 and up to 1"),
        "min_p": (min_p, lambda p: 0 <= p <= 1, "from 0 to 1"),
    }
    for name, (value, is_right, range_) in bounds.items():
        if value is not None and not isinstance(value, jax.Array) and not is_right(value):
            raise ValueError(f"{name} is {value}; it must be {range_}")


def temperature_ok(temperature: float) -> bool:
    return 0 <= temperature < float("inf")


def one_hot_of_highest(logits: Float[Array, "*B V"]) -> Bool[Array, "*B V"]:
    highest = jnp.argmax(logits, axis=-1, keepdims=True)
    return jnp.arange(logits.shape[-1]) == highest


def where_kept(fixed: Float[Array, "*B V"], logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
    return jnp.where(fixed > -jnp.inf, logits, -jnp.inf)


def keep_top_k(logits: Float[Array, "*B V"], k: int) -> Bool[Array, "*B V"]:
    """The k highest logits of each row, lower ids first among equals."""
    edge = jax.lax.top_k(logits, k)[0][..., -1:]
    above = jnp.sum(logits > edge, axis=-1, keepdims=True)
    return keep_down_to(edge, k - above, logits)


def keep_top_p(probabilities: Float[Array, "*B V"], p: float | Array) -> Bool[Array, "*B V"]:
    """The smallest set of most probable tokens with mass p, lower ids first among equals.

    Finds the least probability in the set by bisection over its 30 bits: exact, and a few passes
    over the vocabulary instead of a sort of it.
    """
    target = jnp.maximum(jnp.asarray(p, jnp.float32) - TOP_P_TOLERANCE, TOP_P_TOLERANCE**2)
    target = jnp.where(jnp.asarray(p) < 1, target, jnp.inf)  # 1 keeps even what rounds to nothing
    probabilities = probabilities.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)

    def mass(edge: Int[Array, "*B 1"]) -> Float[Array, "*B 1"]:
        return jnp.sum(jnp.where(bits >= edge, probabilities, 0.0), axis=-1, keepdims=True)

    def halve(_, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # mass(low) >= target > mass(high), low = 0 aside
        middle = (low + high) // 2
        enough = mass(middle) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    zeros = jnp.zeros((*probabilities.shape[:-1], 1), jnp.int32)
    edge, above = jax.lax.fori_loop(0, 30, halve, (zeros, zeros + ONE + 1))
    probability = jax.lax.bitcast_convert_type(edge, jnp.float32)
    return keep_down_to(probability, jnp.ceil((target - mass(above)) / probability), probabilities)


def keep_down_to(
    edge: Float[Array, "*B 1"], equals: Array, scores: Float[Array, "*B V"]
) -> Bool[Array, "*B V"]:
    """Scores over `edge`, and the first `equals` of those that equal it."""
    equal = scores == edge
    return (scores > edge) | (equal & (jnp.cumsum(equal, axis=-1) <= equals))
