"""Messages of a worker process, and calls in a child of their own."""

import contextlib
import json
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

LENGTH = 8  # bytes before a message
NUMBER = 8  # bytes of a call's number, after the length
LARGEST = 1 << 26  # bytes of an answer


def receive(stream: BinaryIO) -> tuple[str, Any]:
    """The next call's number and message; ends the process quietly when there are no more."""
    length = int.from_bytes(read(stream, LENGTH), "big")
    number = read(stream, NUMBER).hex()
    return number, pickle.loads(read(stream, length))


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
