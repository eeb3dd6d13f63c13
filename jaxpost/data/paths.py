"""A path as a user writes it (a file, a folder, a glob, a datasets folder) to readers of its files.

Compressed text is unpacked once into the user's cache folder, where workers and later runs find it.
"""

import difflib
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from jaxpost.data import json_text, readers
from jaxpost.data.readers import Reader

TEXT: dict[str, Callable[[Path, Path | None], Reader]] = {
    ".jsonl": readers.Lines,
    ".ndjson": readers.Lines,
    ".json": readers.json_file,
    ".csv": readers.csv_file,
    ".tsv": lambda path, unpacked: readers.csv_file(path, unpacked, "\t"),
    ".txt": readers.Document,
}
BINARY: dict[str, Callable[[Path], Reader]] = {
    ".parquet": readers.Parquet,
    ".arrow": readers.Arrow,
    ".array_record": readers.Records,
    ".arrayrecord": readers.Records,
}
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("valid", "validation", "val", "eval", "dev"), "validation"
)


def open_path(path: str) -> list[Reader]:
    """Readers of every file that a path stands for, in the order of their names."""
    return [open_file(file) for file in find(path)]


def find(path: str) -> list[Path]:
    """The files that a path stands for, in the order of their names; none is opened.

    A `.txt` file is one document. In a folder they are read where no other file of rows is: beside
    others they are notes about these.

    Raises:
      FileNotFoundError: nothing there; the message names what is near.
      ValueError: a file of no known type, or a folder that mixes train and test files.
    """
    if "://" in path:
        raise ValueError(f"{path}: only local files are read; copy or mount it first")
    found = Path(path).expanduser()
    if found.is_dir():
        files = in_folder(found)
    elif found.exists():
        files = [checked(found)]
    elif glob.has_magic(path):
        names = sorted(glob.glob(str(found), recursive=True))
        files = [Path(name) for name in names if known(Path(name))]
        if not files:
            raise FileNotFoundError(f"{path}: no file matches this pattern{nearby(found)}")
    else:
        raise FileNotFoundError(f"{path}: no such file or folder{nearby(found)}")
    return files


def checked(path: Path) -> Path:
    """The file, if its name says that it holds rows.

    Raises:
      ValueError: it does not.
    """
    ending, packing = endings(path)
    if ending in TEXT or (ending in BINARY and not packing):
        return path
    types = ", ".join([*TEXT, *BINARY])
    raise ValueError(f"{path}: not a type of file that is read: {types}, text also as .gz or .zst")


def open_file(path: Path) -> Reader:
    """The reader of a file, by its name."""
    ending, packing = endings(checked(path))
    if ending in TEXT:
        return TEXT[ending](path, unpacked(path) if packing else None)
    return BINARY[ending](path)


def endings(path: Path) -> tuple[str, str]:
    """A file's type and how it is packed, both as endings of its name."""
    packing = path.suffix.lower() if path.suffix.lower() in PACKED else ""
    name = path.stem if packing else path.name
    return Path(name).suffix.lower(), packing


def known(path: Path) -> bool:
    """Whether a file's name says that it holds rows."""
    ending, packing = endings(path)
    return path.is_file() and (ending in TEXT or (ending in BINARY and not packing))


def in_folder(folder: Path) -> list[Path]:
    """The files of rows in a folder, or those that a saved dataset lists."""
    if (folder / "dataset_dict.json").exists():
        splits = listed(folder / "dataset_dict.json", "splits", str)
        choices = ", ".join(str(folder / split) for split in splits)
        raise ValueError(f"{folder}: holds several splits; name one: {choices}")
    if (folder / "state.json").exists():
        return saved(folder)
    files = sorted(file for file in folder.iterdir() if known(file))
    files = [file for file in files if file.name != "dataset_info.json"]
    files = [file for file in files if endings(file)[0] != ".txt"] or files
    if not files:
        raise FileNotFoundError(
            f"{folder}: this folder holds no file of rows{nearby(folder / '_')}"
        )
    refuse_mixed(folder, files)
    return files


def saved(folder: Path) -> list[Path]:
    """The Arrow files of a folder written by `datasets`' save_to_disk."""
    state = folder / "state.json"
    if listed(state, "_indices_data_files", dict):
        raise ValueError(f"{folder}: holds a selection of rows; save it after flatten_indices()")
    files = [folder / str(file.get("filename")) for file in listed(state, "_data_files", dict)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{state}: names {file.name}, which is not there")
    return files


def listed(path: Path, key: str, kind: type) -> list[Any]:
    """A list that a JSON file of `datasets` holds under a key; null and no such key are empty."""
    try:
        found = json_text.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    items = (found.get(key) or []) if isinstance(found, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise ValueError(f"{path}: expected a map with a list {key}; save the data set again")
    return items


def refuse_mixed(folder: Path, files: Sequence[Path]) -> None:
    """Refuses to read the train and test files of a folder as one."""
    splits = {SPLITS.get(file.name.lower().replace("-", ".").split(".")[0]) for file in files}
    if len(splits - {None}) > 1:
        names = ", ".join(file.name for file in files[:6])
        raise ValueError(
            f"{folder}: holds files of several splits ({names}); name a file or a pattern, for "
            f"example {folder}/train*"
        )


def nearby(path: Path) -> str:
    """The data near a path that does not exist, as the end of a message."""
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    names = sorted(item.name for item in parent.iterdir() if known(item))
    near = difflib.get_close_matches(path.name, names, 3, 0.6) or names[:5]
    where = f"; {parent} holds" if near else f"; {parent} holds no file of rows"
    return f"{where} {', '.join(near)}".rstrip()


def unpacked(path: Path) -> Path:
    """The unpacked form of a compressed file, in the cache folder."""
    stat = path.stat()
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    stamp = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_folder()
    target = folder / f"{key}-{stamp}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            try:
                with pa.input_stream(str(path), compression=PACKED[path.suffix.lower()]) as stream:
                    shutil.copyfileobj(stream, file)
            except OSError as error:
                os.unlink(file.name)
                raise ValueError(f"{path}: cannot be unpacked: {error}") from error
        os.replace(file.name, target)
        for old in set(folder.glob(f"{key}-*")) - {target}:
            old.unlink(missing_ok=True)
    return target


def cache_folder() -> Path:
    """Where unpacked files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jaxpost" / "unpacked"
