"""Worker processes as the trainer sees them: started, asked, given a deadline, killed, waited for.

Each is kept by a thread of its own that takes calls from a queue; which thread takes which call
decides nothing about the answer or its place.
"""

import contextlib
import json
import os
import pathlib
import pickle
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.rewards import worker
from jaxpost.rewards.score import Scored

PACKAGE = pathlib.Path(__file__).absolute().parent.parent
BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); from jaxpost.rewards import worker; worker.main()"
)
START_SECONDS = 120.0
ENDING = 1.0  # s that a process has to end once its output is closed
KINDS = ("none", "timeout", "crash", "error", "not_finite", "infrastructure")
PLAIN = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "TZ", "LD_LIBRARY_PATH")
FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class RewardError(ValueError):
    """The reward cannot be used at all: a wrong path, an import that fails, a strange signature."""


class Start(NamedTuple):
    """How to start a worker: its command and environment, and what it is told first."""

    argv: Sequence[str]
    env: Mapping[str, str]
    job: worker.Job
    quiet: bool  # what it prints is dropped


class Task(NamedTuple):
    """A call, where its answers go, and the deadline."""

    call: worker.Call
    done: Callable[[Sequence[Scored]], None]


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
        """Sends a pickled message and waits for its answer. Raises LateError, EndedError."""
        end = time.monotonic() + seconds
        self._write(len(data).to_bytes(worker.LENGTH, "big") + data, end)
        length = int.from_bytes(self._read(worker.LENGTH, end), "big")
        if length > worker.LARGEST:
            raise EndedError(f"an answer of {length} bytes")
        try:
            answer = json.loads(self._read(length, end))
        except ValueError as error:
            raise EndedError(f"an answer that is not JSON: {error}") from error
        if not isinstance(answer, dict):
            raise EndedError("an answer that is not a map")
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


class Pool:
    """Threads that keep a worker each, and the queue they take calls from.

    `grace`: seconds beyond the deadline in which a worker may end an overrun by itself.
    """

    def __init__(self, starts: Callable[[], Start], count: int, grace: float):
        self.starts, self.grace = starts, grace
        self.calls: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.processes: dict[int, Process] = {}
        self.lock = threading.Lock()
        self.closed = False
        self.first = threading.Event()
        self.ready: list[dict[str, Any]] | RewardError | None = None
        self.threads = [
            threading.Thread(
                target=self._keep, args=(number,), daemon=True, name=f"reward-{number}"
            )
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def functions(self) -> list[dict[str, Any]]:
        """What the first worker to start says of each function. Raises RewardError if it cannot."""
        self.first.wait()
        if isinstance(self.ready, RewardError):
            raise self.ready
        return self.ready or []

    def put(self, task: Task) -> None:
        self.calls.put(task)

    def close(self) -> None:
        """Kills the workers, whatever they are doing, and joins the threads."""
        with self.lock:
            self.closed = True
            for process in self.processes.values():
                process.strike()
        for _ in self.threads:
            self.calls.put(None)
        for thread in self.threads:
            thread.join()

    def _keep(self, number: int) -> None:
        """Starts a worker at once, and serves calls until the pool closes."""
        try:
            self._started(number)
        except (EndedError, LateError, OSError, RewardError) as error:
            self._tell(error if isinstance(error, RewardError) else RewardError(described(error)))
        while (task := self.calls.get()) is not None:
            scores = [] if self.closed else self._served(number, task.call)
            task.done([] if self.closed else scores)
        self._drop(number)

    def _tell(self, ready: list[dict[str, Any]] | RewardError) -> None:
        with self.lock:
            if not self.first.is_set():
                self.ready = ready
                self.first.set()

    def _started(self, number: int) -> Process:
        """The worker of a thread, started if it is not there; raises as `Process` does."""
        if number in self.processes:
            return self.processes[number]
        start = self.starts()
        process = Process(start)
        with self.lock:
            self.processes[number] = process
        try:
            if self.closed:
                raise EndedError("closed")
            ready = process.ask(pickle.dumps(start.job), START_SECONDS)["ready"]
        except (EndedError, LateError, KeyError):
            self._drop(number)
            raise
        self._tell(ready)
        return process

    def _drop(self, number: int) -> None:
        with self.lock:
            process = self.processes.pop(number, None)
        if process:
            process.kill()

    def _served(self, number: int, call: worker.Call) -> list[Scored]:
        """The scores of a call; where a call of several fails as a whole, each is asked alone."""
        found = self._asked(number, call)
        if isinstance(found, list):
            return found
        if len(call.items) == 1 or self.closed:
            return [found] * len(call.items)
        return [self._served(number, call._replace(items=[item]))[0] for item in call.items]

    def _asked(self, number: int, call: worker.Call) -> list[Scored] | Scored:
        """One score an item, or the failure that is all of theirs."""
        try:
            process = self._started(number)
        except (EndedError, LateError, OSError, KeyError, RewardError) as error:
            return missing("infrastructure", f"no worker: {described(error)}")
        try:
            data = pickle.dumps(call)
        except Exception as error:
            return missing("error", f"the row cannot be sent to a worker: {error}")
        try:
            return read(process.ask(data, call.seconds + self.grace), len(call.items))
        except LateError:
            self._drop(number)
            return missing("timeout", f"no answer in {call.seconds:g} s")
        except EndedError as error:
            self._drop(number)
            return missing("crash", described(error))


def described(error: Exception) -> str:
    if isinstance(error, LateError):
        return f"it did not start in {START_SECONDS:g} s"
    return f"the worker ended: {error}" if isinstance(error, EndedError) else str(error)


def missing(kind: str, reason: str) -> Scored:
    return Scored(float("nan"), {}, reason, kind)


def read(answer: Mapping[str, Any], count: int) -> list[Scored] | Scored:
    """An answer as scores, distrusted: what is not well formed raises EndedError."""
    if "failure" in answer:
        return one(answer)
    scores = answer.get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise EndedError("an answer of the wrong length")
    return [one(score) for score in scores]


def one(told: Any) -> Scored:
    try:
        parts = {str(name): float(value) for name, value in told.get("parts", {}).items()}
        reason, failure = str(told.get("reason", "")), told.get("failure")
        value = float("nan") if failure else float(told["value"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EndedError(f"not a score: {error}") from error
    if failure is not None and failure not in KINDS:
        raise EndedError(f"not a kind of failure: {failure}")
    if failure is None and not abs(value) < float("inf"):
        raise EndedError(f"not a finite score: {value}")
    return Scored(value, parts, reason, failure)
