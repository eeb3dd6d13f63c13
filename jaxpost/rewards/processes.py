"""One worker process as the trainer sees it: started, asked with a deadline, killed, waited for."""

import contextlib
import json
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.rewards import forks, worker

PACKAGE = pathlib.Path(__file__).absolute().parent.parent
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from jaxpost.rewards import worker; worker.main()"
)
ENDING = 1.0  # s that a process has to end once its output is closed
PLAIN = (
    "JAXPOST_SANDBOX_LEVEL_TOLD",
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "TZ",
    "LD_LIBRARY_PATH",
)
FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Start(NamedTuple):
    """How to start a worker: its command and environment, and what it is told first."""

    argv: Sequence[str]
    env: Mapping[str, str]
    job: worker.Job
    quiet: bool  # what it prints is dropped


class EndedError(Exception):
    """The process ended, or says what is no answer."""


class LateError(Exception):
    """The deadline passed."""


def command() -> list[str]:
    return [sys.executable, "-sP", "-c", BOOT, str(PACKAGE.parent)]


def plain_environment(names: Sequence[str]) -> dict[str, str]:
    """The variables that a plain worker sees."""
    own = {name: os.environ[name] for name in (*PLAIN, *names) if name in os.environ}
    return {**FIXED, **own}


class Process:
    """One running worker."""

    def __init__(self, start: Start):
        self.process = subprocess.Popen(
            start.argv,
            env=dict(start.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if start.quiet else None,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)

    def ask(self, data: bytes, seconds: float) -> dict[str, Any]:
        """Sends a pickled message and waits for the answer that bears its number.

        Raises LateError; EndedError also for any other answer: with one that came twice, all later
        ones would be another call's.
        """
        end, number = time.monotonic() + seconds, secrets.token_bytes(forks.NUMBER)
        self._write(len(data).to_bytes(forks.LENGTH, "big") + number + data, end)
        length = int.from_bytes(self._read(forks.LENGTH, end), "big")
        if length > forks.LARGEST:
            raise EndedError(f"an answer of {length} bytes")
        try:
            answer = json.loads(self._read(length, end))
        except ValueError as error:
            raise EndedError(f"an answer that is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise EndedError("an answer that is not a map")
        if answer.pop("call", None) != number.hex():
            raise EndedError("an answer to another call, or one that the function wrote")
        return answer

    def _write(self, data: bytes, end: float) -> None:
        left = memoryview(data)
        while left:
            self._wait([], [self.input], end)
            try:
                left = left[os.write(self.input, left) :]
            except BrokenPipeError:
                raise EndedError(self.how()) from None

    def _read(self, count: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            self._wait([self.output], [], end)
            chunk = os.read(self.output, count - len(data))
            if not chunk:
                raise EndedError(self.how())
            data += chunk
        return bytes(data)

    def _wait(self, reading: list[int], writing: list[int], end: float) -> None:
        left = end - time.monotonic()
        waiter = select.poll()  # select takes no descriptor above 1023
        for descriptor in reading:
            waiter.register(descriptor, select.POLLIN)
        for descriptor in writing:
            waiter.register(descriptor, select.POLLOUT)
        if left <= 0 or not waiter.poll(left * 1000):
            raise LateError

    def how(self) -> str:
        """How the process came to its end."""
        try:
            code = self.process.wait(ENDING)
        except subprocess.TimeoutExpired:
            return "closed its output"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"

    def strike(self) -> None:
        """Kills the process and what it started, without waiting."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()

    def kill(self) -> None:
        """Ends the process and what it started, and waits for it. Once is enough, twice no harm."""
        self.strike()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
