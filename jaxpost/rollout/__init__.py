"""Sampling: `sample` for rollouts, `stream` for the terminal, `generate_text` for evaluation."""

from jaxpost.rollout.generate import generate_text, stream
from jaxpost.rollout.sampler import Capacity, Rollout, sample
from jaxpost.rollout.slots import LENGTH, REASONS, STOP, STRING

__all__ = [
    "LENGTH",
    "REASONS",
    "STOP",
    "STRING",
    "Capacity",
    "Rollout",
    "generate_text",
    "sample",
    "stream",
]
