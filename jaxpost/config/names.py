"""Every key of a configuration by its dotted name, and the nearest one to a slip."""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator
from typing import Any


def part_of(hint: Any) -> type | None:
    """The dataclass that a key of this type holds, `X` for `X` and for `X | None`, or None."""
    for member in (hint, *typing.get_args(hint)):
        if isinstance(member, type) and dataclasses.is_dataclass(member):
            return member
    return None


def dotted(config_class: type, prefix: str = "") -> Iterator[str]:
    """The dotted name of every key, a part before what it holds."""
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        yield prefix + field.name
        part = part_of(hints[field.name])
        if part is not None:
            yield from dotted(part, f"{prefix}{field.name}.")


def unknown(path: str, where: str, root: type) -> str:
    """The problem of a key that does not exist, with the keys that may have been meant."""
    known = list(dotted(root))
    if "." in path and path in known:
        first, _, rest = path.partition(".")
        return f"{where}: write {path} nested: `{first}:`, and under it `{rest}:`"
    return f"{where}: unknown key {path}{did_you_mean(nearest_key(path, known))}"


def nearest_key(path: str, known: list[str]) -> list[str]:
    """Known dotted names close to `path`, by the first of these rules that finds any.

    The same last word elsewhere; words whose initials it is (`lr` for `learning_rate`); a similar
    word in the same part; a similar one anywhere.
    """
    parent, last = path.rpartition(".")[0], path.rpartition(".")[2]
    lasts = {name: name.rpartition(".")[2] for name in known}
    siblings = {name: word for name, word in lasts.items() if name.rpartition(".")[0] == parent}
    return (
        [name for name, word in lasts.items() if word == last]
        or [name for name, word in lasts.items() if initials(word) == last]
        or similar(last, siblings)
        or similar(last, lasts)
    )[:3]


def similar(word: str, words: dict[str, str]) -> list[str]:
    """The names whose word is like `word`, best first."""
    return [name for near in nearest(word, words.values()) for name in words if words[name] == near]


def nearest(word: str, words: Iterable[str]) -> list[str]:
    """The words most like `word`, best first, at most three."""
    by_lower = {known.lower(): known for known in words}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, 3, 0.6)]


def initials(word: str) -> str:
    """The first letter of each part of a name."""
    return "".join(part[:1] for part in word.split("_"))


def did_you_mean(near: list[str]) -> str:
    """The end of a message that offers `near`, or nothing."""
    return f"; did you mean {' or '.join(near)}?" if near else ""
