"""Sampling: `sample`, `sample_groups` for rollouts, `stream`, `generate_text` for texts."""

from jaxpost.rollout.generate import generate_text, stream
from jaxpost.rollout.sampler import Rollout, sample, sample_groups, unstarted
from jaxpost.rollout.shapes import Capacity
from jaxpost.rollout.slots import LENGTH, REASONS, STOP, STRING, UNFINISHED

__all__ = [
    "LENGTH",
    "REASONS",
    "STOP",
    "STRING",
    "UNFINISHED",
    "Capacity",
    "Rollout",
    "generate_text",
    "sample",
    "sample_groups",
    "stream",
    "unstarted",
]
