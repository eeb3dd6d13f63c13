"""Boxes seen from outside: started by the supervisor, talked to by pipes, read up to a limit."""

import base64
import json
import os
import pathlib
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxpost.rewards.sandbox import box
from jaxpost.rewards.sandbox import limits as limits_
from jaxpost.rewards.sandbox.inside import enter

SUPERVISOR = pathlib.Path(__file__).parent / "supervisor.py"
CHUNK = 1 << 16
GRACE = 5.0  # seconds past the deadline after which the supervisor itself counts as lost


class Outcome(NamedTuple):
    """How a program ended, as the outside saw it; nothing in it is the program's own claim.

    `kind`: "exit" (by itself, with `returncode`; 128 + n for signal n), "timeout", "memory",
    "output" (more than allowed), or "infrastructure" (the box failed, not the program; `stderr`
    says how).
    """

    kind: str
    returncode: int | None
    stdout: bytes
    stderr: bytes
    seconds: float


class Supervisor(NamedTuple):
    requests: socket.socket
    process: subprocess.Popen[bytes]


_lock = threading.Lock()
_supervisor: list[Supervisor] = []  # none or one


def supervisor() -> Supervisor:
    """This process's supervisor, which a fork of it shares."""
    if not _supervisor:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-I", "-S", str(SUPERVISOR), str(os.getpid())]
        with theirs:
            process = subprocess.Popen(argv, stdin=theirs.fileno(), env={}, start_new_session=True)
        _supervisor.append(Supervisor(ours, process))
    return _supervisor[0]


def request(task: bytes, descriptors: list[int]) -> None:
    """Sends a job to the supervisor, to a new one if the last has died."""
    with _lock:
        try:
            socket.send_fds(supervisor().requests, [task], descriptors)
        except (BrokenPipeError, ConnectionResetError):
            lost = _supervisor.pop()
            lost.requests.close()
            lost.process.poll()
            socket.send_fds(supervisor().requests, [task], descriptors)


