"""The program of a worker process: calls arrive on its standard input, scores leave by its output.

A message is eight bytes of length and then its bytes: pickles in, JSON out, so that nothing which a
worker says can run in the trainer. The first message is the `Job`, its answer how each function
wants to be called; then one answer a `Call`. After a message's length comes its number, which the
answer repeats.

With `Job.fork`, each call runs in a child of its own, so that what one completion does to the
process (memory, caches, patched modules) no other meets, and an overrun costs no new start.
"""

import asyncio
import ctypes
import gc
import inspect
import logging
import math
import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.rewards import forks, resolve, signatures
from jaxpost.rewards.score import InfrastructureError, Item, finite

PARENT_DIES = 1  # PR_SET_PDEATHSIG


class Source(NamedTuple):
    """A function: its import path, or itself pickled."""

    path: str
    pickled: bytes
    options: Mapping[str, Any]


class Job(NamedTuple):
    """What a worker is told first."""

    path: Sequence[str]
    parent: int  # process to die with; 0: another watches
    memory: int  # bytes of address space; 0: no limit
    fork: bool
    sources: Sequence[Source]


class Call(NamedTuple):
    """Items for one of the functions."""

    function: int
    items: Sequence[Item]
    seconds: float


def main() -> None:
    channel = os.fdopen(os.dup(1), "wb", buffering=0)
    os.set_inheritable(channel.fileno(), False)
    requests = os.fdopen(os.dup(0), "rb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a function prints is no answer
    number, received = forks.receive(requests)
    job: Job = received
    if job.parent:
        die_with(job.parent)
    sys.path[:] = dict.fromkeys([*job.path, *sys.path])
    if job.memory:
        resource.setrlimit(resource.RLIMIT_AS, (job.memory, job.memory))
    if job.fork:
        logging.disable()
        warnings.simplefilter("ignore")
        sys.set_int_max_str_digits(20_000)
    rewards, ready = load(job.sources)
    forks.send(channel, {"call": number, "ready": ready})
    if job.fork:
        gc.collect()
        gc.freeze()  # so that collections in forks touch, and copy, less
    private, own = (channel, requests), os.getpid()
    while True:
        number, call = forks.receive(requests)
        work = answer(rewards, call)
        told = forks.in_child(work, call.seconds, private) if job.fork else work()
        if os.getpid() != own:
            os._exit(0)  # a function forked, and its child came back as well
        forks.send(channel, {**told, "call": number})


def die_with(parent: int) -> None:
    """Ends this process when the thread that started it ends, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def load(sources: Sequence[Source]) -> tuple[list[signatures.Reward], list[dict[str, Any]]]:
    """The functions, and of each whether it takes many items, or why it cannot be used."""
    rewards, ready = [], []
    for source in sources:
        try:
            pickled = source.pickled
            function = pickle.loads(pickled) if pickled else resolve.resolve(source.path)
            rewards.append(signatures.read(function, source.options))
            ready.append({"many": rewards[-1].many})
        except BaseException as error:
            told = text(error) if isinstance(error, ValueError) else said(error)
            path = "" if told.startswith(source.path) else f"{source.path}: "
            ready.append({"error": path + told})
    return rewards, ready


def answer(rewards: Sequence[signatures.Reward], call: Call) -> Callable[[], dict[str, Any]]:
    """The work of a call, which returns {"scores": one an item} or {"failure": of all}."""
    reward = rewards[call.function]

    def work() -> dict[str, Any]:
        metrics: dict[str, float] = {}
        try:
            if reward.asynchronous:
                return {"scores": asyncio.run(together(reward, call, metrics))}
            if not reward.many:
                return {"scores": [judged(signatures.call(reward, call.items, metrics), {})]}
            return {"scores": listed(signatures.call(reward, call.items, metrics), call, metrics)}
        except BaseException as error:
            return failure_of(error)

    return work


async def together(
    reward: signatures.Reward, call: Call, metrics: dict[str, float]
) -> list[dict[str, Any]]:
    """Awaits a function of lists once, or a function of one item for all items at once."""
    if reward.lists:
        values = await signatures.call(reward, call.items, metrics)
        return listed(values, call, metrics)

    async def one(item: Item) -> dict[str, Any]:
        try:
            value = signatures.call(reward, [item], metrics)
            return judged(await asyncio.wait_for(value, call.seconds * 0.95), {})
        except TimeoutError:
            return {"failure": "timeout", "reason": f"no answer in {call.seconds:g} s"}
        except Exception as error:
            return failure_of(error)

    return list(await asyncio.gather(*map(one, call.items)))


def listed(values: Any, call: Call, metrics: Mapping[str, float]) -> list[dict[str, Any]]:
    """One score an item; where there are too few or too many, nobody knows whose they are."""
    values, count = list(values), len(call.items)
    if len(values) != count:
        wrong = ValueError(f"returned {len(values)} rewards for {count} completions")
        return [failure_of(wrong)] * count
    return [judged(value, metrics) for value in values]


def judged(value: Any, metrics: Mapping[str, float]) -> dict[str, Any]:
    """One reward as JSON holds it. What is not finite is a failure, and among parts left out."""
    if inspect.isawaitable(value):
        raise TypeError("returned something to await; write `async def`")
    try:
        score = signatures.score_of(value)
        parts = {str(name): float(one) for name, one in {**metrics, **score.parts}.items()}
    except Exception as error:
        return failure_of(error)
    parts = {name: one for name, one in parts.items() if math.isfinite(one)}
    told = {"parts": parts, "reason": str(score.reason)[:200]}
    if score.value is None:
        return {**told, "failure": "none"}
    if not finite(score.value):
        return {**told, "failure": "not_finite", "reason": told["reason"] or str(score.value)}
    return {**told, "value": score.value}


def failure_of(error: BaseException) -> dict[str, Any]:
    kind = "infrastructure" if isinstance(error, InfrastructureError) else "error"
    return {"failure": kind, "reason": said(error)}


def said(error: BaseException) -> str:
    """An exception in one line, with the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text(error)}"[:300] + place


def text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as again:
        return f"its text raises {type(again).__name__}"
