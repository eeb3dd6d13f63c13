"""Any known row of training data to one canonical row.

    found = detect(row.keys(), row)           # Format: prompt-completion (conversational)
    normalize(row, found, "train.jsonl:1")    # CompletionRow(...) or Dropped("empty_target", ...)

`SFT` holds the kinds of row that fine-tuning reads; a recipe that reads others passes its own tuple
of kinds. A row that cannot be understood is an error that says where it stands; a row that is
understood and cannot be trained is `Dropped`, and counted.
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxpost.data.fine_tuning import OTHERS, SFT
from jaxpost.data.kinds import Cells, Format, Kind
from jaxpost.data.rows import (
    ChatRow,
    CompletionRow,
    Dropped,
    Message,
    Note,
    Noted,
    PromptRow,
    ReasoningRow,
    Row,
    TextRow,
    TokensRow,
)

__all__ = [
    "SFT",
    "Cells",
    "ChatRow",
    "CompletionRow",
    "Dropped",
    "Format",
    "Kind",
    "Message",
    "Note",
    "Noted",
    "PromptRow",
    "ReasoningRow",
    "Row",
    "TextRow",
    "TokensRow",
    "detect",
    "normalize",
]

MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def detect(
    columns: Collection[str],
    sample: Mapping[str, Any],
    *,
    accept: Sequence[Kind] = SFT,
    name: str = "auto",
    overrides: Mapping[str, str] | None = None,
    chat: bool | None = None,
    where: str = "",
) -> Format:
    """The format of rows with these columns.

    Args:
      columns: the column names of the file.
      sample: one of its rows, to tell apart kinds with the same columns.
      accept: the kinds that the recipe reads, preferred first.
      name: a kind's name, to take no other.
      overrides: part → column, where a column goes by another name; `a.b` is key b of column a.
      chat: see `Format`.
      where: the file, for messages.

    Raises:
      ValueError: no accepted kind has these columns; the message lists both.
    """
    overrides = overrides or {}
    kinds = accept if name == "auto" else [named(name, accept)]
    check_overrides(columns, kinds, overrides, where)
    for kind in kinds:
        found = match(kind, columns, overrides)
        if found is None or not set(overrides) <= set(kind.parts):
            continue
        cells = Cells(sample, Format(kind, found, chat=chat), where)
        if name != "auto" or kind.matches(cells):
            conversational = any(is_chat(cells, part) for part in kind.required)
            return dataclasses.replace(cells.format, conversational=conversational)
    raise unknown(columns, sample, kinds, overrides, where)


def normalize(row: Mapping[str, Any], format: Format, where: str) -> Any:
    """The canonical row (for `SFT`'s kinds a `Row`), or `Dropped`.

    Raises:
      ValueError: the row is malformed; the message begins with `where`.
    """
    for column in MEDIA:
        if row.get(column):
            raise ValueError(
                f"{where}: column {column} is not empty, and only text is trained; remove the "
                "column, or leave these rows out"
            )
    if format.kind.build is None:
        raise ValueError(f"{where}: {format.kind.name} rows are read by {format.kind.recipes}")
    return format.kind.build(Cells(row, format, where))


def match(kind: Kind, columns: Collection[str], overrides: Mapping[str, str]) -> dict | None:
    """The column of each part of a kind, or None where one is missing."""
    found = {part: overrides[part] for part in kind.parts if part in overrides}
    for part, names in kind.required.items():
        present = [name for name in names if name in columns]
        if part not in found and not present:
            return None
        found.setdefault(part, *present[:1])
    return found


def named(name: str, accept: Sequence[Kind]) -> Kind:
    """The kind of this name."""
    kinds = {kind.name: kind for kind in accept}
    if name not in kinds:
        raise ValueError(
            f"format: expected auto or one of {', '.join(kinds)}, got {name}{near(name, kinds)}"
        )
    return kinds[name]


def check_overrides(
    columns: Collection[str], kinds: Sequence[Kind], overrides: Mapping[str, str], where: str
) -> None:
    """Refuses an override of a part that no kind has, or by a column that is not there."""
    parts = list(dict.fromkeys(part for kind in kinds for part in kind.parts))
    for part, column in overrides.items():
        if part not in parts:
            raise ValueError(f"columns: {part} is none of {', '.join(parts)}{near(part, parts)}")
        if column not in columns and column.split(".")[0] not in columns:
            raise ValueError(
                f"{where}: columns: {part}: there is no column {column} among "
                f"{', '.join(columns)}{near(column, columns)}"
            )


def near(name: str, names: Collection[str]) -> str:
    """The nearest right name, as the end of a message."""
    found = difflib.get_close_matches(name, names, 1, 0.4)
    return f"; did you mean {found[0]}?" if found else ""


def unknown(
    columns: Collection[str],
    sample: Mapping[str, Any],
    kinds: Sequence[Kind],
    overrides: Mapping[str, str],
    where: str,
) -> ValueError:
    """The error for rows that no accepted kind fits, naming the recipe that would read them."""
    found = f"{where}: columns {', '.join(columns) or '(none)'}"
    for kind in OTHERS:
        if (parts := match(kind, columns, {})) is None or overrides:
            continue
        if kind.matches(Cells(sample, Format(kind, parts), where)):
            return ValueError(
                f"{found} are {kind.name} rows, which {kind.recipes} reads and this one does not; "
                "to read them as something else, name the format and its columns, for example "
                "format: prompt-completion, columns: {prompt: question, completion: best_answer}"
            )
    types = "".join(f"\n  {kind}" for kind in kinds)
    return ValueError(
        f"{found} are of no type that this recipe reads, which are{types}\nName the columns if "
        "theirs differ, for example columns: {prompt: question, completion: best_answer}"
    )


def is_chat(cells: Cells, part: str) -> bool:
    """Whether the sample holds messages in this part."""
    value = cells[part]
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)
