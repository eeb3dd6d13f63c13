"""When what a program printed or returned is the right answer."""

import math
from typing import Any

from jaxpost.rewards.sandbox.inside import plain

TOLERANCE = 1e-9  # relative, and absolute near zero


def printed(said: str, wanted: str) -> bool:
    """Line by line, word by word; blank lines at the end and the spaces between do not matter.

    A number that is wanted with a point or an exponent may be off by TOLERANCE.
    """
    ours, theirs = (text.rstrip().split("\n") for text in (said, wanted))
    return len(ours) == len(theirs) and all(map(same_line, ours, theirs))


def same_line(said: str, wanted: str) -> bool:
    ours, theirs = said.split(), wanted.split()
    return len(ours) == len(theirs) and all(map(same_word, ours, theirs))


def same_word(said: str, wanted: str) -> bool:
    if said == wanted:
        return True
    if not any(mark in wanted for mark in ".eE"):
        return False
    try:
        return close(float(said), float(wanted))
    except ValueError:
        return False


def close(said: float, wanted: float) -> bool:
    return math.isclose(said, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def returned(said: Any, wanted: Any) -> bool:
    """Equal, and of the same type all through: 5.0 is not 5, and True is not 1.

    JSON has no tuples and only text as keys, so a tuple counts as a list, and a key as what JSON
    would make of it. Floats may be off by TOLERANCE; NaN equals nothing.
    """
    if isinstance(said, plain.Opaque):
        return False
    said = list(said) if type(said) is tuple else said
    wanted = list(wanted) if type(wanted) is tuple else wanted
    if type(said) is not type(wanted):
        return False
    if type(said) is float:
        return close(said, wanted)
    if type(said) is list:
        return len(said) == len(wanted) and all(map(returned, said, wanted))
    if type(said) is dict:
        ours, theirs = by_text(said), by_text(wanted)
        return {*ours} == {*theirs} and all(returned(ours[key], theirs[key]) for key in theirs)
    return said == wanted


def by_text(values: dict[Any, Any]) -> dict[Any, Any]:
    return {str(key) if type(key) in (int, float) else key: one for key, one in values.items()}
