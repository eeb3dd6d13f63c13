"""Metrics out: `metrics.jsonl` always, the terminal, TensorBoard and W&B where asked for.

One line of `metrics.jsonl` a step, `{"step": 12, "grad_norm": 0.91, "loss": 2.31, …}`: names in
order, numbers so exact that reading them back gives the same bits, and `null` for what is not
finite (JSON has no NaN). Values may be arrays on the device. A step's values are fetched when the
next step's arrive, so that the loop never waits for the device; `flush` fetches what is left, and
must come before a checkpoint, so that the file is complete up to it.

Also here: the meter that turns wall-clock time into tokens/s and model FLOP utilisation (MFU).
"""

from jaxpost.writer.flops import (
    matmul_params,
    mean_context,
    measure_matmul_peak,
    train_flops_per_token,
)
from jaxpost.writer.meter import Meter
from jaxpost.writer.settings import WALL_CLOCK, Values, WriterConfig
from jaxpost.writer.stopwatch import Stopwatch
from jaxpost.writer.write import Writer

__all__ = [
    "WALL_CLOCK",
    "Meter",
    "Stopwatch",
    "Values",
    "Writer",
    "WriterConfig",
    "matmul_params",
    "mean_context",
    "measure_matmul_peak",
    "train_flops_per_token",
]
