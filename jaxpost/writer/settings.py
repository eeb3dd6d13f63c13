"""How often to log, and where to; which metrics may differ between equal runs."""

import dataclasses

from jaxpost.options import check_ranges, option
from jaxpost.writer import stopwatch

# Names of metrics that two equal runs need not share.
WALL_CLOCK = (
    *("step_time", "tokens_per_second", "mfu", "compile_time", "elapsed"),
    *(f"time/{part}" for part in (*stopwatch.PARTS, "other")),
)
Values = dict[str, float | int]


@dataclasses.dataclass(frozen=True)
class WriterConfig:
    """How often to log, and where besides `metrics.jsonl`."""

    every: int = option(1, "log the metrics of each so-many-th update", "updates", least=1)
    terminal_seconds: float = option(
        5.0, "without a terminal, a plain line at most this often", "s", least=0
    )
    tensorboard: bool = option(False, "also write TensorBoard files into the run's folder")
    wandb_project: str | None = option(None, "also send metrics to this Weights & Biases project")

    def __post_init__(self):
        check_ranges(self, "log.")


def has_eval(values: Values) -> bool:
    return any(name.startswith("eval/") for name in values)
