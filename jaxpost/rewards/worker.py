"""The program of a worker process: calls arrive on its standard input, scores leave by its output.

A message is eight bytes of length and then its bytes: pickles in, JSON out, so that nothing which a
worker says can run in the trainer. The first message is the `Job`, its answer how each function
wants to be called; then one answer a `Call`.

With `Job.fork`, each call runs in a child of its own, so that what one completion does to the
process (memory, caches, patched modules) no other meets, and an overrun costs no new start.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import json
import logging
import math
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from jaxpost.rewards import resolve, signatures
from jaxpost.rewards.score import InfrastructureError, Item

LENGTH = 8
LARGEST = 1 << 26  # bytes of an answer
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
    job: Job = receive(requests)
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
    send(channel, {"ready": ready})
    if job.fork:
        gc.collect()
        gc.freeze()  # so that collections in forks touch, and copy, less
    while (call := receive(requests)) is not None:
        work = answer(rewards, call)
        send(channel, in_child(work, call.seconds, (channel, requests)) if job.fork else work())


def die_with(parent: int) -> None:
    """Ends this process when the thread that started it ends, however that comes about."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def receive(stream: BinaryIO) -> Any:
    """The next message; ends the process quietly when there are no more."""
    length = int.from_bytes(read(stream, LENGTH), "big")
    return pickle.loads(read(stream, length))


def read(stream: BinaryIO, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = stream.read(count - len(chunks))
        if not chunk:
            os._exit(0)
        chunks += chunk
    return bytes(chunks)


def send(stream: BinaryIO, message: Any) -> None:
    stream.flush()
    data = memoryview(frame(message))
    while data:
        data = data[stream.write(data) :]


def frame(message: Any) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(LENGTH, "big") + data


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
            ready.append({"error": f"{source.path}: {said(error)}"})
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
    if reward.style in ("batched", "trl"):
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
    values = list(values)
    if len(values) != len(call.items):
        raise ValueError(f"returned {len(values)} rewards for {len(call.items)} completions")
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
    if not math.isfinite(score.value):
        return {**told, "failure": "not_finite", "reason": told["reason"] or str(score.value)}
    return {**told, "value": score.value}


def failure_of(error: BaseException) -> dict[str, Any]:
    kind = "infrastructure" if isinstance(error, InfrastructureError) else "error"
    return {"failure": kind, "reason": said(error)}


def said(error: BaseException) -> str:
    """An exception in one line, with the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:300] + place


def in_child(
    work: Callable[[], dict[str, Any]], seconds: float, private: Sequence[BinaryIO]
) -> dict[str, Any]:
    """Runs `work` in a fork, without the streams `private`, and kills it when it overruns."""
    ours, theirs = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(ours)
        os.close(theirs)
        return {"failure": "infrastructure", "reason": f"fork: {error}"}
    if not child:
        with contextlib.suppress(BaseException):
            os.setsid()
            for stream in private:
                stream.close()
            os.close(ours)
            with os.fdopen(theirs, "wb", buffering=0) as stream:
                send(stream, work())
        os._exit(0)
    os.close(theirs)
    try:
        data = until(ours, time.monotonic() + seconds)
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data is None:
        return {"failure": "timeout", "reason": f"no answer in {seconds:g} s"}
    return parsed(data, status)


def until(source: int, end: float) -> bytes | None:
    """What a child wrote, without its length: all of it at the end or b""; None: too late."""
    data, wanted = bytearray(), LENGTH
    while len(data) < wanted:
        left = end - time.monotonic()
        if left <= 0 or not select.select([source], [], [], left)[0]:
            return None
        chunk = os.read(source, 1 << 16)
        if not chunk:
            return b""
        data += chunk
        if len(data) >= LENGTH:
            wanted = LENGTH + min(int.from_bytes(data[:LENGTH], "big"), LARGEST)
    return bytes(data[LENGTH:wanted])


def parsed(data: bytes, status: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        message = json.loads(data)
        if isinstance(message, dict):
            return message
    code = os.waitstatus_to_exitcode(status)
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return {"failure": "crash", "reason": f"the process ended without an answer: {how}"}
