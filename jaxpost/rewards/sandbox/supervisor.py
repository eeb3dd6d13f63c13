"""A small process that starts boxes, ends them, and collects every process they leave behind.

Run as `python supervisor.py` with a SOCK_SEQPACKET socket as stdin, on which each message is a job
in JSON with four descriptors: its stdin, stdout and stderr, and a socket on which the result is
written once it has ended. A job ends by itself, at its deadline, when its processes hold too much
memory, or when the other end of its socket is closed. Standard library only; no jaxpost.
"""

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
TICK = 0.05  # how often memory is looked at
PAGE = os.sysconf("SC_PAGE_SIZE")


class Job:
    def __init__(self, task: dict, descriptors: list[int]) -> None:
        *streams, result = descriptors
        self.result = socket.socket(fileno=result)
        self.started = time.monotonic()
        seconds = task["seconds"]
        self.deadline = float("inf") if seconds is None else self.started + seconds
        self.memory = task["memory"] or float("inf")
        self.gentle = task["gentle"]
        self.scratch, self.scratch_bytes = task["scratch"], task["scratch_bytes"]
        self.watched = False
        self.ended_by = ""
        self.error = ""
        self.pid = 0
        try:
            self.pid = spawn(task, streams)
        except OSError as error:
            self.error = str(error)
        finally:
            for stream in streams:
                os.close(stream)

    def end(self, why: str) -> None:
        """A gentle end lets `inside.enter` kill what it looks after; asked again until done."""
        now = time.monotonic()
        if not self.ended_by:
            self.ended_by, self.deadline = why, min(self.deadline, now)
        late = now > self.deadline + 2
        os.kill(self.pid, signal.SIGTERM if self.gentle and not late else signal.SIGKILL)

    def look(self) -> None:
        if self.ended_by or time.monotonic() > self.deadline:
            self.end("timeout")
        elif resident(self.pid) > self.memory:
            self.end("memory")
        elif self.scratch and held(self.scratch, self.scratch_bytes) > self.scratch_bytes:
            self.end("output")

    def report(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - self.started
        said = {"code": code, "ended_by": self.ended_by, "error": self.error, "seconds": seconds}
        with contextlib.suppress(OSError):  # nobody waits for it any more
            self.result.send(json.dumps(said).encode())
        self.result.close()


def spawn(task: dict, streams: list[int]) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, stream, number) for number, stream in enumerate(streams)]
    default = [signal.SIGINT, signal.SIGTERM, signal.SIGPIPE]
    return os.posix_spawn(
        task["argv"][0],
        task["argv"],
        task["env"],
        file_actions=actions,
        setsid=True,
        setsigmask=[],
        setsigdef=default,
    )


def read(path: str) -> str:
    """A file of /proc; empty when the process has gone meanwhile."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def resident(root: int) -> int:
    """Bytes that a process and its descendants hold, files and shared memory not counted."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        words = read(f"/proc/{pid}/statm").split()
        total += (int(words[1]) - int(words[2])) * PAGE if words else 0
        for thread in list_threads(pid):
            waiting += map(int, read(f"/proc/{pid}/task/{thread}/children").split())
    return total


def held(folder: str, most: int) -> int:
    """Bytes in the files below a folder, counted no further than needed; an entry counts as 512."""
    total, waiting = 0, [folder]
    while waiting and total <= most:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                total += 512 + entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return total


def list_threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def accept(requests: socket.socket, jobs: dict[int, Job], chosen: selectors.BaseSelector) -> bool:
    """Starts the next job; False when the process that asks has gone."""
    message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4, socket.MSG_CMSG_CLOEXEC)
    if not message:
        return False
    job = Job(json.loads(message), descriptors)
    if job.error:
        job.report(0)
    else:
        jobs[job.pid], job.watched = job, True
        chosen.register(job.result, selectors.EVENT_READ, job)
    return True


def collect(jobs: dict[int, Job], chosen: selectors.BaseSelector) -> None:
    """Waits for every child that has ended: jobs, and the orphans that became this process's."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        job = jobs.pop(pid, None)
        if job is not None:
            forget(job, chosen)
            job.report(status)


def sweep(jobs: dict[int, Job]) -> None:
    """Kills what a box that had to be killed left to this process."""
    for pid in map(int, read(f"/proc/self/task/{os.getpid()}/children").split()):
        if pid not in jobs:
            os.kill(pid, signal.SIGKILL)


def forget(job: Job, chosen: selectors.BaseSelector) -> None:
    if job.watched:
        chosen.unregister(job.result)
    job.watched = False


def serve(requests: socket.socket, wakeup: socket.socket, owner: int, jobs: dict[int, Job]) -> None:
    chosen = selectors.DefaultSelector()
    chosen.register(requests, selectors.EVENT_READ)
    chosen.register(wakeup, selectors.EVENT_READ)
    looked = 0.0
    while os.getppid() == owner:
        for key, _ in chosen.select(TICK if jobs else 1.0):
            if key.fileobj is requests:
                if not accept(requests, jobs, chosen):
                    return
            elif key.fileobj is wakeup:
                wakeup.recv(4096)
            elif key.data.pid in jobs:
                forget(key.data, chosen)
                key.data.end("asked")
        collect(jobs, chosen)
        if time.monotonic() - looked >= TICK:
            looked = time.monotonic()
            sweep(jobs)
            for job in jobs.values():
                job.look()


def leave(jobs: dict[int, Job]) -> None:
    """Ends all that still runs, and waits for it: not every system's first process does."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                jobs.pop(pid, None)
            sweep(jobs)
            for job in jobs.values():
                job.end("asked")
            time.sleep(0.01)
            continue
        return


def main() -> None:
    owner = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakeup, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    jobs: dict[int, Job] = {}
    try:
        serve(socket.socket(fileno=os.dup(0)), wakeup, owner, jobs)
    finally:
        leave(jobs)


if __name__ == "__main__":
    main()
