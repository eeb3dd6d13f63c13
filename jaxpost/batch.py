"""Batches of tokens: the one shift, best-fit packing, and the layout every loss relies on.

Works on NumPy arrays, so that data workers need no device; a batch is moved to one by `jax.jit`.
"""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Example(NamedTuple):
    """One tokenised sequence, before the shift.

    Attributes:
      tokens: [n] int32.
      mask: [n] bool, whether token i is trained when it is the target.
      weights: [n] float32, the importance of token i as a target; 0 where `mask` is False.
    """

    tokens: np.ndarray
    mask: np.ndarray
    weights: np.ndarray


class TokenBatch(NamedTuple):
    """A batch for next-token losses; every field is [B, T] and aligned to `targets`.

    Attributes:
      inputs: tokens read.
      targets: tokens to predict: `targets[b, t]` follows `inputs[b, t]` in the same segment.
      completion_mask: whether the target is trained (EOS included, nothing after it).
      loss_weights: importance of each target, 0 outside the mask; normalised once an update.
      segment_ids: 1, 2, … for the sequences packed in a row; 0 for padding.
      positions: position of the input in its own sequence, starting at 0.
    """

    inputs: Any
    targets: Any
    completion_mask: Any
    loss_weights: Any
    segment_ids: Any
    positions: Any


class Pairs(NamedTuple):
    """Sequences after the shift: n-1 aligned (input, target) pairs each."""

    inputs: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    weights: np.ndarray


def shift(example: Example) -> Pairs:
    """Aligns sequences [..., n] to their targets: pair t reads token t and predicts token t+1.

    The only place where anything is shifted. Because sequences are shifted before they are packed,
    no target can lie across a boundary.
    """
    tokens, mask, weights = example
    return Pairs(tokens[..., :-1], tokens[..., 1:], mask[..., 1:], weights[..., 1:])


def token_batch(tokens: Any, mask: Any, weights: Any = None) -> TokenBatch:
    """A batch [B, n-1] of B sequences of n tokens; padding at their ends has the mask False.

    Args:
      tokens: [B, n] integers.
      mask: [B, n], whether token i is trained when it is the target.
      weights: [B, n], the importance of token i as a target; None: the same for all.

    Raises:
      ValueError: the shapes are not the same.
    """
    tokens, mask = np.asarray(tokens, np.int32), np.asarray(mask, bool)
    weights = mask if weights is None else np.where(mask, weights, 0.0)
    if tokens.ndim != 2 or not tokens.shape == mask.shape == weights.shape:
        raise ValueError(
            f"tokens {tokens.shape}, mask {mask.shape} and weights {weights.shape} need one shape "
            "[B, n]: entry i of the mask says whether token i itself is trained"
        )
    pairs = shift(Example(tokens, mask, weights.astype(np.float32)))
    ones = np.ones_like(pairs.inputs)
    return TokenBatch(
        *pairs, segment_ids=ones, positions=np.cumsum(ones, axis=1, dtype=np.int32) - 1
    )


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into bins of `capacity`: longest first, each into the fullest bin that takes it.

    Ties go to the earlier item and the earlier bin, so the result is a function of the lengths
    alone. Bins come in the order in which they were opened, items in the order they were placed.

    >>> best_fit_decreasing([4, 2, 4, 1], 4)
    [[0], [2], [1, 3]]
    """
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []  # (room left, bin), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        if length > capacity:
            raise ValueError(f"item {item} has length {length}, over the capacity of {capacity}")
        found = bisect.bisect_left(space, (length, -1))
        if found == len(space):
            room, index = capacity, len(bins)
            bins.append([])
        else:
            room, index = space.pop(found)
        bins[index].append(item)
        bisect.insort(space, (room - length, index))
    return bins


def row_of(sequences: Sequence[Pairs], length: int) -> TokenBatch:
    """One row [T] holding the given sequences one after another, padded to `length`."""
    row = empty_row(length)
    start = 0
    for number, sequence in enumerate(sequences, 1):
        stop = start + len(sequence.inputs)
        if stop > length:
            raise ValueError(f"{stop} tokens do not fit in a row of {length}")
        here = slice(start, stop)
        row.inputs[here], row.targets[here] = sequence.inputs, sequence.targets
        row.completion_mask[here] = sequence.mask
        row.loss_weights[here] = np.where(sequence.mask, sequence.weights, 0.0)
        row.segment_ids[here] = number
        row.positions[here] = np.arange(stop - start)
        start = stop
    return row


def empty_row(length: int) -> TokenBatch:
    """A row of padding: segment 0, nothing to predict."""
    integers = [np.zeros(length, np.int32) for _ in range(4)]
    inputs, targets, segment_ids, positions = integers
    mask, weights = np.zeros(length, bool), np.zeros(length, np.float32)
    return TokenBatch(inputs, targets, mask, weights, segment_ids, positions)


def stack(rows: Sequence[TokenBatch]) -> TokenBatch:
    """Rows [T] to a batch [B, T]."""
    return TokenBatch(*(np.stack(field) for field in zip(*rows, strict=True)))


class PreferenceBatch(NamedTuple):
    """Completions of the same prompts side by side; a row is a pair (K = 2), or a ranked list.

    Attributes:
      tokens: [B, K, T] each field, the best completion first; the prompt begins every sequence.
      ends: [B, K] where the last token that is read stands in its sequence.
      present: [B, K] the completions that there are; False where a list is shorter, or in padding.
      margins: [B] how much better the first is, where the data says so; else 0.
      weights: [B] 1 over the pairs that are made of the same row of data; 0 for padding.
      rows: [B] the row's number among all rows of the data; -1 for padding.
    """

    tokens: TokenBatch
    ends: Any
    present: Any
    margins: Any
    weights: Any
    rows: Any


class UnpairedBatch(NamedTuple):
    """Completions that are desirable or not.

    Attributes:
      tokens: [B, T] each field.
      ends, weights, rows: [B], as in `PreferenceBatch`.
      labels: [B] bool, whether the completion is desirable.
      mismatched: [B, T] each field: each row's prompt, and a completion of another prompt.
    """

    tokens: TokenBatch
    ends: Any
    labels: Any
    weights: Any
    rows: Any
    mismatched: TokenBatch


class StepBatch(NamedTuple):
    """Answers of which each step is judged once its last token is read.

    Attributes:
      inputs, segment_ids, positions: [B, T] tokens read, as in `TokenBatch`.
      step_mask: [B, T] whether `inputs[b, t]` ends a step.
      labels: [B, T] how right that step is, from 0 to 1; 0 outside the mask.
      weights, rows: [B], as in `PreferenceBatch`.
    """

    inputs: Any
    segment_ids: Any
    positions: Any
    step_mask: Any
    labels: Any
    weights: Any
    rows: Any


def flat(tokens: TokenBatch) -> TokenBatch:
    """[B, K, T] → [B · K, T]: row K b + k is completion k of row b."""
    return TokenBatch(*(field.reshape(-1, field.shape[-1]) for field in tokens))
