"""One job at a time: the file that says who holds the folder."""

import contextlib
import datetime
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxpost.runs import disk

log = logging.getLogger(__name__)

_HEARTBEAT = 15.0  # seconds between touches of the lock
_SILENT = 90.0  # seconds after which a lock of another machine counts as left behind


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold the folder, by a file that names who holds it.

    A holder on this machine is alive if a process with its id and start time is; one on another
    machine, while it touches the file. So a lock that a killed job left behind never needs a hand.
    """
    with _guarded(path.parent):
        holder = _holder(path)
        if holder is not None:
            raise disk.RunError(
                f"{path.parent} is in use by process {holder['pid']} on {holder['host']} since "
                f"{holder['since']}; wait for it, stop it, or choose another run folder"
            )
        disk.write(path, json.dumps(identity()) + "\n")
    ended = threading.Event()
    beat = threading.Thread(target=_beat, args=(path, ended), name="lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        with _guarded(path.parent), contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
                path.unlink()


@contextlib.contextmanager
def _guarded(folder: Path) -> Iterator[None]:
    """Only one process at a time looks at the lock and takes it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot; a race is unlikely
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock, if they are alive."""
    here = identity()
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        holder = {**{key: held[key] for key in here}, "pid": int(held["pid"])}
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OverflowError):
        log.warning("%s cannot be read and was taken over", path)
        return None
    if holder["host"] == here["host"]:
        alive = holder["boot"] == here["boot"] and start_of(holder["pid"]) == holder["start"]
    else:
        alive = _now_there(path.parent) - path.stat().st_mtime < _SILENT
    return holder if alive else None


def identity() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "start": start_of(os.getpid()),
        "boot": _boot(),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def start_of(pid: int) -> str | None:
    """When a process started, in ticks since boot; None when there is none (or it is a zombie).

    Where there is no /proc (macOS), only whether it lives is known.
    """
    if not Path("/proc/self/stat").exists():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, 0)
            return "alive"
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _now_there(folder: Path) -> float:
    """The time by the clock of the file system, which may be another machine's."""
    probe = folder / f".clock.{os.getpid()}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


def _beat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_HEARTBEAT):
        with contextlib.suppress(OSError):
            os.utime(path)
