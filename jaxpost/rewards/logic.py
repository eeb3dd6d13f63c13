"""Logic puzzles: an answer is right when it satisfies the puzzle, whatever solution is stored."""

import re
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import constraints, knights, score, spans

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def verify(completion: str, example: Mapping[str, Any]) -> score.Score:
    """1 for an answer that satisfies every statement of a knights-and-knaves puzzle, else 0.

    None where no answer does.
    """
    puzzle = knights.puzzle(example)
    found = knights.read(spans.answer(completion), puzzle)
    if found is None:
        return score.Score(0.0, {}, "unparsable")
    if knights.consistent(puzzle, found):
        return score.Score(1.0, {}, "right")
    if not knights.solvable(puzzle):
        return score.Score(None, {}, "no solution")
    return score.Score(0.0, {}, "wrong")


def logic_rl(completion: str, example: Mapping[str, Any]) -> score.Score:
    """Logic-RL's scores: format 1 or -1, and answer 2, wrong -1.5, unparsable -2.

    With a bad format the answer is not read (-3 in all). A prompt may end with `<think>`, so the
    completion may begin after it.
    """
    judged = verify(completion, example)
    if judged.value is None:
        return judged
    if not well_formed(completion):
        return score.Score(-3.0, {"format": -1.0, "answer": -2.0}, "format")
    answer = {"right": 2.0, "wrong": -1.5, "unparsable": -2.0}[judged.reason]
    return score.Score(1.0 + answer, {"format": 1.0, "answer": answer}, judged.reason)


def well_formed(completion: str) -> bool:
    """Each tag once and in order, nothing but space around them; `<think>` may be the prompt's."""
    found = re.findall("|".join(TAGS), completion)
    whole = completion.strip()
    begun = found == list(TAGS) and whole.startswith("<think>")
    prompted = found == list(TAGS[1:])
    between = whole.partition("</think>")[2].partition("<answer>")[0]
    return (begun or prompted) and whole.endswith("</answer>") and not between.strip()


def satisfies(completion: str, example: Mapping[str, Any], *, seconds: float = 5.0) -> score.Score:
    """1 for an assignment that satisfies `constraints`, a text in SMT-LIB 2, else 0.

    The answer gives each declared constant a value: as JSON, `{"a": 1}`, or in lines `a = 1`. None
    where z3 cannot decide in `seconds`, or where the puzzle has no solution at all.
    """
    puzzle = constraints.parse(constraints.column(example))
    found = constraints.read(spans.code(completion))
    if found is None:
        return score.Score(0.0, {}, "unparsable")
    return constraints.judge(puzzle, found, seconds)
