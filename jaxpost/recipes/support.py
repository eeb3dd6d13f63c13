"""Tokens that a distribution cannot draw: with top_k, top_p or min_p, at log-probability −∞.

A token was drawn from some policy's support. After an update, or under the reference, it may be in
no support any more; then log-ratios are infinite and say nothing about which way to go. A term
leaves such a token out: it is 0 there, and so is its gradient. How many there are is logged.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxpost.typing import Array


def inside(*logps: Any) -> Array:
    """Where all of them are finite."""
    return functools.reduce(jnp.logical_and, map(jnp.isfinite, logps))


def kept(logps: Array, others: Array) -> Array:
    """`logps`, and `others`, constants, outside their support: a ratio of 1."""
    return jnp.where(jnp.isfinite(logps), logps, others)


def within(term: Callable[..., Array], *logps: Array) -> Array:
    """`term` of log-probabilities, 0 where one of them is outside its support."""
    there = inside(*logps)
    return jnp.where(there, term(*(jnp.where(there, x, 0.0) for x in logps)), 0.0)
