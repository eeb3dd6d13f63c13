"""What a reward is asked about, and what it answers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which rewards are trained on


class Item(NamedTuple):
    """One completion to be judged.

    `prompt` is as the data had it (text, or messages), `completion` the text that the policy wrote
    without its stop token, `example` all other columns of the data's row. `truncated`: it ended by
    length, not by a stop token.
    """

    prompt: str | Sequence[Message]
    completion: str
    example: Mapping[str, Any]
    completion_ids: Sequence[int] = ()
    truncated: bool = False


class Score(NamedTuple):
    """What a verifier may return in place of a float.

    `value` None: it cannot be judged, so the sample is masked and counted, never 0. Each of `parts`
    is logged. `reason` ("wrong", "unparsable", "timeout", ...) is counted and written out.
    """

    value: float | None
    parts: Mapping[str, float] = {}
    reason: str = ""


class Scored(NamedTuple):
    """What a recipe gets, one an item and in the order of the items.

    `value` is NaN where masked. `failure`: None, or its kind: "none" (the reward said None),
    "timeout", "crash", "error", "not_finite", "infrastructure".
    """

    value: float
    parts: Mapping[str, float]
    reason: str
    failure: str | None


def finite(value: float) -> bool:
    """Whether a reward is a number in float32 too."""
    return abs(value) <= LARGEST


class InfrastructureError(Exception):
    """Raise it in a reward where not the completion is at fault: a service is down, a tool missing.

    The sample is masked and counted as "infrastructure".
    """
