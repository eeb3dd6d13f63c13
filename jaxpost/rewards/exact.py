"""The answer as text: as it is, normalised, or as a number."""

import re
import string
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from jaxpost.rewards import gold, literals, spans
from jaxpost.rewards.score import Score

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")


def verify(completion: str, example: Mapping[str, Any]) -> Score:
    """1 where the answer (`spans.answer`) is a right one, character by character."""
    return judged(spans.answer(completion), [one.strip() for one in gold.answers(example)])


def normalized(completion: str, example: Mapping[str, Any]) -> Score:
    """As `verify`, without regard to case, punctuation, articles and spaces."""
    said = plain(spans.answer(completion))
    return judged(said, [plain(one) for one in gold.answers(example)])


def numeric(completion: str, example: Mapping[str, Any], *, tolerance: float = 0.0) -> Score:
    """1 where the last number of the answer is a right one, within `tolerance` (relative).

    None where no right answer is a number.
    """
    rights = [literals.literal(one) for one in gold.answers(example)]
    known = [one for one in rights if one is not None]
    if not known:
        return Score(None, reason="right answer unreadable")
    found = NUMBER.findall(spans.answer(completion)[-1000:])
    value = literals.literal(found[-1]) if found else None
    if value is None:
        return Score(0.0, reason="no number")
    bound = Fraction(tolerance)
    right = any(abs(value - one) <= bound * abs(one) for one in known)
    return Score(1.0, reason="right") if right else Score(0.0, reason="wrong")


def plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).casefold()
    text = text.translate(str.maketrans("", "", string.punctuation))
    return " ".join(ARTICLES.sub(" ", text).split())


def judged(said: str, rights: list[str]) -> Score:
    """An empty right answer is none: nothing should equal it."""
    known = [right for right in rights if right]
    if not known:
        return Score(None, reason="right answer unreadable")
    if not said:
        return Score(0.0, reason="no answer")
    return Score(1.0, reason="right") if said in known else Score(0.0, reason="wrong")
