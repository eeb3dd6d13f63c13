"""One run of a checker: a scratch folder, an empty environment, a deadline."""

import os
import pathlib
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SECONDS = 60.0
PATH = "/usr/local/bin:/usr/bin:/bin"


class Done(NamedTuple):
    code: int | None  # None: the deadline
    output: str


def run(
    argv: Sequence[str],
    files: Mapping[str, str],
    env: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> Done:
    """What `argv` prints (errors apart), run in a folder of its own that holds `files`."""
    with tempfile.TemporaryDirectory(prefix="jaxpost-proof-") as folder:
        for name, text in files.items():
            (pathlib.Path(folder) / name).write_text(text, encoding="utf-8")
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={"PATH": PATH, "HOME": folder, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return Done(None, "")
    return Done(process.returncode, output.decode("utf-8", "replace"))
