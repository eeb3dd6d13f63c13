"""Where the answer stands in a completion."""

import re

from jaxpost.rewards import spans
from jaxpost.rewards.math import text as texts

MARKED = re.compile(r"####[ \t]*([^\n]+)")
# Possessive, so that no run of spaces is read in two ways: the time stays linear.
SAID = re.compile(
    r"answer(?:\s++is(?!\w))?+(?:\s*+[:=])?+\s++\**+\s*+((?:[^\n.]|\.(?!\s|$))++)", re.IGNORECASE
)
SHORT = 200


def answer(completion: str) -> str | None:
    """The answer as written; None where there is none.

    Looked for after the last `</think>` (a thought that is not closed has no answer), and in the
    last `<answer>` if there is one: the last `\\boxed{}`; or else what follows the last `####`; or
    else the last `answer is ...`; or else all of it, if it is inside the tag or one short line.
    """
    said = spans.spoken(completion)
    if "<think>" in said:
        return None
    tagged = spans.ANSWER.findall(said)
    place = tagged[-1] if tagged else said
    if texts.BOX.search(place):
        return boxed(place)
    for pattern in (MARKED, SAID):
        if found := pattern.findall(place[-20_000:]):
            return found[-1].strip() or None
    whole = place.strip()
    return whole if whole and (tagged or (len(whole) <= SHORT and "\n" not in whole)) else None


def boxed(text: str) -> str | None:
    """What the last box holds; of boxes in a box the innermost. None: empty, or not closed."""
    last = list(texts.BOX.finditer(text))[-1]
    rest = text[last.end() :]
    if not rest.lstrip().startswith("{"):
        word = re.match(r"\s+([^\s$.,]+)", rest)
        return word[1] if word else None
    inner = texts.groups(rest, rest.index("{"))
    return inner.strip() or None if inner is not None else None
