"""Mathematics: the last box of a completion against the row's right answer.

    math.verify(r"... so \\boxed{\\frac{2}{4}}", {"answer": "1/2"})      # Score(1.0, ...)

`compare` has the rules, `extract` where the answer is looked for, `screens` what is not computed.
An answer that cannot be read, is screened or takes too long is wrong, and is counted by its reason;
a right answer that cannot be read is nobody's fault: None. Code that cannot be interrupted (one
huge power) is ended by the deadline of `rewards.Scorer`, so it is called through one.
"""

from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import gold
from jaxpost.rewards.math import compare, extract, form, limit, screens, text
from jaxpost.rewards.score import Score

SECONDS = 3.0


def verify(
    completion: str,
    example: Mapping[str, Any],
    *,
    evaluated: bool = True,
    tolerance: float = 0.0,
    seconds: float = SECONDS,
) -> Score:
    """1 where the completion's answer equals one of the right answers, 0 where not, None unknown.

    `evaluated`: where a number is right, it is to be written out (so that the question, copied into
    the box, earns nothing). `tolerance`: of numbers, relative. `seconds`: longest for one pair.
    Raises KeyError where the row has no right answer.
    """
    policy = compare.Policy(evaluated, tolerance)
    rights = [form.read(text.tidy(boxless(one))) for one in gold.answers(example)]
    known = [one for one in rights if readable(one, seconds)]
    if not known:
        return Score(None, reason="right answer unreadable")
    said = extract.answer(completion)
    if said is None:
        return Score(0.0, reason="no answer")
    if len(said) > 2 * screens.LENGTH:
        return Score(0.0, reason="too long")
    tidy = text.tidy(said)
    answer = form.read(tidy) if not screens.refuses(tidy) else None
    for right in known:
        if text.squeezed(tidy) == text.squeezed(right.text):
            return Score(1.0, reason="right")
        if answer is None:
            continue
        try:
            with limit.seconds(seconds):
                if compare.same(right, answer, policy):
                    return Score(1.0, reason="right")
        except limit.OverrunError:
            return Score(0.0, reason="timeout")
        except (MemoryError, RecursionError, OverflowError, ValueError):
            return Score(0.0, reason="unreadable")
    return Score(0.0, reason=screens.refuses(tidy, known[0].text) or "wrong")


def boxless(right: str) -> str:
    """A right answer that is a whole solution (MATH, open-instruct) is what its last box holds."""
    return (extract.boxed(right) or "") if text.BOX.search(right) else right


def readable(right: form.Form, seconds: float) -> bool:
    try:
        with limit.seconds(seconds):
            return compare.readable(right)
    except (limit.OverrunError, MemoryError, RecursionError):
        return False
