"""What a score is, and of which distribution."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxpost import sampling
from jaxpost.typing import Array

CHUNK_TOKENS = 2048  # tokens scored at once


class TokenScores(NamedTuple):
    """What the model makes of each target; every field is [B, T] and 0 outside the mask.

    Attributes:
      logps: log π(target), nats. Differentiable.
      log_normalizers: log Σ_v exp(logit_v), for the z-loss. Differentiable.
      correct: 1.0 where no token scores higher than the target, else 0.0. Not differentiable.
      entropies: −Σ_v π(v) log π(v), nats; 0 unless asked for. Differentiable.
    """

    logps: Array
    log_normalizers: Array
    correct: Array
    entropies: Array


class Settings(NamedTuple):
    """The sampled distribution (static), see `sampling.truncate`, and what to compute of it."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    softcap: float | None
    chunk: int
    entropies: bool = False

    @property
    def whole(self) -> bool:
        """Whether the distribution needs all of a token's logits together."""
        truncated = (self.top_k, self.top_p, self.min_p) != (None, None, None)
        return truncated or sampling.is_greedy(self.temperature)


def logits_of(settings: Settings, raw: Array) -> Array:
    """From the product hidden @ head.T to the logits of the distribution that is sampled."""
    if settings.softcap is not None:
        raw = settings.softcap * jnp.tanh(raw / settings.softcap)
    temperature, top_k, top_p, min_p, *_ = settings
    if (temperature, top_k, top_p, min_p) == (1.0, None, None, None):
        return raw
    return sampling.truncate(raw, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
