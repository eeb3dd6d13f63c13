"""A window of rows to packed rows of tokens: the unit of work of a data worker.

A window is a fixed run of consecutive rows of the stream, packed on its own. So what comes out does
not depend on how many workers there are, and a position is (window, row of it).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpost import batch as batches
from jaxpost.batch import Example, Pairs, TokenBatch
from jaxpost.data.rows import Dropped, Note, Noted, TextRow

Tokenize = Callable[[Any], Example | Noted | Dropped]
TooLong = Literal["auto", "drop", "split", "truncate", "error"]


class Window(NamedTuple):
    """Packed rows.

    Attributes:
      batch: [R, T] each field; of comparisons, which are not packed, R items.
      examples: [R] how many examples end in each row.
      dropped: the rows that are not among them, in the order in which they were read.
      notes: what there is to tell about those that are.
    """

    batch: Any
    examples: np.ndarray
    dropped: tuple[Dropped, ...]
    notes: tuple[Note, ...]


@dataclasses.dataclass(frozen=True)
class MakeWindow:
    """(number of the window, its rows) → Window.

    Attributes:
      tokenize: row → Example (or Noted: with notes) or Dropped.
      length: T, the number of targets that a row has room for.
      packing: whether several sequences may share a row.
      too_long: what becomes of a sequence of more than T targets; `auto` splits plain text and
        drops anything else.
      malformed: whether a row that `tokenize` refuses is an error or dropped.
      seed: of the order of a window's rows, since packing puts long sequences first; None keeps the
        order of their first sequences.
    """

    tokenize: Tokenize
    length: int
    packing: bool
    too_long: TooLong
    malformed: Literal["error", "drop"]
    seed: int | None

    def __call__(self, number: int, rows: Sequence[Any]) -> Window:
        pieces, ends, dropped, notes = [], [], [], []
        for row in rows:
            found = self.pieces(row, notes)
            if isinstance(found, Dropped):
                dropped.append(found)
            else:
                pieces.extend(found)
                ends.extend([0] * (len(found) - 1) + [1])
        bins = self.bins([len(piece.inputs) for piece in pieces], number)
        packed = [batches.row_of([pieces[i] for i in bin], self.length) for bin in bins]
        stacked = batches.stack(packed) if packed else empty(0, self.length)
        examples = np.array([sum(ends[i] for i in bin) for bin in bins], np.int32)
        return Window(stacked, examples, tuple(dropped), tuple(notes))

    def bins(self, lengths: Sequence[int], number: int) -> list[list[int]]:
        """Which pieces share a row, in the order of the rows."""
        if not self.packing:
            return [[item] for item in range(len(lengths))]
        bins = batches.best_fit_decreasing(lengths, self.length)
        if self.seed is None:
            return sorted(bins, key=min)
        order = np.random.Generator(np.random.Philox([self.seed, number])).permutation(len(bins))
        return [bins[i] for i in order]

    def pieces(self, row: Any, notes: list[Note]) -> list[Pairs] | Dropped:
        """A row's sequences after the shift, none longer than T and each with a target.

        What there is to tell about a row that is not dropped is added to `notes`.
        """
        if isinstance(row, Dropped):
            return row
        try:
            example = self.tokenize(row)
        except ValueError as error:
            message = str(error) if row.where in str(error) else f"{row.where}: {error}"
            if self.malformed == "drop":
                return Dropped("malformed", message)
            raise ValueError(message) from error
        if isinstance(example, Dropped):
            return example
        example, told = example if isinstance(example, Noted) else (example, ())
        pieces = self.fitting(batches.shift(example), row)
        notes += () if isinstance(pieces, Dropped) else told
        return pieces

    def fitting(self, pairs: Pairs, row: Any) -> list[Pairs] | Dropped:
        """The pieces of a sequence, or Dropped where none has a target."""
        if len(pairs.inputs) == 0:
            return Dropped("empty_target", row.where)
        if not pairs.mask.any():
            return Dropped("fully_masked", row.where)
        if len(pairs.inputs) > self.length:
            return self.shortened(pairs, row)
        return [pairs]

    def shortened(self, pairs: Pairs, row: Any) -> list[Pairs] | Dropped:
        """Pieces of a sequence that is too long, or Dropped."""
        too_long, T = self.too_long, self.length
        if too_long == "auto":
            too_long = "split" if isinstance(row, TextRow) else "drop"
        if too_long == "error":
            raise ValueError(
                f"{row.where}: {len(pairs.inputs)} targets, where a row has room for {T}; raise "
                "max_length, or set too_long to drop, split or truncate"
            )
        if too_long == "drop":
            return Dropped("too_long", row.where)
        starts = range(0, len(pairs.inputs), T) if too_long == "split" else [0]
        pieces = [Pairs(*(field[start : start + T] for field in pairs)) for start in starts]
        return [piece for piece in pieces if piece.mask.any()] or Dropped("too_long", row.where)


def empty(rows: int, length: int) -> TokenBatch:
    """Rows of padding [R, T]."""
    row = batches.empty_row(length)
    return TokenBatch(*(np.repeat(field[None], rows, axis=0) for field in row))
