"""A judge of pairs: which of two completions is better, asked in both orders, as two rewards.

A judge is `(prompt, completions, example) -> 0 | 1 | None`: the index of the better one of two
texts, None for a tie. `prompt` is as the data had it (text, or messages), `example` the other
columns of the row. It may be a coroutine function. It runs where rewards do: in processes, with a
deadline, and its failures are counted by kind.

The reward of a completion is how often it won, in [0, 1]: judges prefer the place, so each is shown
in both, and where the two verdicts disagree it is a tie, ½ each.
"""

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.options import check_ranges, option
from jaxpost.rewards import config as configs
from jaxpost.rewards import resolve, scorer
from jaxpost.rewards.score import Item, Scored

TIE = 0.5


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """A judge of pairs, and how the processes that run it are kept."""

    function: str | None = option(None, "import path, module:name or file.py:name")
    options: Mapping[str, Any] | None = option(None, "keyword arguments of the function")
    deadline: float = option(60.0, "longest that one verdict may take", "s", above=0)
    workers: int = option(2, "processes that run the function", least=1)
    environment: tuple[str, ...] = option(
        (), "variables that its processes may see besides PATH, HOME and the like"
    )

    def __post_init__(self):
        check_ranges(self, "judge.")
        if self.function is None:
            raise ValueError("judge needs judge.function, module:name or file.py:name")

    def all_parts(self) -> tuple[configs.Part, ...]:
        """The function, as those of a reward."""
        assert self.function is not None
        return (configs.Part(self.function, self.options),)


class Duels:
    """Has pairs judged; with it as a context its processes end.

    Raises:
      RewardError: the function cannot be imported, or does not take what a judge takes.
    """

    def __init__(self, config: JudgeConfig):
        (part,) = config.all_parts()
        path = resolve.absolute(part.function)
        settings = configs.RewardConfig(
            part.function,
            name=part.function,
            deadline=config.deadline,
            workers=config.workers,
            isolation="process",
            environment=config.environment,
        )
        self._scorer = scorer.Scorer(settings, Question(path, dict(part.options or {})))

    def submit(self, items: Sequence[Item]) -> "Pending":
        """Asks about the two completions of a prompt, and returns before they are judged."""
        first, second = items
        asked = [] if first.completion == second.completion else [(first, second), (second, first)]
        return Pending(self._scorer.submit([question(*pair) for pair in asked]), bool(asked))

    def __enter__(self) -> "Duels":
        return self

    def __exit__(self, *_: object) -> None:
        self._scorer.close()


class Pending(NamedTuple):
    """Verdicts on one pair that are still to come; without any, where both texts are the same."""

    verdicts: scorer.Pending
    asked: bool

    def result(self) -> list[Scored]:
        """The two completions' rewards. Waits."""
        if not self.asked:
            return [Scored(TIE, {}, "the same text", None)] * 2
        return rewards_of(*self.verdicts.result())


def question(shown_first: Item, shown_second: Item) -> Item:
    """Two completions as one item: both of them are in its example."""
    texts = [shown_first.completion, shown_second.completion]
    return Item(shown_first.prompt, "", {"completions": texts, "example": shown_first.example})


def rewards_of(straight: Scored, swapped: Scored) -> list[Scored]:
    """Of verdicts that are 1 where the one shown first won, 0 where the other did, ½ for a tie."""
    failed = next((one for one in (straight, swapped) if one.failure is not None), None)
    if failed is not None:
        return [failed._replace(parts={})] * 2
    won = (straight.value + 1.0 - swapped.value) / 2
    parts = {"disagreed": float({straight.value, swapped.value} in ({0.0}, {1.0}))}
    return [Scored(value, parts, verdict(value), None) for value in (won, 1.0 - won)]


def verdict(won: float) -> str:
    return "tie" if won == TIE else "won" if won > TIE else "lost"


class Question:
    """A judge as a reward of one item. Pickled by its path, it is looked up where it is read."""

    def __init__(self, path: str, options: Mapping[str, Any]):
        self._path, self._options = path, options
        self._judge: Callable[..., Any] | None = None

    def __reduce__(self):
        return loaded, (self._path, self._options)

    def __call__(self, item: Item) -> float:
        """1 where the completion shown first wins, 0 where the second does, ½ for a tie.

        Raises:
          ValueError: the judge answered something else.
        """
        judge = self._judge or resolve.resolve(self._path)
        given = [list(item.example["completions"]), item.example["example"]]
        said = judge(item.prompt, *given, **self._options)
        if inspect.isawaitable(said):
            said = asyncio.run(awaited(said))
        if said is None:
            return TIE
        if said not in (0, 1):
            raise ValueError(f"a judge says 0, 1 or None, not {said!r:.60}")
        return 1.0 - float(said)


async def awaited(said: Any) -> Any:
    return await said


def loaded(path: str, options: Mapping[str, Any]) -> Question:
    """A question whose judge is found and can be asked.

    Raises:
      ValueError: it is not there, or does not take what a judge takes.
    """
    asked, judge = Question(path, options), resolve.resolve(path)
    asked._judge = judge
    try:
        inspect.signature(judge).bind("", ["", ""], {}, **options)
    except TypeError as error:
        raise ValueError(
            f"{path}: a judge takes (prompt, completions, example) and judge.options: {error}"
        ) from error
    return asked
