"""The worker processes of a reward, each replaced when it ends or is late.

Each is kept by a thread of its own that takes calls from a queue; which thread takes which call
decides nothing about the answer or its place.
"""

import pickle
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.rewards import processes, worker
from jaxpost.rewards.score import Scored, finite

START_SECONDS = 120.0
KINDS = ("none", "timeout", "crash", "error", "not_finite", "infrastructure")


class RewardError(ValueError):
    """The reward cannot be used at all: a wrong path, an import that fails, a strange signature."""


class Task(NamedTuple):
    """A call, where its answers go, and the deadline."""

    call: worker.Call
    done: Callable[[Sequence[Scored]], None]


class Pool:
    """Threads that keep a worker each, and the queue they take calls from.

    `grace`: seconds beyond the deadline in which a worker may end an overrun by itself.
    """

    def __init__(self, starts: Callable[[], processes.Start], count: int, grace: float):
        self.starts, self.grace = starts, grace
        self.calls: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.processes: dict[int, processes.Process] = {}
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
        except (processes.EndedError, processes.LateError, OSError, RewardError) as error:
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

    def _started(self, number: int) -> processes.Process:
        """The worker of a thread, started if it is not there; raises as `Process` does."""
        if number in self.processes:
            return self.processes[number]
        start = self.starts()
        process = processes.Process(start)
        with self.lock:
            self.processes[number] = process
        try:
            if self.closed:
                raise processes.EndedError("closed")
            ready = process.ask(pickle.dumps(start.job), START_SECONDS)["ready"]
        except (processes.EndedError, processes.LateError, KeyError):
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
        except (processes.EndedError, processes.LateError, OSError, KeyError, RewardError) as error:
            return missing("infrastructure", f"no worker: {described(error)}")
        try:
            data = pickle.dumps(call)
        except Exception as error:
            return missing("error", f"the row cannot be sent to a worker: {error}")
        try:
            return read(process.ask(data, call.seconds + self.grace), len(call.items))
        except processes.LateError:
            self._drop(number)
            return missing("timeout", f"no answer in {call.seconds:g} s")
        except processes.EndedError as error:
            self._drop(number)
            return missing("crash", described(error))


def described(error: Exception) -> str:
    if isinstance(error, processes.LateError):
        return f"it did not start in {START_SECONDS:g} s"
    return f"the worker ended: {error}" if isinstance(error, processes.EndedError) else str(error)


def missing(kind: str, reason: str) -> Scored:
    return Scored(float("nan"), {}, reason, kind)


def read(answer: Mapping[str, Any], count: int) -> list[Scored] | Scored:
    """An answer as scores, distrusted: what is not well formed raises processes.EndedError."""
    if "failure" in answer:
        return one(answer)
    scores = answer.get("scores")
    if not isinstance(scores, list) or len(scores) != count:
        raise processes.EndedError("an answer of the wrong length")
    return [one(score) for score in scores]


def one(told: Any) -> Scored:
    try:
        parts = {str(name): float(value) for name, value in told.get("parts", {}).items()}
        reason, failure = str(told.get("reason", "")), told.get("failure")
        value = float("nan") if failure else float(told["value"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise processes.EndedError(f"not a score: {error}") from error
    if failure is not None and failure not in KINDS:
        raise processes.EndedError(f"not a kind of failure: {failure}")
    if failure is None and not finite(value):
        raise processes.EndedError(f"not a finite score: {value}")
    return Scored(value, parts, reason, failure)
