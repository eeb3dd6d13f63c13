"""Rewards of form: tags and their order, patterns, boxes, length, repetition."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost.rewards import spans
from jaxpost.rewards.score import Item, Score

Example = Mapping[str, Any]
BOX = re.compile(r"\\boxed(?![A-Za-z])\s*(\{\s*\})?")


def tags(
    completion: str,
    example: Example,
    *,
    names: Sequence[str] = ("think", "answer"),
    opened: bool = False,
) -> Score:
    """1 where the completion is these tags, each once and in this order, with text in each.

    Nothing but space stands around them. `opened`: the prompt ended with the first opening tag.
    """
    text = f"<{names[0]}>{completion}" if opened else completion
    for name in names:
        for tag in (f"<{name}>", f"</{name}>"):
            if text.count(tag) != 1:
                return Score(0.0, reason=f"{text.count(tag)} {tag}")
    for name in names:
        before, _, text = text.partition(f"<{name}>")
        inside, closed, text = text.partition(f"</{name}>")
        if before.strip() or not closed or not inside.strip():
            return Score(0.0, reason="out of form")
    return Score(0.0, reason="out of form") if text.strip() else Score(1.0, reason="in form")


def pattern(completion: str, example: Example, *, regex: str, whole: bool = True) -> Score:
    """1 where a regular expression (`.` matches line breaks) matches all of it, or a part of it."""
    compiled = re.compile(regex, re.DOTALL)
    found = compiled.fullmatch(completion) if whole else compiled.search(completion)
    return Score(1.0, reason="in form") if found else Score(0.0, reason="out of form")


def boxed(completion: str, example: Example) -> Score:
    """1 where exactly one `\\boxed{}` stands after the thought, and is not empty."""
    boxes = BOX.findall(spans.spoken(completion))
    if len(boxes) != 1:
        return Score(0.0, reason="several boxes" if boxes else "no box")
    return Score(0.0, reason="empty box") if boxes[0] else Score(1.0, reason="in form")


def overlong(item: Item, *, longest: int, buffer: int) -> Score:
    """DAPO's soft punishment (arXiv 2503.14476, eq. 13) by tokens, the stop token not counted.

    0 up to `longest` − `buffer` tokens, then linear, −1 from `longest` on.
    """
    over = len(item.completion_ids) - (longest - buffer)
    return Score(0.0 - min(1.0, max(0.0, over / buffer)))


def finished(item: Item) -> Score:
    """1 where the completion stopped by itself, 0 where it was cut."""
    return Score(0.0, reason="cut") if item.truncated else Score(1.0)


def repetition(completion: str, example: Example, *, words: int = 4) -> Score:
    """−(1 − distinct / all) of the runs of so many words: 0 without repetition, down to −1."""
    said = completion.lower().split()
    runs = [tuple(said[i : i + words]) for i in range(len(said) - words + 1)]
    return Score(len(set(runs)) / len(runs) - 1.0 if runs else 0.0)
