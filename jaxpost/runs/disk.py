"""Files that are written whole or not at all; the error of all of this part."""

import contextlib
import os
from pathlib import Path


class RunError(RuntimeError):
    """The folder cannot be used for this run; the message says why and what to do."""


def write(path: Path, content: str | bytes) -> None:
    """Whole or not at all."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f".{path.name}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(
            f"{path} could not be written ({error.strerror}); put that right and run the same "
            "command again"
        ) from error
