"""A box for programs that may be hostile: the strongest confinement that this machine has.

What a box has: read-only system folders and this Python, a scratch folder, its own processes, no
network, an environment of constants, limits. Its level is "bwrap" (namespaces and seccomp) or
"landlock" (Landlock and seccomp); without either, everything here refuses, unless `level="none"`.
"""

import os
from collections.abc import Mapping, Sequence

from jaxpost.rewards.sandbox import box, boxes
from jaxpost.rewards.sandbox.box import Command, Level
from jaxpost.rewards.sandbox.boxes import Box, Outcome
from jaxpost.rewards.sandbox.levels import RefusedError, Trial, choose, describe, probe
from jaxpost.rewards.sandbox.limits import Limits

__all__ = [
    "Box",
    "Command",
    "Level",
    "Limits",
    "Outcome",
    "RefusedError",
    "Trial",
    "choose",
    "command",
    "describe",
    "probe",
    "run",
    "start",
]
DEFAULT = Limits()
Path = str | os.PathLike[str]


def command(
    argv: Sequence[str],
    *,
    readable: Sequence[Path] = (),
    writable: Path | None = None,
    limits: Limits = DEFAULT,
    level: str | None = None,
) -> Command:
    """How to start a confined process of one's own, which talks by stdin, stdout and stderr.

    `writable` is a folder of the host, otherwise there is a scratch folder that goes with the box;
    either is its working directory. Whoever starts it keeps the deadline and the output's size:
    `limits.seconds` gives the CPU limit only. An argv[0] ending in .py runs in this Python.
    """
    return box.make(choose(level), argv, readable, writable, limits)


def start(
    argv: Sequence[str],
    *,
    files: Mapping[str, bytes] = {},
    readable: Sequence[Path] = (),
    limits: Limits = DEFAULT,
    level: str | None = None,
) -> Box:
    """A box to talk to; `finish` or `close` it."""
    return boxes.start(choose(level), argv, files, readable, limits)


def run(
    argv: Sequence[str],
    *,
    files: Mapping[str, bytes] = {},
    stdin: bytes = b"",
    readable: Sequence[Path] = (),
    limits: Limits = DEFAULT,
    level: str | None = None,
) -> Outcome:
    """Runs a program to its end, in a scratch folder that holds `files`."""
    opened = start(argv, files=files, readable=readable, limits=limits, level=level)
    opened.send_last(stdin)
    return opened.finish()
