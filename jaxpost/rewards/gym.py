"""Every task of reasoning-gym, judged by the task's own scorer.

    gym.verify(completion, {"dataset": "countdown", "entry": '{"question": ...}', "settings": "{}"})

`configs/make_reasoning_gym.py` writes such rows. Some scorers run the answer as Python, so texts
are screened before they meet one (gym_screens.py); a scorer may still be slow, so a
`rewards.Scorer` calls this in a confined worker with a deadline. Departures from the scorers:

1. A screened answer, and one that makes its scorer fail, is 0 (reason "refused", "unparsable").
2. Numbers in `puzzle24` must be the puzzle's own; the scorer takes any four in range.
3. `coin_flip` wants the number (its scorer: the first digit), `game_of_life_halting` the word (its
   scorer: any text).
4. Where `polynomial_equations` has no solution only the empty answer is right; the scorer takes any
   text without a number.
5. `arc_agi` and `rearc` boards that JSON made lists are tuples again, else no answer is right.
"""

import functools
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import gym_screens, score, spans

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError("reasoning-gym is not installed; pip install 'jaxpost[rewards]'") from error

Entry = Mapping[str, Any]


def verify(completion: str, example: Mapping[str, Any]) -> score.Score:
    """The scorer's value in [0, 1], partial credit included; `parts["correct"]` is 1 at 1.0.

    Raises KeyError where the example lacks `entry`, ValueError where no such task exists.
    """
    entry = read_entry(example)
    dataset = example.get("dataset") or entry["metadata"]["source_dataset"]
    said = spans.answer(completion)
    own = entry["answer"]
    if isinstance(own, str) and said == own.strip():
        said = own  # the space around it, which some scorers compare
    wrong = gym_screens.refuses(dataset, said, entry)
    if wrong:
        return score.Score(0.0, {"correct": 0.0}, wrong)
    return judge(scorer(dataset, example.get("settings") or "{}"), said, entry)


def exact(completion: str, example: Mapping[str, Any]) -> score.Score:
    """As `verify`, without partial credit: 1 where the scorer says 1, else 0."""
    found = verify(completion, example)
    return found if found.value is None else found._replace(value=found.parts["correct"])


def judge(task: Any, said: str, entry: Entry) -> score.Score:
    try:
        value = ask(task, said, entry)
    except Exception:  # scorers raise what they like on a text they cannot read
        return unreadable(task, entry)
    if math.isnan(value):
        return unreadable(task, entry)
    value = min(1.0, max(0.0, value))
    return score.Score(value, {"correct": float(value == 1)}, "right" if value == 1 else "wrong")


def unreadable(task: Any, entry: Entry) -> score.Score:
    """The answer's fault, unless the scorer cannot read the entry's own answer either."""
    if entry["answer"] is not None:
        try:
            ask(task, entry["answer"], entry)
        except Exception as error:
            return score.Score(None, {}, f"scorer_error: {error!r}")
    return score.Score(0.0, {"correct": 0.0}, "unparsable")


def ask(task: Any, said: str, entry: Entry) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(task.score_answer(said, entry))


def read_entry(example: Mapping[str, Any]) -> Entry:
    if "entry" not in example:
        raise KeyError(
            f"a reasoning-gym row needs the column entry (it has {', '.join(example)}); "
            "configs/make_reasoning_gym.py writes it"
        )
    entry = example["entry"]
    entry = json.loads(entry) if isinstance(entry, str) else entry
    metadata = dict(entry["metadata"])
    if metadata.get("source_dataset") in ("arc_agi", "rearc"):
        metadata["output"] = tuple(tuple(row) for row in metadata["output"])
    return {**entry, "metadata": metadata}


@functools.lru_cache(maxsize=256)
def scorer(dataset: str, settings: str) -> Any:
    """The task's data set, of one entry: its `score_answer` reads the settings only."""
    return reasoning_gym.create_dataset(dataset, size=1, seed=0, **json.loads(settings))
