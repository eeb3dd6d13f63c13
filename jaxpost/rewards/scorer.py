"""Completions in, scores out, while the trainer does something else.

with rewards.Scorer(config) as scorer:
    pending = scorer.submit(items)         # returns at once
    scored = pending.result()              # one Scored an item, in the order of the items
"""

import dataclasses
import functools
import inspect
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from jaxpost.rewards import canaries, processes, resolve, sandbox, worker, workers
from jaxpost.rewards import config as configs
from jaxpost.rewards.score import Item, Scored, finite

OWN = "jaxpost.rewards."
BOXED = (OWN + "code", OWN + "theorems")  # they confine what they run, in boxes that do not nest
BOX_MEMORY = 2 << 30
BOX_PROCESSES = 24
GRACE = 1.0
CANARY_SECONDS = 60.0  # a machine that is busy at a run's start is no reason to refuse it


class Home(NamedTuple):
    """Where a function runs: in a sandbox or not, each call in a fork or not."""

    confined: bool
    fork: bool


class Place(NamedTuple):
    """The pool that has a function, its number there, and whether it takes several items."""

    pool: workers.Pool
    function: int
    many: bool


class Pending:
    """The scores that are still to come: per function and item."""

    def __init__(self, parts: Sequence[configs.Part], count: int):
        self.parts = parts
        self.found: list[list[Scored | None]] = [[None] * count for _ in parts]
        self.missing = len(parts) * count
        self.lock = threading.Lock()
        self.ended = threading.Event()
        if not self.missing:
            self.ended.set()

    def put(self, part: int, first: int, scores: Sequence[Scored]) -> None:
        """Scores of consecutive items; none at all: the scorer was closed."""
        with self.lock:
            self.found[part][first : first + len(scores)] = scores
            self.missing -= len(scores)
            if not self.missing or not scores:
                self.ended.set()

    def done(self) -> bool:
        """Whether `result` returns at once."""
        return self.ended.is_set()

    def result(self) -> list[Scored]:
        """Waits. Raises RuntimeError if the scorer was closed meanwhile."""
        self.ended.wait()
        if self.missing:
            raise RuntimeError("the Scorer was closed before these rewards came")
        columns = [[one for one in column if one is not None] for column in self.found]
        return [combined(self.parts, row) for row in zip(*columns, strict=True)]


class Scorer:
    """Worker processes that judge completions; it waits until the functions are loaded.

    jaxpost's own verifiers first judge completions of known worth (`canaries`), in about a second.

    Args:
      config: what judges and how; or a function to judge alone, in any style of signatures.py.
      function: stands in place of `config.function`.

    Raises:
      RewardError: a function cannot be imported or called, or misjudges a canary, with why.
      sandbox.RefusedError: verifiers are to be confined, and this machine cannot.
    """

    def __init__(
        self,
        config: configs.RewardConfig | Callable[..., Any],
        function: Callable[..., Any] | None = None,
    ):
        if not isinstance(config, configs.RewardConfig):
            config, function = configs.RewardConfig(""), config
        self.config = config
        self.parts = config.all_parts()
        if function is not None:
            name = config.name or named(function)
            self.parts = (dataclasses.replace(self.parts[0], name=name), *self.parts[1:])
        functions = [function, *(None for _ in config.parts)]
        groups: dict[Home, list[int]] = {}
        for index, (part, given) in enumerate(zip(self.parts, functions, strict=True)):
            groups.setdefault(home(config.isolation, part, given), []).append(index)
        self.places: dict[int, Place] = {}
        self.pools: list[workers.Pool] = []
        try:
            for where, members in groups.items():
                sources = [source(self.parts[index], functions[index]) for index in members]
                self._open(where, members, sources)
            self._prove([index for index, given in enumerate(functions) if given is None])
        except BaseException:
            self.close()
            raise

    def submit(self, items: Sequence[Item]) -> Pending:
        """Hands items to the workers, and returns before they are judged."""
        pending = Pending(self.parts, len(items))
        for part, place in sorted(self.places.items()):
            self._ask(place, items, self.config.deadline, functools.partial(pending.put, part))
        return pending

    def _ask(
        self,
        place: Place,
        items: Sequence[Item],
        seconds: float,
        put: Callable[[int, Sequence[Scored]], None],
    ) -> None:
        size = self.config.batch if place.many else 1
        for first in range(0, len(items), size):
            call = worker.Call(place.function, list(items[first : first + size]), seconds)
            place.pool.put(workers.Task(call, functools.partial(put, first)))

    def close(self) -> None:
        """Kills the workers; results that are waited for raise. May be called again."""
        for pool in self.pools:
            pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, where: Home, members: list[int], sources: list[worker.Source]) -> None:
        grace = GRACE if where.fork else 0.0
        pool = workers.Pool(starter(self.config, where, sources), self.config.workers, grace)
        self.pools.append(pool)
        told = pool.functions()
        wrong = [one["error"] for one in told if "error" in one]
        if wrong:
            raise workers.RewardError("\n".join(wrong))
        for number, index in enumerate(members):
            self.places[index] = Place(pool, number, told[number]["many"])

    def _prove(self, indices: Sequence[int]) -> None:
        """Has the canaries of these parts judged, all at once. Raises RewardError."""
        asked = []
        for part, place in [(self.parts[index], self.places[index]) for index in indices]:
            known = canaries.of(part)
            pending = Pending([dataclasses.replace(part, weight=1.0)], len(known))
            items = [Item("", canary.completion, canary.example) for canary in known]
            seconds = max(self.config.deadline, CANARY_SECONDS)
            self._ask(place, items, seconds, functools.partial(pending.put, 0))
            asked.append((part.function, known, pending))
        for function, known, pending in asked:
            wrong = canaries.faults(known, pending.result())
            if wrong:
                raise workers.RewardError(
                    f"{function} misjudges what it is tried with, so no reward of it can be "
                    f"trusted on this machine: {'; '.join(wrong)}"
                )


