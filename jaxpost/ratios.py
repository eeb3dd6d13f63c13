"""Ratios of probabilities, formed in log space and kept finite."""

import jax
import jax.numpy as jnp

from jaxpost.typing import Array

EXPONENT = 20.0  # e^20 ≈ 5e8; a log-ratio beyond it has no gradient
FAR = 1e6  # nats; so that a square is finite even of a logit that was masked out


def log_ratio(logps: Array, other_logps: Array) -> Array:
    """log π − log π_other, π_other constant; within ±FAR."""
    return jnp.clip(logps - jax.lax.stop_gradient(other_logps), -FAR, FAR)


def bounded(log_ratios: Array) -> Array:
    """Log-ratios within ±EXPONENT."""
    return jnp.clip(log_ratios, -EXPONENT, EXPONENT)


def exponential(log_ratios: Array) -> Array:
    """exp of log-ratios within ±EXPONENT."""
    return jnp.exp(bounded(log_ratios))


def ratio(logps: Array, other_logps: Array) -> Array:
    """π / π_other, π_other constant."""
    return exponential(log_ratio(logps, other_logps))
