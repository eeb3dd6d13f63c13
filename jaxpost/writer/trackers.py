"""TensorBoard and Weights & Biases."""

import secrets
from pathlib import Path
from typing import Any

from jaxpost.writer import settings


class TensorBoard:
    def __init__(self, module: Any, folder: Path):
        self._module, self._folder = module, folder
        self._writer: Any = None

    def write(self, step: int, values: settings.Values) -> None:
        if self._writer is None:
            # From here on: what a killed job wrote of these steps is hidden, not shown twice.
            folder = str(self._folder / "tensorboard")
            self._writer = self._module.SummaryWriter(logdir=folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of the same folder goes on in the same W&B run."""

    def __init__(self, module: Any, folder: Path, project: str | None, name: str | None):
        mark = folder / "wandb_id.txt"
        if not mark.exists():
            mark.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        self._run = module.init(
            project=project,
            name=name or folder.name,
            id=mark.read_text(encoding="utf-8").strip(),
            dir=str(folder),
            resume="allow",
        )

    def write(self, step: int, values: settings.Values) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
