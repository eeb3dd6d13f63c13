"""Completions that were sampled already, several of a prompt in a row, from any tool."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpost.data import chat, fine_tuning, preference_rows, sources
from jaxpost.data import messages as chats
from jaxpost.data.kinds import Cells, Kind
from jaxpost.data.rows import Message

COLUMNS = ("completions", "responses", "generations", "samples", "outputs")


class Given(NamedTuple):
    """A prompt, N completions as text, and which of them ended because they were long."""

    prompt: str | Sequence[Message]
    texts: Sequence[str]
    cut: Sequence[bool]
    where: str


def given_row(cells: Cells) -> Given:
    """`prompt` and `completions`: a list of texts, messages, or maps that hold one of these.

    `cut`, if it is there, is a list of truth values.
    """
    items, cut = cells.json("completions"), cells.json("cut")
    if not isinstance(items, list | tuple) or not items:
        found = chats.described(items)
        raise cells.error("completions", f"expected a list of completions, got {found}")
    if cut is None:
        cut = [False] * len(items)
    if not isinstance(cut, list) or [type(one) for one in cut] != [bool] * len(items):
        raise cells.error("cut", f"expected {len(items)} of true or false, one a completion")
    texts = [text_of(cells, preference_rows.completion_of(cells, item)) for item in items]
    return Given(fine_tuning.prompt_of(cells), texts, cut, cells.where)


def text_of(cells: Cells, said: str | list) -> str:
    """A completion's text; of messages, that of the only one."""
    if isinstance(said, str):
        return said
    if len(said) != 1 or said[0]["role"] != "assistant" or said[0].get("tool_calls"):
        raise cells.error(
            "completions",
            "a completion of several messages, or with calls of tools, is not one text",
        )
    return chat.plain_text(said[0])


KINDS = (
    Kind(
        "completions of a prompt",
        {
            "prompt": (*preference_rows.PLAIN["prompt"], *preference_rows.ASKED["prompt"]),
            "completions": COLUMNS,
        },
        given_row,
        ("cut",),
    ),
)


def read(path: str) -> list[Given]:
    """The rows of a file. Raises ValueError, with file and line, for one that cannot be read."""
    (source,), _ = sources.open_sources(path, sources.DataConfig(train=path), KINDS)
    return [source[index] for index in range(len(source))]


def key_of(prompt: str | Sequence[Message]) -> str:
    """The same for the same prompt, a single turn of the user's and its text being the same."""
    if isinstance(prompt, str):
        return prompt
    turns = [(message["role"], chat.plain_text(message)) for message in prompt]
    return turns[0][1] if [role for role, _ in turns] == ["user"] else repr(turns)
