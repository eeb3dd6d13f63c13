"""The writer of a run: values from the device to every output."""

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich import console as rich_console

from jaxpost.writer import jsonl, settings, terminal, trackers


class Writer:
    """Writes one run's metrics and samples; a context manager. Only process 0 writes anything.

    Args:
      folder: the run's folder.
      config: what to write besides the file, and how often.
      steps: updates in the whole run, for the progress line.
      name: what W&B calls the run; by default the folder's name.
      console: where the progress line goes; by default stdout.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: settings.WriterConfig | None = None,
        *,
        steps: int,
        name: str | None = None,
        console: rich_console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config or settings.WriterConfig()
        self._steps = steps
        self._waiting: tuple[int, dict[str, Any]] | None = None
        self._outputs: list[Any] = []
        if jax.process_index() != 0:
            return
        folder = Path(folder).absolute()
        self._samples = folder / "samples.jsonl"
        self._outputs = _open_outputs(self._config, folder, steps, name, console, clock)

    def write(self, step: int, metrics: Mapping[str, Any]) -> list[tuple[int, settings.Values]]:
        """Take a step's metrics; returns the steps completed by this, with plain values.

        Several calls with one step make one record. Steps never go back. What is returned is the
        same on all processes and for every step, `log.every` or not: check it for finite values.

        Raises:
          ValueError: a value is not a scalar, or the step is one before the last.
        """
        done = []
        if self._waiting is not None and self._waiting[0] != step:
            if step < self._waiting[0]:
                raise ValueError(f"metrics of step {step} come after those of {self._waiting[0]}")
            done = self._finish()
        for name, value in metrics.items():
            if np.ndim(value) != 0:
                raise ValueError(f"metric {name} has shape {np.shape(value)}; it must be a scalar")
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        earlier = self._waiting[1] if self._waiting else {}
        self._waiting = step, {**earlier, **metrics}
        return done

    def flush(self) -> list[tuple[int, settings.Values]]:
        """Write what is waiting, down to the disk; returns it as `write` does."""
        done = self._finish()
        for output in self._outputs:
            output.flush()
        return done

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append what the model wrote to `samples.jsonl`, one line a record, `step` first."""
        if not self._outputs:
            return
        lines = [json.dumps({"step": step, **record}, ensure_ascii=False) for record in records]
        with jsonl.named(self._samples), self._samples.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))

    def close(self) -> None:
        """Flush, and give the terminal back."""
        try:
            self.flush()
        finally:
            for output in self._outputs:
                output.close()
            self._outputs = []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error the device may not give its values any more; the first error says more.
        with contextlib.suppress(*[Exception] if kind else []):
            self.close()

    def _finish(self) -> list[tuple[int, settings.Values]]:
        if self._waiting is None:
            return []
        step, metrics = self._waiting
        self._waiting = None
        values = {name: _number(value) for name, value in metrics.items()}
        due = (
            step % self._config.every == 0 or step in (1, self._steps) or settings.has_eval(values)
        )
        if values and due:
            for output in self._outputs:
                output.write(step, values)
        return [(step, values)]


def _open_outputs(
    config: settings.WriterConfig,
    folder: Path,
    steps: int,
    name: str | None,
    console: rich_console.Console | None,
    clock: Callable[[], float],
) -> list[Any]:
    # Packages first: what is missing should be said before anything is written.
    tensorboard = _optional("tensorboardX", "tensorboard") if config.tensorboard else None
    wandb = _optional("wandb", "wandb") if config.wandb_project is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    outputs: list[Any] = [jsonl.Lines(folder / "metrics.jsonl")]
    if tensorboard is not None:
        outputs.append(trackers.TensorBoard(tensorboard, folder))
    if wandb is not None:
        outputs.append(trackers.WeightsAndBiases(wandb, folder, config.wandb_project, name))
    return [*outputs, terminal.open_terminal(config, steps, console, clock)]


def _number(value: Any) -> float | int:
    """A scalar of Python, NumPy or JAX (any float type) as a plain number."""
    plain = np.asarray(value)
    if plain.dtype == bool or np.issubdtype(plain.dtype, np.integer):
        return int(plain)
    return float(plain)


def _optional(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"log.{extra} needs the package {module}: pip install 'jaxpost[{extra}]'"
        ) from error
