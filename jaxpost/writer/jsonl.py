"""`metrics.jsonl`: one whole line a step."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpost.writer import settings


class Lines:
    """`metrics.jsonl`. A further record of the last step in the file replaces it, merged.

    Opened at the first record, since resuming a run may put a shortened file in its place before.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None
        self._end = 0
        self._last: tuple[int, int, dict[str, Any]] | None = None

    def write(self, step: int, values: settings.Values) -> None:
        file = self._open()
        record: dict[str, Any] = {name: _finite(value) for name, value in values.items()}
        start = self._end
        if self._last is not None:
            last_step, last_start, last_record = self._last
            if step < last_step:
                raise ValueError(
                    f"metrics of step {step} come after those of step {last_step} in {self._path}; "
                    "cut the file first, as resuming a run does"
                )
            if step == last_step:
                start, record = last_start, {**last_record, **record}
        line = json.dumps({"step": step, **{key: record[key] for key in sorted(record)}}) + "\n"
        # One write at its place: a kill leaves the old line, the new one, or a cut last line.
        data = line.encode()
        with named(self._path):
            done = os.pwrite(file, data, start)
            while done < len(data):  # a disk that is getting full takes a part, then none
                done += os.pwrite(file, data[done:], start + done)
            os.ftruncate(file, start + len(data))
        self._end, self._last = start + len(data), (step, start, record)

    def flush(self) -> None:
        if self._file is not None:
            with named(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            self._end, self._last = _last_record(self._file)
        return self._file


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the operating system say which file it was, and what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}; put that right and run the same command again"
        raise OSError(error.errno, reason, str(path)) from error


def _last_record(file: int) -> tuple[int, tuple[int, int, dict[str, Any]] | None]:
    """End of the whole lines, and (step, start, record) of the last: a cut one is overwritten."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    end = data.rfind(b"\n") + 1
    if end == 0:
        return 0, None
    start = data.rfind(b"\n", 0, end - 1) + 1
    record = json.loads(data[start:end])
    return end, (int(record.pop("step")), start, record)


def _finite(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None
