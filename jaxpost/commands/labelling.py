"""Solutions in steps, completions begun after each step, and which of these are right.

Completion k after step i of row p is drawn with a number that depends on these three alone.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpost import rewards
from jaxpost.commands.candidates import judging
from jaxpost.commands.candidates.judging import Asked
from jaxpost.data import questions
from jaxpost.data.prompts import Prompt
from jaxpost.data.rows import Dropped
from jaxpost.recipes import draws, experience, judge, setup
from jaxpost.rollout import shapes

OURS = ("steps", "completion", "unfinished", "labels", "rollouts", "correct")  # not the reward's


class Solution(NamedTuple):
    """A solution of a row of DATA.

    Attributes:
      steps: as they are labelled; with one at least.
      begun: the text up to the end of each, what separates it from the next included.
      said: all of it.
      finished: whether the last step ends it.
    """

    asked: Asked
    steps: Sequence[str]
    begun: Sequence[str]
    said: str
    finished: bool

    @property
    def example(self) -> dict[str, Any]:
        """What the reward reads: the row without the solution."""
        columns = self.asked.prompt.example
        return {name: columns[name] for name in columns if name not in OURS}


class Labelled(NamedTuple):
    """What came of a solution's steps.

    Attributes:
      outcomes: a step: whether each completion begun after it is right, of those that were judged;
        None where none was drawn.
      correct: whether the solution is; None where it is not finished, or could not be judged.
      unjudged: completions (and solutions) without a reward, by why.
      cut: completions that ended because they were long.
      no_room: steps after which the model has no room for a completion.
    """

    solution: Solution
    outcomes: Sequence[Sequence[bool] | None]
    correct: bool | None
    unjudged: Mapping[str, int]
    cut: int
    no_room: int


# Solutions -------------------------------------------------------------------------------------


def solution_of(asked: Asked, separator: str) -> Solution | Dropped:
    """The solution that a row has.

    Raises:
      ValueError: it has none, or one that cannot be read.
    """
    columns, where = asked.prompt.example, asked.row.where
    given = columns.get("steps")
    if given is None:
        found, begun, said = in_text(text_of(columns.get("completion"), where), separator)
    else:
        found = listed(given, where)
        begun = ["".join(f"{s}{separator}" for s in found[: i + 1]) for i in range(len(found))]
        said = separator.join(found)
    cut = columns.get("unfinished")
    if cut not in (None, True, False):
        raise ValueError(f"{where}: column unfinished: expected true or false, got {cut!r}")
    if cut:
        found, begun = found[:-1], begun[:-1]
    return Solution(asked, found, begun, said, not cut) if found else Dropped("no_step", where)


def in_text(text: str, separator: str) -> tuple[list[str], list[str], str]:
    """(the steps, the text up to the end of each, all of it)."""
    found, begun, end = [], [], 0
    for part in text.split(separator):
        end += len(part) + len(separator)
        if part.strip():
            found.append(part)
            begun.append(text[:end])
    return found, begun, text


def text_of(given: Any, where: str) -> str:
    """A completion as text; it may be an assistant's message."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], Mapping):
        given = questions.words([{"role": "assistant", **given[0]}])
    if not isinstance(given, str):
        raise ValueError(
            f"{where}: a solution is the column steps (a list of texts) or completion (text); "
            f"there is {'neither' if given is None else f'a completion {given!r:.60}'}"
        )
    return given


def listed(given: Any, where: str) -> list[str]:
    """Steps as they are given."""
    known = isinstance(given, list | tuple) and all(isinstance(one, str) for one in given)
    if not known or not all(one.strip() for one in given):
        raise ValueError(
            f"{where}: column steps: expected a list of texts with words, got {given!r:.60}"
        )
    return list(given)


# Completions -----------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where completions begin: after a step of a solution, by its number among several."""

    number: int
    step: int
    prompt: Prompt


