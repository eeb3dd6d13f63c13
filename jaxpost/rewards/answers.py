"""The final answer of a completion, for votes: which completions of a prompt say the same.

`math` finds it as the verifier of the same name does, and two answers are the same where that
verifier takes each for the other: 1/2, 0.5 and \\frac{2}{4}. Those of `exact` are the same as text.
"""

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence

from jaxpost.rewards import config as configs
from jaxpost.rewards import exact, literals, scorer, spans
from jaxpost.rewards.score import Item

Find = Callable[[str], str | None]  # a completion → its answer as text, None where it has none
MATH = "jaxpost.rewards.math:verify"
LONGEST = 2000  # characters of an answer that is looked into
COMPARED = 16  # answers of a prompt, each with each: 240 calls of the verifier at most


def math(completion: str) -> str | None:
    """The last box, or what follows `####` or `answer is`: plain LaTeX, numbers in lowest terms.

    Raises ImportError without math-verify (`jaxpost[rewards]`).
    """
    from jaxpost.rewards.math import extract, text

    said = extract.answer(completion)
    if said is None or len(said) > LONGEST:
        return said
    tidy = text.tidy(said)
    value = literals.literal(tidy)
    return (str(value) if value is not None else tidy) or None


def plain(completion: str) -> str | None:
    """The `<answer>`, or else all that follows the thought, character by character."""
    return spans.answer(completion) or None


def normalized(completion: str) -> str | None:
    """As `plain`, without regard to case, punctuation, articles and spaces."""
    return exact.plain(spans.answer(completion)) or None


def number(completion: str) -> str | None:
    """The last number of the answer, in lowest terms."""
    found = exact.NUMBER.findall(spans.answer(completion)[-1000:])
    value = literals.literal(found[-1]) if found else None
    return None if value is None else str(value)


OF_VERIFIERS: Mapping[str, str] = {
    MATH: "jaxpost.rewards.answers:math",
    "jaxpost.rewards.exact:verify": "jaxpost.rewards.answers:plain",
    "jaxpost.rewards.exact:normalized": "jaxpost.rewards.answers:normalized",
    "jaxpost.rewards.exact:numeric": "jaxpost.rewards.answers:number",
}  # how the answers that a verifier judges are found


def numbered(answers: Sequence[str | None]) -> list[int]:
    """Equal answers get equal numbers, from 0 in the order of their first ones; none gets −1."""
    known = list(dict.fromkeys(one for one in answers if one is not None))
    return [-1 if one is None else known.index(one) for one in answers]


def merged(answers: Sequence[Sequence[str | None]], same: scorer.Scorer) -> list[list[int]]:
    """`numbered` for several prompts, where `same` (of `MATH`) tells which texts are one answer.

    It is not asked about two numbers that are written out, nor about more than a prompt's COMPARED
    most frequent answers (others are the same as text). An answer joins the first that it is the
    same as.
    """
    texts = [list(dict.fromkeys(one for one in each if one is not None)) for each in answers]
    pairs = [
        (group, *pair)
        for group, each in enumerate(answers)
        for pair in itertools.combinations(frequent(each), 2)
        if not all(literals.literal(one) is not None for one in pair)
    ]
    asked = [item for _, *pair in pairs for item in (as_item(*pair), as_item(*reversed(pair)))]
    found = [one.value == 1.0 for one in same.submit(asked).result()] if asked else []
    alike = {
        pair for pair, each in zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True)
        if all(each)
    }  # fmt: skip
    out = []
    for group, each in enumerate(answers):
        first: dict[str, str] = {}
        for text in texts[group]:
            like = (one for one in first.values() if (group, one, text) in alike)
            first[text] = next(like, text)
        out.append(numbered([None if one is None else first[one] for one in each]))
    return out


def frequent(answers: Sequence[str | None]) -> list[str]:
    """The COMPARED most frequent ones, in the order in which they came."""
    counts = collections.Counter(one for one in answers if one is not None)
    often = {one for one, _ in counts.most_common(COMPARED)}
    return [one for one in counts if one in often]


def as_item(said: str, right: str) -> Item:
    """Whether `said` is right where `right` is the row's answer."""
    return Item("", f"<answer>{said}</answer>", {"answer": right})


def judge_of_pairs(config: configs.RewardConfig) -> scorer.Scorer:
    """What `merged` asks; processes and isolation are those of a reward's configuration."""
    return scorer.Scorer(
        configs.RewardConfig(
            MATH,
            deadline=config.deadline,
            workers=config.workers,
            isolation=config.isolation,
            memory=config.memory,
        )
    )
