"""What a configuration reads, looked at before anything is loaded or a run is begun."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxpost import config as configs
from jaxpost.data import paths, sources
from jaxpost.hub import save, source
from jaxpost.models import TransformerConfig
from jaxpost.recipes import setup

log = logging.getLogger(__name__)


def check(config: Any) -> None:
    """Looks for the data, the model, its tokenizer and adapter of a recipe's configuration.

    Raises:
      ConfigError: one is not there, is not understood, or does not fit the others.
    """
    for key in ("train", "eval"):
        check_data(getattr(config.data, key), f"data.{key}")
    try:
        architecture = setup.architecture_of(config.model)
        setup.load_tokenizer(config.model)
        if config.model.adapter is not None:
            source.folder_of(config.model.adapter)
    except (OSError, ValueError) as error:
        raise configs.ConfigError(f"model: {error}") from error
    if isinstance(config.data, sources.DataConfig):
        check_rows(config.data)
        check_length(config.data.max_length, architecture)


def check_export(run: str, model: setup.ModelConfig) -> None:
    """Looks at the folders that the trained model will be written to.

    Raises:
      ConfigError: one holds something else, or is what training starts from.
    """
    lora = model.lora is not None or model.adapter is not None
    for target in [Path(run, "model"), *([Path(run, "adapter")] if lora else [])]:
        for key in ("path", "tokenizer", "adapter"):
            given = getattr(model, key)
            if given is not None and Path(given).resolve() == target.resolve():
                raise configs.ConfigError(
                    f"run: {target} is model.{key}, and training would write over it; choose "
                    "another run folder"
                )
        try:
            save.refuse_foreign(target)
        except FileExistsError as error:
            raise configs.ConfigError(f"run: the trained model goes to {error}") from error


def check_data(given: Iterable[str] | str | None, key: str) -> None:
    """Looks for the files of one key.

    Raises:
      ConfigError: a path that stands for no file.
    """
    for path in [given] if isinstance(given, str) else given or ():
        try:
            paths.find(path)
        except (OSError, ValueError) as error:
            raise configs.ConfigError(f"{key}: {error}") from error


def check_rows(data: sources.DataConfig) -> None:
    """Looks at the types of the files and, of small ones, at every row.

    Raises:
      ConfigError: rows of no known type, or one that cannot be read.
    """
    for key in ("train", "eval"):
        given = getattr(data, key)
        try:
            if given is not None:
                sources.check(given, data)
        except (OSError, ValueError) as error:
            raise configs.ConfigError(f"data.{key}: {error}") from error


def check_length(max_length: int, architecture: TransformerConfig) -> None:
    """Warns of rows with room for more than the model was made for."""
    most = architecture.max_positions
    if max_length > most:
        log.warning(
            "data.max_length is %d, and the model was made for %d positions "
            "(max_position_embeddings): what a sequence says beyond these is trained and measured "
            "at positions that the model does not know, and no sampler goes there. Set "
            "data.max_length=%d, or raise max_position_embeddings (and rope_scaling) if the model "
            "is meant to learn longer texts",
            max_length,
            most,
            most,
        )
