"""Where the log goes: all of it to the file, ours to the terminal."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Send the package's log to the file and, without times, to the terminal.

    What Orbax and others say through absl goes to the file only.
    """
    to_file = _File(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours, theirs = logging.getLogger("jaxpost"), logging.getLogger("absl")
    before = ours.level, ours.propagate, theirs.propagate
    terminal = _Terminal()
    terminal.setFormatter(_Plain())
    ours.setLevel(logging.INFO)
    ours.propagate = theirs.propagate = False
    for logger, handler in ((ours, to_file), (ours, terminal), (theirs, to_file)):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, handler in ((ours, to_file), (ours, terminal), (theirs, to_file)):
            logger.removeHandler(handler)
        to_file.close()
        ours.setLevel(before[0])
        ours.propagate, theirs.propagate = before[1:]


class _File(logging.FileHandler):
    """Training does not end for want of a log: where it cannot be written, that is said once."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.told:
            self.told = True
            say(f"warning: {self.baseFilename} cannot be written: {sys.exc_info()[1]}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is still in its buffer
            super().close()


class _Terminal(logging.Handler):
    """To whatever stderr is now: a live progress line replaces it to keep lines whole."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(self.format(record), file=sys.stderr, flush=True)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
