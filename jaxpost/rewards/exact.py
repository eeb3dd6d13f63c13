"""The answer as text: equal as it is, equal when normalised, or equal as a number."""

from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import gold, spans
from jaxpost.rewards.score import Score


def verify(completion: str, example: Mapping[str, Any]) -> Score:
    """1 where the answer (`spans.answer`) is the right one, character by character."""
    return matched(spans.answer(completion), [one.strip() for one in gold.answers(example)])


def matched(said: str, right: list[str]) -> Score:
    if not said:
        return Score(0.0, reason="no answer")
    return Score(1.0, reason="right") if said in right else Score(0.0, reason="wrong")
