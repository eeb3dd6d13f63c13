"""A batch as the model sees it, on a terminal or as plain text.

A row is shown as the tokens of its sequences: the first input, which is only read, and then every
target, coloured by whether it is trained. Without colours, trained tokens stand between ⟦ and ⟧.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from rich import text

from jaxpost.batch import TokenBatch

Decode = Callable[[Sequence[int]], str]

# Neighbouring tokens alternate between two shades, so that their boundaries show.
TRAINED = ("black on green3", "black on pale_green3")
WEIGHTED = ("black on gold3", "black on light_goldenrod2")
CONTEXT = ("white on grey15", "white on grey27")
BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8, so at most so many tokens
MARKS = {"\n": "↵\n", "\t": "→\t", "\r": "␍"}


class Piece(NamedTuple):
    """One or a few tokens that decode together to whole characters."""

    ids: tuple[int, ...]
    text: str
    trained: bool
    weight: float


class Totals(NamedTuple):
    """Counts over a batch; `weights` is the sum of `loss_weights`."""

    rows: int
    length: int
    sequences: int
    tokens: int
    trained: int
    weights: float
    shortest: int
    longest: int

    @property
    def efficiency(self) -> float:
        """The share of positions that are not padding."""
        return self.tokens / max(self.rows * self.length, 1)


def totals(batch: TokenBatch) -> Totals:
    """Counts over a batch [B, T]."""
    segment_ids = np.asarray(batch.segment_ids)
    lengths = [
        part.stop - part.start for row in range(len(segment_ids)) for part in segments(batch, row)
    ]
    return Totals(
        rows=segment_ids.shape[0],
        length=segment_ids.shape[1],
        sequences=len(lengths),
        tokens=int(np.sum(segment_ids > 0)),
        trained=int(np.sum(batch.completion_mask)),
        weights=float(np.sum(batch.loss_weights)),
        shortest=min(lengths, default=0),
        longest=max(lengths, default=0),
    )


def segments(batch: TokenBatch, row: int) -> list[slice]:
    """Where the sequences packed in a row lie."""
    ids = np.asarray(batch.segment_ids)[row]
    edges = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    return [part for part in parts if part.stop > part.start and ids[part.start] > 0]


def pieces(batch: TokenBatch, row: int, part: slice, decode: Decode) -> Iterator[Piece]:
    """A sequence's tokens: its first input, and its targets.

    Tokens that hold only some bytes of a character are joined with those that complete it, unless
    these have another weight.
    """
    tokens = [int(batch.inputs[row][part.start]), *map(int, batch.targets[row][part])]
    mask = [False, *map(bool, batch.completion_mask[row][part])]
    weights = [0.0, *map(float, batch.loss_weights[row][part])]
    start = 0
    while start < len(tokens):
        alike = start + 1
        while alike < min(start + BYTES_OF_A_CHARACTER, len(tokens)) and (
            (mask[alike], weights[alike]) == (mask[start], weights[start])
        ):
            alike += 1
        stops = range(start + 1, alike + 1)
        whole = (stop for stop in stops if "\ufffd" not in decode(tokens[start:stop]))
        stop = next(whole, start + 1)
        ids = tuple(tokens[start:stop])
        yield Piece(ids, decode(ids), mask[start], weights[start])
        start = stop


def show_row(batch: TokenBatch, row: int, decode: Decode, *, plain: bool = False) -> text.Text:
    """A row's sequences, each under a line that says where it lies and what of it is trained."""
    page = text.Text()
    for number, part in enumerate(segments(batch, row), 1):
        positions = np.asarray(batch.positions)[row, part]
        trained = int(np.sum(batch.completion_mask[row][part]))
        weights = float(np.sum(batch.loss_weights[row][part]))
        page.append(
            f"row {row} sequence {number}: places {part.start}-{part.stop - 1}, positions "
            f"{positions[0]}-{positions[-1]}, trained {trained} of {len(positions)}, "
            f"weights {weights:.6g}\n",
            "bold",
        )
        found = pieces(batch, row, part, decode)
        page.append_text(marked(found) if plain else coloured(found))
        page.append("\n")
    padding = int(np.sum(np.asarray(batch.segment_ids)[row] == 0))
    page.append(f"row {row} padding: {padding} places\n", "dim")
    return page


def coloured(found: Iterator[Piece]) -> text.Text:
    """Pieces in colours: read, trained, trained with a weight of its own."""
    page = text.Text()
    for number, piece in enumerate(found):
        kind = CONTEXT if not piece.trained else TRAINED if piece.weight == 1.0 else WEIGHTED
        page.append(visible(piece.text), kind[number % 2])
    return page


def marked(found: Iterator[Piece]) -> text.Text:
    """Pieces in plain text: `|` between tokens, ⟦…⟧ around trained ones, ×w after other weights."""
    page, inside = text.Text(), None
    for piece in found:
        state = piece.weight if piece.trained else None
        if state != inside:
            page.append(closing(inside) + ("" if state is None else "⟦"))
            inside = state
        elif len(page):
            page.append("|")
        page.append(visible(piece.text))
    page.append(closing(inside))
    return page


def closing(weight: float | None) -> str:
    """What ends a trained span of this weight; None is a span that is only read."""
    return "" if weight is None else "⟧" if weight == 1.0 else f"⟧×{weight:.4g}"


def visible(said: str) -> str:
    """Text with line breaks and tabs marked, and other control characters as their codes."""
    return "".join(
        MARKS.get(letter) or (letter if letter.isprintable() else f"\\x{ord(letter):02x}")
        for letter in said
    )


def legend() -> text.Text:
    """What the colours mean."""
    page = text.Text()
    page.append("read only", CONTEXT[0])
    page.append(" ")
    page.append("trained", TRAINED[0])
    page.append(" ")
    page.append("trained, weight not 1", WEIGHTED[0])
    page.append("  (two shades of each: token boundaries)\n")
    return page


def positions_table(batch: TokenBatch, row: int, decode: Decode) -> str:
    """Every place of a row that is not padding: the pair it holds and what is asked of it."""
    lines = [f"{'place':>5} {'seq':>4} {'pos':>5} {'weight':>8}  input -> target"]
    for place in np.flatnonzero(np.asarray(batch.segment_ids)[row] > 0).tolist():
        read, predicted = int(batch.inputs[row][place]), int(batch.targets[row][place])
        weight = f"{batch.loss_weights[row][place]:.4g}"
        lines.append(
            f"{place:>5} {int(batch.segment_ids[row][place]):>4} "
            f"{int(batch.positions[row][place]):>5} "
            f"{weight if batch.completion_mask[row][place] else '-':>8}  "
            f"{read} {decode([read])!r} -> {predicted} {decode([predicted])!r}"
        )
    return "\n".join(lines) + "\n"


def show_totals(batch: TokenBatch) -> str:
    """The counts of a batch, as a few lines."""
    total = totals(batch)
    share = total.trained / max(total.tokens, 1)
    return (
        f"{total.rows} rows of {total.length} places hold {total.sequences} sequences of "
        f"{total.shortest} to {total.longest} targets\n"
        f"{total.tokens} of {total.rows * total.length} places are used "
        f"({100 * total.efficiency:.1f} %), {total.trained} targets are trained "
        f"({100 * share:.1f} %), weights sum to {total.weights:.6g}\n"
    )
