"""Shapes of rows: the columns they need, under the names they go by, and how cells are read."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpost.data import json_text
from jaxpost.data import messages as chats


@dataclasses.dataclass(frozen=True)
class Kind:
    """A shape of row.

    Attributes:
      name: what it is called in configurations and messages.
      required: each part of the row, and the column names it goes by, preferred first.
      build: (cells) → canonical row or `Dropped`; None for a kind that is only recognised.
      optional: further parts, each under its own name.
      matches: a last look at the sample's cells; False leaves the row to other kinds.
      turns: whether its parts are a user's and an assistant's turns unless `chat` is False.
      recipes: who reads it, for the error of a recipe that does not.
    """

    name: str
    required: Mapping[str, Sequence[str]]
    build: Callable[["Cells"], Any] | None = None
    optional: Sequence[str] = ()
    matches: Callable[["Cells"], bool] = lambda cells: True
    turns: bool = False
    recipes: str = "sft"

    @property
    def parts(self) -> tuple[str, ...]:
        """Every part that a column may be named for."""
        return (*self.required, *self.optional)

    def __str__(self) -> str:
        columns = [
            names[0] if len(names) == 1 else f"{names[0]} (or {', '.join(names[1:])})"
            for names in self.required.values()
        ]
        return f"{self.name}: {', '.join(columns)}"


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind as one file has it.

    Attributes:
      columns: the column that holds each part.
      conversational: whether the sample's prompt or completion was a list of messages.
      chat: True makes plain prompts and completions turns of a user and an assistant, False keeps
        them plain, None leaves it to the kind.
    """

    kind: Kind
    columns: Mapping[str, str]
    conversational: bool = False
    chat: bool | None = None

    def __str__(self) -> str:
        chat = self.conversational or (self.kind.turns if self.chat is None else self.chat)
        if "prompt" not in self.kind.required and not self.kind.turns:
            return self.kind.name
        return self.kind.name + (" (conversational)" if chat else " (plain)")


@dataclasses.dataclass(frozen=True)
class Cells:
    """The parts of one row, by the names its kind gives them."""

    row: Mapping[str, Any]
    format: Format
    where: str

    def column(self, part: str) -> str:
        """The column that holds a part."""
        return self.format.columns.get(part, part)

    def __getitem__(self, part: str) -> Any:
        """A part's value, or None where it is null or an optional column is absent.

        Raises:
          ValueError: a required column is absent from this row.
        """
        found, value = look_up(self.row, self.column(part))
        if not found and part in self.format.kind.required:
            raise ValueError(
                f"{self.where}: no column {self.column(part)}, which {self.format.kind.name} rows "
                f"need; found {', '.join(self.row) or 'no column'}"
            )
        return value

    def text(self, part: str, number: bool = False) -> str | None:
        """A part that must be text or null; where `number` is set, a number counts as text."""
        value = self[part]
        if number and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        if value is None or isinstance(value, str):
            return value
        raise self.error(part, f"expected text, got {chats.described(value)}")

    def json(self, part: str) -> Any:
        """A part that may be written as JSON text; empty text is None."""
        value = self[part]
        if not isinstance(value, str):
            return value
        try:
            return json_text.loads(value) if value.strip() else None
        except ValueError as error:
            raise self.error(part, f"is text that is not JSON: {error}") from error

    def weight(self, part: str, value: Any) -> float:
        """A weight, which must be a finite number of at least 0."""
        try:
            return chats.weight(value)
        except ValueError as error:
            raise self.error(part, str(error)) from error

    def error(self, part: str, problem: str) -> ValueError:
        """The error for a malformed cell."""
        return ValueError(f"{self.where}: column {self.column(part)}: {problem}")

    def common(self) -> dict[str, Any]:
        """`meta` (the columns that are no part) and `where`, which every canonical row carries."""
        used = {self.column(part) for part in self.format.kind.parts}
        meta = {name: value for name, value in self.row.items() if name not in used}
        return {"meta": meta, "where": self.where}


def look_up(row: Mapping[str, Any], column: str) -> tuple[bool, Any]:
    """Whether a row has a column, and its value; `a.b` is key b of column a unless a column a.b."""
    if column in row:
        return True, row[column]
    value: Any = row
    for key in column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False, None
        value = value[key]
    return True, value
