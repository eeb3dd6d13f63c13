"""Rows that are tokenised already: `input_ids` with the masks that other trainers store."""

import itertools
from typing import Any

from jaxpost.data import messages as chats
from jaxpost.data.kinds import Cells, Kind
from jaxpost.data.rows import Dropped, TokensRow

IGNORED = -100  # the label that the field puts on tokens that are not trained
LARGEST = 2**31 - 1  # what int32 holds


def tokens_row(cells: Cells) -> TokensRow | Dropped:
    """`input_ids`, trained where every mask given is set and `labels` is not -100."""
    tokens = integers(cells, "input_ids")
    if not tokens:
        return Dropped("empty_tokens", cells.where)
    if min(tokens) < 0:
        raise cells.error("input_ids", f"token {tokens.index(min(tokens))} is negative")
    if max(tokens) > LARGEST:
        raise cells.error("input_ids", f"token {tokens.index(max(tokens))} is over {LARGEST}")
    refuse_packed(cells, len(tokens))
    masks = [flags(cells, part, len(tokens)) for part in ("completion_mask", "assistant_masks")]
    masks = [mask for mask in (*masks, labelled(cells, tokens)) if mask is not None]
    mask = [all(flags) for flags in zip(*masks, strict=True)] if masks else None
    weights = aligned(cells, "weights", cells.json("weights"), len(tokens))
    if weights is not None:
        weights = [cells.weight("weights", weight) for weight in weights]
    return unpadded(cells, tokens, mask, weights)


def labelled(cells: Cells, tokens: list[int]) -> list[bool] | None:
    """Where `labels` is not -100; elsewhere a label must be the token itself."""
    labels = aligned(cells, "labels", integers(cells, "labels"), len(tokens))
    if labels is None:
        return None
    for place, (label, token) in enumerate(zip(labels, tokens, strict=True)):
        if label not in (IGNORED, token):
            raise cells.error(
                "labels",
                f"label {place} is {label} and the token there is {token}; labels are the tokens "
                f"themselves, not shifted, or {IGNORED}",
            )
    return [label != IGNORED for label in labels]


def refuse_packed(cells: Cells, count: int) -> None:
    """Refuses rows that hold several sequences, whose boundaries would be lost."""
    positions, lengths = integers(cells, "position_ids"), integers(cells, "seq_lengths")
    restarts = any(after <= before for before, after in itertools.pairwise(positions or ()))
    if lengths is not None and lengths not in ([], [count]):
        raise cells.error("seq_lengths", "several sequences in a row; give one a row")
    if restarts and cells["attention_mask"] is None:
        raise cells.error("position_ids", "restart within the row; give one sequence a row")


def unpadded(cells: Cells, tokens, mask, weights) -> TokensRow | Dropped:
    """Takes off the padding that `attention_mask` shows at either end."""
    attended = flags(cells, "attention_mask", len(tokens))
    if attended is not None:
        if not any(attended):
            return Dropped("empty_tokens", cells.where)
        start, stop = attended.index(True), len(attended) - attended[::-1].index(True)
        if not all(attended[start:stop]):
            raise cells.error("attention_mask", "has zeros between ones; only padding may be 0")
        tokens = tokens[start:stop]
        mask = mask and mask[start:stop]
        weights = weights and weights[start:stop]
    return TokensRow(tokens, mask, weights, **cells.common())


def integers(cells: Cells, part: str) -> list[int] | None:
    """A list of integers, or None."""
    column = cells.json(part)
    if column is None:
        return None
    if not isinstance(column, list | tuple) or not all(type(number) is int for number in column):
        raise cells.error(part, f"expected a list of integers, got {chats.described(column)}")
    return list(column)


def flags(cells: Cells, part: str, count: int) -> list[bool] | None:
    """A list of 0 and 1, or of true and false, or None."""
    column = aligned(cells, part, cells.json(part), count)
    if column is not None and not all(number in (0, 1) for number in column):
        raise cells.error(part, "expected 0 and 1 only")
    return None if column is None else [bool(number) for number in column]


def aligned(cells: Cells, part: str, column: Any, count: int) -> Any:
    """A column that must have one entry a token."""
    if column is not None and (not isinstance(column, list | tuple) or len(column) != count):
        raise cells.error(
            part, f"expected {count} entries as in input_ids, got {chats.described(column)}"
        )
    return column


KIND = Kind(
    "tokens",
    {"input_ids": ("input_ids",)},
    tokens_row,
    (
        *("labels", "completion_mask", "assistant_masks", "attention_mask", "weights"),
        *("position_ids", "seq_lengths"),
    ),
)
