"""Few rows for many sequences: those that begin alike share their beginning, and none is padded.

The completions of one prompt, each after the prompt in a row of its own, read the prompt again and
again, and every row is as long as the longest. A `Layout` reads the same tokens in rows packed with
trees: a trunk, then the branches that follow it. A branch sees the trunk and itself, at the
positions that it would have in a row of its own; so its states are the same, and only the work is
less: of 8 completions as long as their prompt, 9 parts in place of 16.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxpost import batch as batches
from jaxpost.attention import BRANCH
from jaxpost.models.model import Model
from jaxpost.typing import Hidden, Params

ROW = 256  # tokens of a row, at least, if there are so many


class Plain(NamedTuple):
    """Tokens to read as they stand, [B, T] each."""

    inputs: Any
    segment_ids: Any
    positions: Any


class Layout(NamedTuple):
    """The same tokens in fewer rows.

    Attributes:
      inputs, segment_ids, positions: [R, L].
      places: [B, T], where each token is among the R · L; 0 for those that no target needs.
    """

    inputs: Any
    segment_ids: Any
    positions: Any
    places: Any


def hidden(model: Model, params: Params, read: Plain | Layout) -> Hidden:
    """Final hidden states [B, T, D]; of a layout those before the first target are arbitrary."""
    found = model.apply(params, read.inputs, read.segment_ids, read.positions, None)
    if isinstance(read, Plain):
        return found
    return found.reshape(-1, found.shape[-1])[read.places]


class Sequences(NamedTuple):
    """Rows [B, T] of `lengths` [B] tokens, whose first target is at `firsts` [B]."""

    inputs: np.ndarray
    lengths: np.ndarray
    firsts: np.ndarray


class Tree(NamedTuple):
    """Rows whose first `trunk` tokens are the same; `length` tokens with all branches."""

    rows: Sequence[int]
    trunk: int
    length: int


def lay_out(read: Plain, mask: Any, parts: int, width: int) -> tuple[np.ndarray, Layout]:
    """(an order of the rows, the layout of each part of them): see `train_step.Divided`.

    In this order row i, i + parts, … are the part i: neighbours before, so that those of one prompt
    stay together.

    Args:
      read: one sequence a row, padded at its end with segment 0.
      mask: [B, T], the targets whose states are needed; what is before the first may be shared.
      parts: microbatches.
      width: of the model, to weigh tokens saved against keys looked at in vain.

    Returns:
      The order [B], and a layout with leaves [parts, R, L] and `places` [parts, B / parts, T]. R
      and L are rounded up by a quarter at most, so that few shapes are compiled.
    """
    whole = Sequences(
        np.asarray(read.inputs),
        np.count_nonzero(read.segment_ids, axis=1),
        np.asarray(mask).argmax(axis=1),
    )
    shares = np.arange(len(whole.inputs)).reshape(parts, -1)
    several = [Sequences(*(field[share] for field in whole)) for share in shares]
    plans = [trees(sequences, width) for sequences in several]
    total = max(sum(tree.length for tree in plan) for plan in plans)
    longest = max(tree.length for plan in plans for tree in plan)
    length = rounded(max(longest, min(total, ROW)))
    bins = [batches.best_fit_decreasing([t.length for t in plan], length) for plan in plans]
    rows = rounded(max(map(len, bins)))
    shape = (parts, rows, length)
    layout = Layout(
        inputs=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        places=np.zeros((parts, shares.shape[1], whole.inputs.shape[1]), np.int32),
    )
    for part, sequences in enumerate(several):
        here = Layout(*(field[part] for field in layout))
        for row, chosen in enumerate(bins[part]):
            start = 0
            for number, index in enumerate(chosen, 1):
                tree = plans[part][index]
                write(here, row, start, number, tree, sequences)
                start += tree.length
    return shares.T.ravel(), layout


def trees(sequences: Sequences, width: int) -> list[Tree]:
    """The rows as trees, those with the same prompt together where that saves work."""
    lengths = sequences.lengths.tolist()
    alike: dict[bytes, list[int]] = {}
    for row, first in enumerate(sequences.firsts):
        alike.setdefault(sequences.inputs[row, :first].tobytes(), []).append(row)
    out = []
    for rows in alike.values():
        trunk = int(sequences.firsts[rows[0]])
        branches = [lengths[row] - trunk for row in rows]
        if worth_sharing(trunk, branches, width):
            out.append(Tree(rows, trunk, trunk + sum(branches)))
        else:
            out += [Tree([row], 0, lengths[row]) for row in rows]
    return out


def worth_sharing(trunk: int, branches: Sequence[int], width: int) -> bool:
    """Whether the trunks saved cost more than the products of queries and keys added.

    A layer takes about 24 · width² operations for a token and 4 · width for a query and a key.
    """
    saved = trunk * (len(branches) - 1)
    added = (trunk + sum(branches)) ** 2 - sum((trunk + branch) ** 2 for branch in branches)
    return 6 * width * saved > added / 2


def write(
    layout: Layout, row: int, start: int, number: int, tree: Tree, sequences: Sequences
) -> None:
    """Puts a tree into a row of the layout, as segment `number`, and notes where its tokens are."""
    width = layout.inputs.shape[1]

    def copy(source: int, tokens: np.ndarray, segment: int) -> np.ndarray:
        nonlocal start
        here = slice(start, start + len(tokens))
        layout.inputs[row, here] = sequences.inputs[source, tokens]
        layout.positions[row, here] = tokens
        layout.segment_ids[row, here] = segment
        start += len(tokens)
        return row * width + np.arange(here.start, here.stop)

    copy(tree.rows[0], np.arange(tree.trunk), number)
    for branch, source in enumerate(tree.rows):
        tokens = np.arange(tree.trunk, sequences.lengths[source])
        segment = number + BRANCH * (branch + 1) if tree.trunk else number
        layout.places[source, tokens] = copy(source, tokens, segment)


def rounded(count: int) -> int:
    """The least of 1 to 8, 10, 12, 14, 16, 20, … (four a doubling) that is not under this."""
    step = 1 << max((count - 1).bit_length() - 3, 0)
    return -(-count // step) * step