def labelled(
    policy: setup.Policy,
    solutions: Sequence[Solution],
    scorer: judge.Scorer,
    sampling: experience.RolloutConfig,
    seed: int,
    correct: float,
    size: int,
) -> Iterator[list[Labelled]]:
    """What comes of the steps of all solutions, some at a time, in their order.

    About `size` completions are drawn at once.
    """
    several = max(size // sampling.completions, 1)
    sampling = dataclasses.replace(
        sampling, prompts=max(several, shapes.PREFILL_ROWS), slots=sampling.slots or size
    )
    part: list[Solution] = []
    for solution in solutions:
        part.append(solution)
        if sum(len(one.steps) for one in part) >= several:
            yield judged(policy, part, scorer, sampling, seed, correct)
            part = []
    if part:
        yield judged(policy, part, scorer, sampling, seed, correct)


def judged(
    policy: setup.Policy,
    part: Sequence[Solution],
    scorer: judge.Scorer,
    sampling: experience.RolloutConfig,
    seed: int,
    correct: float,
) -> list[Labelled]:
    """What comes of the steps of a few solutions; rewards run while others are drawn."""
    places = [place for number, one in enumerate(part) for place in places_of(policy, number, one)]
    room = policy.model.config.max_positions - sampling.max_new_tokens
    fitting = [place for place in places if len(place.prompt.tokens) <= room]
    wholes = {
        number: judging.submitted(scorer, [item_of(one)])
        for number, one in enumerate(part)
        if one.finished
    }
    pending: dict[tuple[int, int], list[judge.Scores]] = {}
    cut: collections.Counter[int] = collections.Counter()
    for place, drawn in draw(policy, part, fitting, sampling, seed):
        items = [continued(part[place.number], place.step, item) for item in drawn]
        cut[place.number] += sum(item.truncated for item in items)
        pending[place.number, place.step] = judging.submitted(scorer, items)
    out = []
    for number, one in enumerate(part):
        told: collections.Counter[str] = collections.Counter()
        outcomes = [
            rights(pending[number, step], correct, told) if (number, step) in pending else None
            for step in range(len(one.steps))
        ]
        own = rights(wholes[number], correct, told) if number in wholes else []
        fit = sum(place.number == number for place in fitting)
        left = sum(place.number == number for place in places) - fit
        right = own[0] if own else None
        out.append(Labelled(one, outcomes, right, dict(told), cut[number], left))
    return out


def places_of(policy: setup.Policy, number: int, solution: Solution) -> Iterator[Place]:
    """After each step but that which ends the solution."""
    prompt, tokenizer = solution.asked.prompt, policy.tokenizer
    for step in range(len(solution.steps) - solution.finished):
        begun = np.array(tokenizer.encode_inside(solution.begun[step])[0], np.int32)
        yield Place(number, step, prompt._replace(tokens=np.concatenate([prompt.tokens, begun])))


def draw(
    policy: setup.Policy,
    part: Sequence[Solution],
    places: Sequence[Place],
    sampling: experience.RolloutConfig,
    seed: int,
) -> Iterator[tuple[Place, list[rewards.Item]]]:
    """The completions of each place, as they are done."""
    if not places:
        return
    ids = [
        sample_id(part[place.number].asked.prompt.row, place.step, index)
        for place in places
        for index in range(sampling.completions)
    ]
    asked, key = [place.prompt for place in places], jax.random.key(seed)
    for index, found in draws.drawn(policy, policy.params, asked, key, sampling, sample_ids=ids):
        yield places[index], draws.items_of(policy, asked[index], found)


def sample_id(row: int, step: int, index: int) -> int:
    """A number of 31 bits of a completion, different for nearly all."""
    return int(np.random.SeedSequence([row, step, index]).generate_state(1)[0] >> 1)


def item_of(solution: Solution) -> rewards.Item:
    """What the reward is asked of a solution."""
    return rewards.Item(solution.asked.prompt.prompt, solution.said, solution.example)


def continued(solution: Solution, step: int, item: rewards.Item) -> rewards.Item:
    """What the reward is asked of a completion: the whole solution that it makes."""
    whole = solution.begun[step] + item.completion
    return item._replace(completion=whole, completion_ids=(), example=solution.example)


def rights(
    pending: Sequence[judge.Scores], correct: float, told: collections.Counter[str]
) -> list[bool]:
    """Whether each that was judged is right; why others were not is counted."""
    found = [one for some in pending for one in some.result()]
    told.update(one.failure for one in found if one.failure is not None)
    return [one.value >= correct for one in found if one.failure is None]
