"""Answers in steps: pairs of one step (Step-DPO), and labels of each (Math-Shepherd)."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxpost.data.rows import Dropped, Note
from jaxpost.data.trajectories import pairs
from jaxpost.data.trajectories.sessions import Answer

Outcomes = Callable[[int], Sequence[bool | int]]


def split(text: str, separator: str) -> list[str]:
    """The steps of an answer; blank ones are none."""
    return [step for step in text.split(separator) if step.strip()]


def escaped(step: str, separator: str, escape: str | None = None) -> str:
    r"""A step without the separator in it, which becomes `escape` (None: \n for a line break, …).

    Raises:
      ValueError: the separator would still be there.
    """
    if separator not in step:
        return step
    instead = separator.encode("unicode_escape").decode() if escape is None else escape
    found = step.replace(separator, instead)
    if separator in found:
        raise ValueError(f"{separator!r} in a step cannot be escaped as {instead!r}; set --escape")
    return found


def in_steps(answer: Answer, separator: str) -> tuple[Answer, list[Note]]:
    """The answer with whole steps only, split if it is text, and what became of the others.

    Raises:
      ValueError: the error is said to be in a step that is not there.
    """
    text = answer.steps
    steps = split(text, separator) if isinstance(text, str) else list(text)
    if answer.error_step is not None and answer.error_step >= len(steps):
        raise ValueError(
            f"{answer.where}: error_step is {answer.error_step}, and there are {len(steps)} steps"
        )
    notes = []
    if answer.unfinished and steps:
        steps = steps[:-1]
        notes.append(Note("unfinished_step", answer.where))
    return dataclasses.replace(answer, steps=steps), notes


# Step-DPO (arXiv 2406.18629) -------------------------------------------------------------------


def step_pairs(answers: Sequence[Answer], separator: str) -> Iterator[dict[str, Any] | Dropped]:
    """Rows of the first wrong step of each wrong answer against a right answer's step in its place.

    Args:
      answers: of one task, whole steps only; a right one is the twin of a wrong one if the steps
        before the error are the same but for white space. The first twin that differs is taken.
    """
    right = [one for one in answers if one.correct and not one.unfinished]
    used: set[str] = set()
    for answer in (one for one in answers if not one.correct):
        found = wrong_answer(answer, right, separator)
        used |= set() if isinstance(found, Dropped) else {found["from"][0]}
        yield found
    for answer in (one for one in answers if one.correct and one.where not in used):
        yield Dropped("unfinished" if answer.unfinished else "unused", answer.where)


def wrong_answer(
    answer: Answer, right: Sequence[Answer], separator: str
) -> dict[str, Any] | Dropped:
    """The row of a wrong answer, or what it lacks."""
    if answer.correct is None:
        return Dropped("no_verdict", answer.where)
    if answer.error_step is None:
        return Dropped("no_error_step", answer.where)
    if answer.error_step >= len(answer.steps):
        return Dropped("unfinished", answer.where)
    return step_pair(answer, right, answer.error_step, separator)


def step_pair(
    wrong: Answer, right: Sequence[Answer], error: int, separator: str
) -> dict[str, Any] | Dropped:
    """The row of one wrong step."""
    step = pairs.normalised(wrong.steps[error])
    twins = [one for one in right if is_twin(one, wrong, error)]
    if not twins:
        return Dropped("no_correction", wrong.where)
    better = [one for one in twins if pairs.normalised(one.steps[error]) != step]
    if not better:
        return Dropped("identical", wrong.where)
    return {
        "prompt": wrong.prompt,
        "initial_reason_steps": "".join(one + separator for one in wrong.steps[:error]),
        "chosen": better[0].steps[error],
        "rejected": wrong.steps[error],
        "full_chosen": separator.join(better[0].steps),
        "full_rejected": separator.join(wrong.steps),
        "ends_turn": False,  # a step has no end-of-turn token
        "error_step": error,
        **wrong.extras,
        **pairs.origin(better[0], wrong),
    }


def is_twin(right: Answer, wrong: Answer, error: int) -> bool:
    """Whether a right answer has the same prompt and steps before the error, and one after them."""
    asked = (right.prompt, right.extras) == (wrong.prompt, wrong.extras)
    before = [[pairs.normalised(step) for step in one.steps[:error]] for one in (right, wrong)]
    return asked and before[0] == before[1] and len(right.steps) > error


# Labels of steps (arXiv 2312.08935, equations 3 and 4) -----------------------------------------


def monte_carlo(outcomes: Sequence[bool | int], *, soft: bool = False) -> float | None:
    """A step's label from completions begun after it: whether any is right, or the part that is.

    None where there are none.
    """
    if not outcomes:
        return None
    return sum(outcomes) / len(outcomes) if soft else float(any(outcomes))


def labels(
    count: int, outcomes: Outcomes, *, final: bool | None = None, soft: bool = False
) -> list[float]:
    """Labels of the steps up to the first that has none.

    Args:
      count: how many steps there are.
      outcomes: (step) → whether each completion begun after it reached the right answer.
      final: whether the answer is right: the last step's label, where it is known.
    """
    found = [monte_carlo(outcomes(step), soft=soft) for step in range(count)]
    if final is not None and found:
        found[-1] = float(final)
    return [
        one for one in itertools.takewhile(lambda one: one is not None, found) if one is not None
    ]


def labelled(
    answer: Answer, separator: str, *, soft: bool = False, escape: str | None = None
) -> Iterator[dict[str, Any] | Dropped | Note]:
    """The row of an answer's steps and labels, or why there is none.

    Args:
      answer: with whole steps only. Labels of steps beyond them are dropped; so are steps from the
        first one without a label on.
    """
    columns, steps = answer.rollouts or (), answer.steps
    given = labels(
        len(steps),
        lambda step: columns[step] if step < len(columns) else (),
        final=None if answer.unfinished else answer.correct,
        soft=soft,
    )
    beyond, without = max(len(columns) - len(steps), 0), len(steps) - len(given)
    yield from [Note("missing_steps", answer.where)] * beyond
    if not given:
        yield Dropped("no_label", answer.where)
        return
    yield from [Note("unlabelled", answer.where)] * without
    try:
        said = [escaped(step, separator, escape) for step in steps[: len(given)]]
    except ValueError as error:
        raise ValueError(f"{answer.where}: {error}") from error
    changed = sum(one != other for one, other in zip(said, steps, strict=False))
    yield from [Note("escaped", answer.where)] * changed
    row = {"prompt": answer.prompt, "completions": said, "labels": given, **answer.extras}
    yield row | pairs.origin(answer)
