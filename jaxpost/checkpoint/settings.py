"""When to save and what to keep; the error of all of this part."""

import dataclasses
from typing import Literal

from jaxpost.options import check_ranges, option


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    every: int = option(
        100, "save after this many updates; 0 saves only at the end", "updates", least=0
    )
    keep_last: int = option(2, "how many of the newest checkpoints to keep", least=1)
    keep_best: int = option(0, "how many of the best by `metric` to keep besides", least=0)
    metric: str = option("eval/loss", "the metric that says which checkpoint is best")
    mode: Literal["min", "max"] = option("min", "whether the best metric is the lowest or highest")
    strict: bool = option(False, "stop at a damaged checkpoint instead of falling back to an older")

    def __post_init__(self):
        check_ranges(self, "checkpoint.")
        if self.mode not in ("min", "max"):
            raise ValueError(f"checkpoint.mode is {self.mode!r}; use 'min' or 'max'")
