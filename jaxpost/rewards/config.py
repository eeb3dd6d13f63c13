"""Which functions judge a completion, and how the processes that run them are kept."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxpost.options import check_ranges, option

Isolation = Literal["auto", "sandbox", "process"]
OfSteps = Literal["min", "product", "last", "mean"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One more reward, added to the first with a weight of its own."""

    function: str = option(help="import path, module:name or file.py:name")
    options: Mapping[str, Any] | None = option(None, "keyword arguments of the function")
    weight: float = option(1.0, "factor in the sum; 0: only logged", least=-1e6, most=1e6)
    name: str | None = option(None, "what it is logged as; null: the function's name")


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """R = Σ weight · part. A completion whose parts cannot all be judged has no reward."""

    function: str | None = option(None, "import path, module:name or file.py:name")
    options: Mapping[str, Any] | None = option(None, "keyword arguments of the function")
    weight: float = option(1.0, "factor of the function's score", least=-1e6, most=1e6)
    name: str | None = option(None, "what it is logged as; null: the function's name")
    parts: tuple[Part, ...] = option((), "more rewards, each with a weight: format, length, ...")
    model: str | None = option(
        None,
        "folder or hub id of a reward model, process reward model or generative verifier; without "
        "a function its score is the reward, with one model_weight times its score between 0 and 1 "
        "is added",
    )
    model_weight: float = option(
        1.0, "weight of the reward model; with a function below the gap of its scores", above=0
    )
    steps: OfSteps | None = option(
        None,
        "process reward model: what of the probabilities that steps are right is the score; null: "
        "min",
    )
    deadline: float = option(10.0, "longest that one call may take", "s", above=0)
    workers: int = option(2, "processes that run the functions", least=1)
    batch: int = option(64, "most completions in one call of a batched or async function", least=1)
    isolation: Isolation = option(
        "auto",
        "auto: jaxpost's own verifiers in a sandbox, other functions in a plain process",
    )
    memory: float | None = option(
        None, "most address space of a worker; null: 2 in a sandbox, else no limit", "GB", above=0
    )
    environment: tuple[str, ...] = option(
        (), "variables that plain workers may see besides PATH, HOME and the like"
    )

    def __post_init__(self):
        check_ranges(self, "reward.")
        if self.function is None and self.model is None:
            raise ValueError("reward needs reward.function, or reward.model, or both")
        if self.function is None and self.parts:
            raise ValueError("reward.parts are added to reward.function; name that first")
        if self.model is None and not any(part.weight for part in self.all_parts()):
            raise ValueError(
                "reward.weight is 0, and no other part counts: every reward would be 0"
            )
        if self.model is None and self.model_weight != 1.0:
            raise ValueError("reward.model_weight is for reward.model")
        if self.model is None and self.steps is not None:
            raise ValueError("reward.steps is for a process reward model, reward.model")
        if self.model and self.function and self.model_weight >= abs(self.weight):
            raise ValueError(
                f"reward.model_weight is {self.model_weight:g}, and the function's right and wrong "
                f"are {abs(self.weight):g} apart: a wrong answer that people like would beat a "
                "right one; make it smaller"
            )
        names = [part.name or label(part.function) for part in self.all_parts()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two rewards are called {', '.join(twice)}; give one a name")

    def all_parts(self) -> tuple[Part, ...]:
        """The function itself, and then the others."""
        if self.function is None:
            return ()
        return (Part(self.function, self.options, self.weight, self.name), *self.parts)


def label(path: str) -> str:
    """What a reward is called: `math` for jaxpost.rewards.math:verify, else the name alone."""
    module, _, name = path.rpartition(":")
    return module.rpartition(".")[2] if name == "verify" else name.rpartition(".")[2]
