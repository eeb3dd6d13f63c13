"""Which functions judge a completion, and how the processes that run them are kept."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxpost.options import check_ranges, option

Isolation = Literal["auto", "sandbox", "process"]


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

    function: str = option(help="import path, module:name or file.py:name")
    options: Mapping[str, Any] | None = option(None, "keyword arguments of the function")
    weight: float = option(1.0, "factor of the function's score", least=-1e6, most=1e6)
    name: str | None = option(None, "what it is logged as; null: the function's name")
    parts: tuple[Part, ...] = option((), "more rewards, each with a weight: format, length, ...")
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
        names = [part.name or label(part.function) for part in self.all_parts()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two rewards are called {', '.join(twice)}; give one a name")

    def all_parts(self) -> tuple[Part, ...]:
        """The function itself, and then the others."""
        first = Part(self.function, self.options, self.weight, self.name)
        return (first, *self.parts)


def label(path: str) -> str:
    """What a reward is called: `math` for jaxpost.rewards.math:verify, else the name alone."""
    module, _, name = path.rpartition(":")
    return module.rpartition(".")[2] if name == "verify" else name.rpartition(".")[2]
