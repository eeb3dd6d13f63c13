"""The ways to write a reward: jaxpost's own, batched, TRL's and verl's, told apart by their names.

| parameters | called with |
|---|---|
| `(completion, example)` | a text and the data's row; any two names |
| `(item)` | a `score.Item`, which also has the prompt and whether the completion was cut |
| `(completions, examples)` | lists of texts and rows |
| `completions` and others, without `examples` | TRL: lists by keyword, the row's columns too |
| `solution_str`, `ground_truth` | verl: by keyword |
| `solution_strs`, `ground_truths` | verl's batch: lists by keyword |
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, SupportsFloat

from jaxpost.rewards import gold
from jaxpost.rewards.score import Item, Score

Style = Literal["own", "item", "batched", "trl", "verl", "verl_batch"]
VERL_LISTS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Reward(NamedTuple):
    """A function, how it is called, and whether it is a coroutine function."""

    function: Callable[..., Any]
    style: Style
    asynchronous: bool
    names: tuple[str, ...]
    keywords: bool  # it takes any keyword

    @property
    def lists(self) -> bool:
        """Whether it takes lists and returns one."""
        return self.style in ("batched", "trl", "verl_batch")

    @property
    def many(self) -> bool:
        """Whether several items go into one call, or are awaited together."""
        return self.asynchronous or self.lists


def read(function: Callable[..., Any], options: Mapping[str, Any]) -> Reward:
    """The style of a function whose keyword arguments `options` are given.

    Raises:
      ValueError: its parameters are those of no reward, or it does not take an option.
    """
    try:
        parameters = inspect.signature(function).parameters
    except TypeError as error:
        raise ValueError(f"not a function: {error}") from error
    keywords = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    wrong = [] if keywords else sorted(set(options) - set(parameters))
    if wrong:
        raise ValueError(f"no parameter {', '.join(wrong)}; it has {', '.join(parameters)}")
    free = {name: one for name, one in parameters.items() if name not in options}
    style = style_of(free)
    bound = functools.partial(function, **options) if options else function
    return Reward(bound, style, is_async(function), tuple(free), keywords)


def style_of(parameters: Mapping[str, inspect.Parameter]) -> Style:
    if "solution_str" in parameters and "ground_truth" in parameters:
        return "verl"
    if "solution_strs" in parameters and "ground_truths" in parameters:
        return "verl_batch"
    if "completions" in parameters:
        return "batched" if "examples" in parameters else "trl"
    ordered = [one for one in parameters.values() if one.kind in POSITIONAL]
    if [one.name for one in ordered if one.default is one.empty] == ["item"]:
        return "item"
    star = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters.values())
    needed = [one for one in ordered if one.default is one.empty]
    if len(needed) > 2 or (len(ordered) < 2 and not star):
        raise ValueError(
            f"a reward takes (completion, example), or TRL's or verl's parameters; this one takes "
            f"({', '.join(parameters)})"
        )
    return "own"


def is_async(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    call = function.__call__ if callable(function) else function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def call(reward: Reward, items: Sequence[Item], metrics: dict[str, float]) -> Any:
    """What the function returns for `items`: a list where its style is of lists, else one value.

    `metrics` gets what a function of TRL's style logs by `log_metric`.
    """
    first = items[0]
    match reward.style:
        case "own":
            return reward.function(first.completion, first.example)
        case "item":
            return reward.function(first)
        case "batched":
            examples = [item.example for item in items]
            return reward.function([item.completion for item in items], examples)
        case "trl":
            return reward.function(**trl_arguments(reward, items, metrics))
        case "verl":
            return reward.function(**accepted(reward, verl_arguments(first)))
        case "verl_batch":
            rows = list(map(verl_arguments, items))
            arguments = {VERL_LISTS[name]: [row[name] for row in rows] for name in VERL_LISTS}
            return reward.function(**accepted(reward, arguments))


def verl_arguments(item: Item) -> dict[str, Any]:
    return {
        "data_source": item.example.get("data_source", ""),
        "solution_str": item.completion,
        "ground_truth": gold.gold(item.example),
        "extra_info": item.example.get("extra_info"),
    }


def trl_arguments(
    reward: Reward, items: Sequence[Item], metrics: dict[str, float]
) -> dict[str, Any]:
    """Lists of prompts, completions (messages, where the prompt is) and columns."""

    def log_metric(name: str, value: float) -> None:
        metrics[name] = float(value)

    def log_extra(column: str, values: Sequence[Any]) -> None:
        """Texts beside a sample: not kept."""

    columns = dict.fromkeys(name for item in items for name in item.example)
    arguments = {name: [item.example.get(name) for item in items] for name in columns}
    arguments |= {
        "prompts": [item.prompt for item in items],
        "completions": [
            item.completion
            if isinstance(item.prompt, str)
            else [{"role": "assistant", "content": item.completion}]
            for item in items
        ],
        "completion_ids": [list(item.completion_ids) for item in items],
        "trainer_state": None,
        "environments": None,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    return accepted(reward, arguments)


def accepted(reward: Reward, arguments: dict[str, Any]) -> dict[str, Any]:
    """Those that the function has a parameter for."""
    if reward.keywords:
        return arguments
    return {name: value for name, value in arguments.items() if name in reward.names}


def score_of(value: Any) -> Score:
    """What a reward returned, as a Score: a number, None, verl's dict, or a Score already.

    A dict has its `score`; its other numbers, whoever's type they are, are parts, what is no number
    (`pred`) is not. Raises TypeError for anything else.
    """
    if isinstance(value, Score):
        return value._replace(value=None if value.value is None else number(value.value))
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"a dict without the key score: {sorted(map(str, value))}")
        others = {str(name): part(one) for name, one in value.items() if name != "score"}
        parts = {name: one for name, one in others.items() if one is not None}
        return Score(None if value["score"] is None else number(value["score"]), parts)
    return Score(None if value is None else number(value))


def part(value: Any) -> float | None:
    if not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except Exception:  # an array of several
        return None


def number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise TypeError(f"a reward is a number or None, not the text {value[:40]!r}")
    return float(value)
