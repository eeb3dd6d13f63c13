"""Completions as text: where a stop string ends one, and what may already be shown of it."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

Decode = Callable[[Sequence[int]], str]
Ids = Sequence[int] | np.ndarray


@runtime_checkable
class Tokenizer(Protocol):
    """What sampling needs of a tokenizer.

    Attributes:
      bos_id, adds_bos: the id that begins a text, and whether texts begin with it.
      eos_ids: every id that ends a completion.
    """

    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS or EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, an incomplete character shown as U+FFFD."""
        ...


def prompt_ids(tokenizer: Tokenizer, prompt: str | Ids) -> list[int]:
    """The ids of a prompt given as text or as ids; text begins with BOS where texts do."""
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    bos = tokenizer.bos_id if tokenizer.adds_bos else None
    return [*([] if bos is None else [bos]), *tokenizer.encode(prompt)]


def without_stop_id(ids: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """The ids before the stop id, if the last is one."""
    return list(ids[:-1] if ids and ids[-1] in stop_ids else ids)


def completed_at(
    ids: Sequence[int], seen: int, strings: Sequence[str], decode: Decode
) -> int | None:
    """How many of the ids it takes until their text holds a stop string, or None.

    The text of the first `seen` ids is known to hold none.
    """

    def holds(count: int) -> bool:
        return find(decode(ids[:count]), strings) is not None

    if not holds(len(ids)):
        return None
    return next((count for count in range(seen + 1, len(ids)) if holds(count)), len(ids))


def find(text: str, strings: Sequence[str]) -> int | None:
    """Where the first of the strings begins in the text, or None."""
    return min((at for string in strings if (at := text.find(string)) >= 0), default=None)


def before(text: str, strings: Sequence[str]) -> str:
    """The text up to the first of the strings."""
    return text[: find(text, strings)]


def settled(text: str, strings: Sequence[str]) -> str:
    """The beginning of an unfinished text that later tokens cannot change.

    Held back are an incomplete last character (U+FFFD) and whatever may be the beginning of a stop
    string.
    """
    text = text.rstrip("\ufffd")
    open_ends = (
        size for string in strings for size in range(1, len(string)) if text.endswith(string[:size])
    )
    return text[: len(text) - max(open_ends, default=0)]
