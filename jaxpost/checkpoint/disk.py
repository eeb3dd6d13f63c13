"""Files down to the disk itself, their digests, and what a full disk says."""

import concurrent.futures
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpost.checkpoint import settings


def files(folder: Path) -> list[str]:
    """All files under the folder, relative; dot files are the file system's own business."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )


def folders(folder: Path) -> list[str]:
    """All folders under the folder, deepest first, itself last."""
    inner = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()]
    return [*sorted(inner, key=lambda path: -path.count("/")), "."]


def digests(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of each file, after flushing it to disk; in parallel (the GIL is let go)."""

    def digest(name: str) -> tuple[str, dict[str, Any]]:
        flush(folder / name)
        return name, {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name)}

    with concurrent.futures.ThreadPoolExecutor(threads()) as pool:
        return dict(pool.map(digest, names))


def threads() -> int:
    return min(8, os.cpu_count() or 1)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def disk_full(error: BaseException) -> bool:
    """ENOSPC, or quota, as Python or TensorStore say it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "No space left on device"))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    try:
        text = json.dumps(content, indent=1)
    except TypeError as error:
        raise TypeError(f"{path.name} must hold plain JSON values: {error}") from error
    path.write_text(text + "\n", encoding="utf-8")
    flush(path)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def local(folder: str | os.PathLike[str]) -> Path:
    if "://" in str(folder):
        raise settings.CheckpointError(
            f"{folder}: checkpoints need a file system with atomic renames; mount the bucket "
            "(gcsfuse, s3fs) or use a local folder"
        )
    return Path(folder).absolute()


def size_text(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
