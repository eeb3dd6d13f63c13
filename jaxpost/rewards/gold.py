"""Where a data row keeps its right answer: one rule for every verifier."""

from collections.abc import Mapping
from typing import Any

COLUMNS = ("answer", "ground_truth", "solution", "target", "label")
WITHIN = (
    ("reward_model", "ground_truth"),
    ("reward_spec", "ground_truth"),
    ("extra_info", "answer"),
)
GSM8K = "####"


def gold(example: Mapping[str, Any]) -> Any:
    """The value of the first of these that is there and not None.

    `reward_model.ground_truth` and `reward_spec.ground_truth` (verl, SkyRL; they go before
    `extra_info.answer`), `answer`, `ground_truth`, `solution`, `target`, `label`. Raises KeyError
    with the columns that there are.
    """
    for name in COLUMNS:
        if example.get(name) is not None:
            return example[name]
    for column, name in WITHIN:
        inner = example.get(column)
        if isinstance(inner, Mapping) and inner.get(name) is not None:
            return inner[name]
    known = ", ".join((*COLUMNS, *(".".join(pair) for pair in WITHIN)))
    raise KeyError(f"no right answer among {sorted(map(str, example))}; it is sought in {known}")


def answers(example: Mapping[str, Any]) -> list[str]:
    """The right answers as text: one, or the several of a list, any of which will do.

    Of GSM8K's solutions, what follows the last `####`.
    """
    found = gold(example)
    several = found if isinstance(found, list | tuple) else [found]
    return [str(one).rpartition(GSM8K)[2].strip() for one in several]
