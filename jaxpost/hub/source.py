"""Where a model's files lie: a local folder, or a repository of the Hugging Face hub."""

import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost import companions

Path = str | os.PathLike[str]

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json")
DOWNLOADED = (*WEIGHTS, *companions.NAMES)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def folder_of(path_or_hub_id: Path, files: Sequence[str] = DOWNLOADED) -> pathlib.Path:
    """The local folder of a model: the path itself, or the hub's files fetched to the local cache.

    Of a hub repository only `files` are fetched (patterns of names).

    A name is asked of the hub only if it has the form `owner/name` and neither it nor `owner`
    exists here; the log says so when it happens.

    Raises:
      FileNotFoundError: no such folder, and not a hub id; or a hub id that cannot be fetched.
      NotADirectoryError: a file, where a folder is needed.
    """
    name, path = os.fspath(path_or_hub_id), pathlib.Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        hint = " Turn it into a folder first: jaxpost convert FILE FOLDER."
        raise NotADirectoryError(
            f"{name}: a file, not a model folder.{hint if path.suffix == '.gguf' else ''}"
        )
    if not HUB_ID.fullmatch(name) or path.parent.exists():
        raise FileNotFoundError(
            f"{name}: no such folder (looked in {path.parent.absolute()}). A model of the Hugging "
            f"Face hub is written owner/name."
        )
    return companions.fetched(name, files)


def read_json(path: pathlib.Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not a JSON object, with the line where reading failed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, where an object is needed")
    return content


def json_bytes(content: Mapping[str, Any]) -> bytes:
    """JSON as it is written here: sorted keys, so that equal content gives equal bytes."""
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
