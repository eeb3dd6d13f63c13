"""The few shapes that sampling is compiled for: counts and lengths are rounded up to them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxpost.rollout.text import Ids

CHUNK = 128  # prompt tokens read at once
SMALLEST = 16  # the least length that is compiled for
PREFILL_ROWS = 32  # prompts read at once
NARROWER = 4  # when no more than a quarter of the slots is busy, the others are left out


class Capacity(NamedTuple):
    """The shapes to compile for; they are rounded up, and raised where a call needs more.

    Give the largest that is to come, and a first small batch compiles for all.

    Attributes:
      rows: sequences sampled at once.
      prompts: different prompts among them.
      prompt_tokens: of the longest prompt.
      new_tokens: the largest `max_new_tokens`.
    """

    rows: int = 1
    prompts: int = 1
    prompt_tokens: int = 1
    new_tokens: int = 1


class Shapes(NamedTuple):
    """What is compiled for.

    Attributes:
      widths: slots, and the fewer that are left when the last sequences come to their end (if any).
      length: of the cache.
      new_tokens: room for a completion.
      prompts, prompt_tokens: of the prompts read at once.
    """

    widths: tuple[int, ...]
    length: int
    new_tokens: int
    prompts: int
    prompt_tokens: int


def shapes_for(
    need: Capacity, capacity: Capacity, slots: int | None, devices: int, continued: bool
) -> Shapes:
    """The shapes of a call that needs `need`; rows are a multiple of `devices`.

    Where completions are continued, what is read may be as long as the cache.
    """
    rows, prompts, prompt_tokens, new_tokens = map(max, need, capacity)
    width = bucket(rows) if slots is None else min(slots, bucket(rows))
    widths = [multiple(width, devices)]
    narrower = multiple(width // NARROWER, devices)
    if narrower * NARROWER <= widths[0]:
        widths.append(narrower)
    length = bucket_length(prompt_tokens + new_tokens)
    return Shapes(
        tuple(widths),
        length,
        bucket_length(new_tokens),
        multiple(bucket(min(prompts, PREFILL_ROWS, width)), devices),
        length if continued else bucket_length(prompt_tokens),
    )


def multiple(count: int, of: int) -> int:
    """The least multiple of `of`, itself at least, that is not under `count`."""
    return max(-(-count // of), 1) * of


def bucket(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, … that is not under `count`."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def bucket_length(length: int) -> int:
    """The least of 16, 32, 64, CHUNK and multiples of CHUNK by a `bucket` that is not under it."""
    if length > CHUNK:
        return CHUNK * bucket(-(-length // CHUNK))
    return max(SMALLEST, 1 << max(length - 1, 0).bit_length())


def padded(sequences: Sequence[Ids], rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequences as an array [rows, width], 0 after their ends, and their lengths [rows]."""
    tokens, lengths = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)], lengths[row] = sequence, len(sequence)
    return tokens, lengths
