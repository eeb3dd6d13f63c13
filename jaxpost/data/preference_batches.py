"""Judged completions to the arrays of a batch."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxpost import batch as batches
from jaxpost.batch import Example, PreferenceBatch, StepBatch, TokenBatch, UnpairedBatch
from jaxpost.data.preference_tokens import Judged
from jaxpost.data.windows import empty

Items = Sequence[Judged | None]
PARTS = 8  # lengths of a batch are these parts of the longest, so that few shapes are compiled


def room(longest: int, most: int) -> int:
    """`longest` rounded up to an eighth of `most`, and no more than that."""
    step = -(-most // PARTS)
    return min(-(-longest // step) * step, most)


@dataclasses.dataclass(frozen=True)
class Compared:
    """Items to rows of `count` completions; None is a row of padding."""

    count: int
    end: bool

    def __call__(self, items: Items, length: int) -> PreferenceBatch:
        shape = (len(items), self.count)
        fields = empty(len(items) * self.count, length)
        tokens = TokenBatch(*(field.reshape(*shape, length) for field in fields))
        ends, present = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for row, item in enumerate(items):
            for place, example in enumerate(item.examples if item else ()):
                ends[row, place] = put(tokens, (row, place), example, self.end)
                present[row, place] = True
        margins = np.array([item.values[0] if item else 0 for item in items], np.float32)
        return PreferenceBatch(tokens, ends, present, margins, *known(items))


@dataclasses.dataclass(frozen=True)
class Single:
    """Items to one completion a row, with that of an earlier row after this one's prompt."""

    end: bool

    def __call__(self, items: Items, length: int) -> UnpairedBatch:
        tokens, mismatched = empty(len(items), length), empty(len(items), length)
        ends = np.zeros(len(items), np.int32)
        for row, item in enumerate(items):
            if item:
                ends[row] = put(tokens, (row,), item.examples[0], self.end)
                other = exchanged(item, partner(items, row))
                other = Example(*(field[: length + 1 - self.end] for field in other))
                put(mismatched, (row,), other, self.end)
        labels = np.array([bool(item and item.values[0]) for item in items])
        weights, rows = known(items)
        return UnpairedBatch(tokens, ends, labels, weights, rows, mismatched)


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """Items to one answer a row, read to its last token."""

    def __call__(self, items: Items, length: int) -> StepBatch:
        tokens = empty(len(items), length)
        mask = np.zeros(tokens.inputs.shape, bool)
        labels = np.zeros(mask.shape, np.float32)
        for row, item in enumerate(items):
            if item:
                (example,) = item.examples
                put(tokens, (row,), example, True)
                mask[row, : len(example.mask)] = example.mask
                labels[row, mask[row]] = item.values
        read = tokens.inputs, tokens.segment_ids, tokens.positions
        return StepBatch(*read, mask, labels, *known(items))


def put(tokens: TokenBatch, place: tuple[int, ...], example: Example, end: bool) -> int:
    """Writes a sequence into its row; returns where the last token that is read stands.

    With `end` that is the last token of all, after which there is no target.
    """
    if end:
        more = np.append(example.tokens, example.tokens[-1:]), np.append(example.mask, False)
        example = Example(*more, np.append(example.weights, np.float32(0)))
    pairs = batches.shift(example)
    row = batches.row_of([pairs], tokens.inputs.shape[-1])
    for field, values in zip(tokens, row, strict=True):
        field[place] = values
    return len(pairs.inputs) - 1


def partner(items: Items, row: int) -> Judged:
    """The last item before a row that has another prompt, around the end; else the one before."""
    before = [item for item in (*items[row::-1], *items[:row:-1]) if item]
    others = (item for item in before if prompt_of(item) != prompt_of(before[0]))
    return next(others, before[1 % len(before)])


def prompt_of(item: Judged) -> bytes:
    return item.examples[0].tokens[: item.prompt].tobytes()


def exchanged(asked: Judged, answered: Judged) -> Example:
    """The prompt of one and the completion of another."""
    parts = zip(asked.examples[0], answered.examples[0], strict=True)
    whole = [np.concatenate([a[: asked.prompt], b[answered.prompt :]]) for a, b in parts]
    return Example(*whole)


def known(items: Items) -> tuple[np.ndarray, np.ndarray]:
    """The weights and the numbers of rows."""
    weights = np.array([item.weight if item else 0 for item in items], np.float32)
    return weights, np.array([item.row if item else -1 for item in items], np.int32)