def home(isolation: str, part: configs.Part, given: Callable[..., Any] | None) -> Home:
    """`auto`: jaxpost's verifiers are confined, but for those that confine what they run.

    Confined verifiers also run each call in a fork, out of the reach of other completions.
    """
    module = part.function.rpartition(":")[0] if given is None else given.__module__
    own = module.startswith(OWN) and not module.startswith(BOXED)
    confined = own if isolation == "auto" else isolation == "sandbox"
    return Home(confined, own and confined)  # a fork a call is 2 ms, the price of the sandbox


def source(part: configs.Part, given: Callable[..., Any] | None) -> worker.Source:
    """A part as a worker is told of it. Raises RewardError."""
    try:
        path = str(part.name) if given is not None else resolve.absolute(part.function)
        pickled = b"" if given is None else cloudpickle.dumps(given)
    except (ValueError, TypeError, pickle.PicklingError) as error:
        raise workers.RewardError(f"reward.function: {error}") from error
    return worker.Source(path, pickled, dict(part.options or {}))


def starter(
    config: configs.RewardConfig, where: Home, sources: list[worker.Source]
) -> Callable[[], processes.Start]:
    """What makes the command of each worker."""
    paths = [path or os.getcwd() for path in sys.path]
    memory = int(config.memory * 1e9) if config.memory else 0
    if not where.confined:
        for one in sources:
            if one.path.startswith(BOXED):
                sandbox.choose(one.options.get("isolation"))  # refuses, or says how, once and early
        job = worker.Job(paths, os.getpid(), memory, where.fork, sources)
        env = processes.plain_environment(config.environment)
        return lambda: processes.Start(processes.command(), env, job, False)
    refused_early()
    job = worker.Job([] if where.fork else paths, 0, 0, where.fork, sources)
    limits = sandbox.Limits(seconds=None, memory=memory or BOX_MEMORY, processes=BOX_PROCESSES)
    readable = [processes.PACKAGE, *(() if where.fork else filter(os.path.exists, paths))]

    def start() -> processes.Start:
        confined = sandbox.command(processes.command(), readable=readable, limits=limits)
        return processes.Start(confined.argv, confined.env, job, True)

    return start


def refused_early() -> None:
    """Raises before any worker starts where nothing here confines one, with both remedies."""
    try:
        sandbox.choose(None)
    except sandbox.RefusedError as error:
        raise sandbox.RefusedError(
            f"{error}; or, if no completion can be hostile, set reward.isolation: process"
        ) from error


def named(function: Callable[..., Any]) -> str:
    """What a function is logged as: its name, or that of its class."""
    inner = function.func if isinstance(function, functools.partial) else function
    return inner.__name__ if inspect.isroutine(inner) else type(inner).__name__


def combined(parts: Sequence[configs.Part], row: Sequence[Scored]) -> Scored:
    """Σ weight · value; missing where a part that counts is missing. Each part is told by name."""
    names = [part.name or configs.label(part.function) for part in parts]
    told: dict[str, float] = {}
    for name, one in zip(names, row, strict=True):
        prefix = f"{name}/" if len(parts) > 1 else ""
        told |= {prefix + key: value for key, value in one.parts.items()}
        if one.failure is None:
            told[name] = one.value
    for part, name, one in zip(parts, names, row, strict=True):
        if one.failure is not None and part.weight:
            reason = f"{name}: {one.reason}" if len(parts) > 1 else one.reason
            return Scored(math.nan, told, reason, one.failure)
    pairs = zip(parts, row, strict=True)
    total = sum(part.weight * one.value for part, one in pairs if part.weight)
    if not finite(total):
        return Scored(math.nan, told, f"the weighted sum is {total:g}", "not_finite")
    return Scored(total, told, row[0].reason, None)