class Box:
    """A program in a box. Reading past `output_bytes` or the deadline ends it."""

    def __init__(self, level: box.Level, command: box.Command, limits: limits_.Limits) -> None:
        self.limits = limits
        self.started = time.monotonic()
        self.stdout, self.stderr = bytearray(), bytearray()
        self.entered = self.overflow = False
        self.outcome: Outcome | None = None
        self.unsent, self.last = bytearray(), False
        self.result, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (read_in, self.stdin), (out, write_out), (err, write_err) = os.pipe(), os.pipe(), os.pipe()
        self.out = out
        self.streams = {out: self.stdout, err: self.stderr}
        self.chosen = selectors.DefaultSelector()
        for descriptor in self.streams:
            self.chosen.register(descriptor, selectors.EVENT_READ)
        os.set_blocking(self.stdin, False)
        task = {
            "argv": command.argv,
            "env": command.env,
            "seconds": limits.seconds,
            "memory": limits.memory,
            "gentle": level.kind != "bwrap",
            "scratch": command.scratch,
            "scratch_bytes": limits.scratch_bytes,
        }
        given = [read_in, write_out, write_err, theirs.fileno()]
        try:
            request(json.dumps(task).encode(), given)
        finally:
            theirs.close()
            for descriptor in given[:3]:
                os.close(descriptor)

    def send(self, data: bytes) -> None:
        self.unsent += data
        if self.unsent and self.stdin >= 0 and self.stdin not in self.chosen.get_map():
            self.chosen.register(self.stdin, selectors.EVENT_WRITE)

    def send_last(self, data: bytes) -> None:
        """Sends, and closes stdin once all is sent."""
        self.last = True
        self.send(data)
        if not self.unsent:
            self.close_stdin()

    def close_stdin(self) -> None:
        if self.stdin >= 0:
            if self.stdin in self.chosen.get_map():
                self.chosen.unregister(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def step(self) -> bool:
        """Moves bytes once; False when both outputs are closed, full, or time is up."""
        if not self.streams or self.overflow:
            return False
        left = self.left()
        for key, _ in self.chosen.select(left):
            if key.fd == self.stdin:
                self.write()
            elif key.fd in self.streams:
                self.read(key.fd)
        return self.left() > 0

    def left(self) -> float:
        seconds = self.limits.seconds
        return 3600.0 if seconds is None else self.started + seconds + GRACE - time.monotonic()

    def write(self) -> None:
        try:
            del self.unsent[: os.write(self.stdin, self.unsent[:CHUNK])]
        except BrokenPipeError:
            self.close_stdin()
        if self.stdin >= 0 and not self.unsent:
            self.chosen.unregister(self.stdin)
            if self.last:
                self.close_stdin()

    def read(self, descriptor: int) -> None:
        data = os.read(descriptor, CHUNK)
        if descriptor == self.out and not self.entered and data.startswith(enter.ENTERED):
            self.entered, data = True, data.removeprefix(enter.ENTERED)
            if not data:
                return
        if data:
            self.streams[descriptor] += data
            self.overflow |= len(self.streams[descriptor]) > self.limits.output_bytes
        else:
            self.chosen.unregister(descriptor)
            del self.streams[descriptor]
            os.close(descriptor)

    def line(self) -> bytes | None:
        """The next line of stdout, taken out of it; None when there will be none."""
        while (end := self.stdout.find(b"\n")) < 0:
            if self.out not in self.streams or not self.step():
                return None
        found = bytes(self.stdout[:end])
        del self.stdout[: end + 1]
        return found

    def finish(self) -> Outcome:
        """Waits for the end, if it has been asked for or comes by itself."""
        while self.step():
            pass
        return self.close()

    def close(self) -> Outcome:
        """Ends the program if it still runs, and says how it ended. Closing again does nothing."""
        if self.outcome is None:
            self.outcome = self.end()
        return self.outcome

    def end(self) -> Outcome:
        self.close_stdin()
        done = not self.streams
        for descriptor in self.streams:
            self.chosen.unregister(descriptor)
            os.close(descriptor)
        self.streams = {}
        self.chosen.close()
        if not done:
            self.result.shutdown(socket.SHUT_WR)
        said = self.listen()
        self.result.close()
        return self.judge(said)

    def listen(self) -> bytes:
        self.result.settimeout(max(self.left(), GRACE))
        try:
            return self.result.recv(1 << 16)
        except OSError:
            return b""

    def judge(self, said: bytes) -> Outcome:
        seconds = time.monotonic() - self.started
        stdout, stderr = bytes(self.stdout), bytes(self.stderr)
        stdout, stderr = (data[: self.limits.output_bytes] for data in (stdout, stderr))

        def outcome(kind: str, code: int | None = None, reason: str = "") -> Outcome:
            return Outcome(kind, code, stdout, stderr or reason.encode(), seconds)

        if not said:
            return outcome("infrastructure", reason="the supervisor of the sandbox was lost")
        report = json.loads(said)
        code, ended_by = report["code"], report["ended_by"]
        if report["error"] or (not self.entered and not ended_by):
            return outcome("infrastructure", code, report["error"] or "the box did not start")
        if ended_by in ("timeout", "memory", "output"):
            return outcome(ended_by)
        if self.overflow:
            return outcome("output")
        if ended_by == "" and code < 0:
            return outcome("infrastructure", code, f"the box itself died of signal {-code}")
        if code == 128 + signal.SIGXCPU:
            return outcome("timeout", code)
        return outcome("exit", code)


def start(
    level: box.Level,
    argv: Sequence[str],
    files: Mapping[str, bytes],
    readable: Sequence[str | os.PathLike[str]],
    limits: limits_.Limits,
) -> Box:
    """`files` lie in the scratch folder, which is the program's working directory."""
    job = json.dumps({name: base64.b64encode(data).decode() for name, data in files.items()})
    header = job.encode() if files else b""
    command = box.make(level, argv, readable, None, limits, len(header), announce=True)
    opened = Box(level, command, limits)
    opened.send(header)
    return opened
