"""The command that starts a box: bubblewrap around `inside.enter`, or `inside.enter` alone."""

import json
import os
import pathlib
import secrets
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from jaxpost.rewards.sandbox import limits as limits_

INSIDE = pathlib.Path(__file__).parent / "inside"
HOME = "/jaxpost"  # where a bubblewrap box sees INSIDE's parent
SCRATCH = "/box"
BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside import enter; enter.main()"
PLAIN_USER = 65534
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
LINKING = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Level(NamedTuple):
    """A way to confine: "bwrap" (with the binary's path), "landlock", or "none"."""

    kind: str
    binary: str = ""


class Command(NamedTuple):
    """What to start, with no descriptor but 0, 1 and 2, and with this environment only.

    A bubblewrap box dies with the thread that started it: start it from one that stays. Another
    box is ended by SIGTERM, which it passes on; `scratch` is its folder on the host.
    """

    argv: list[str]
    env: dict[str, str]
    scratch: str = ""


def make(
    level: Level,
    argv: Sequence[str],
    readable: Sequence[str | os.PathLike[str]],
    writable: str | os.PathLike[str] | None,
    limits: limits_.Limits,
    files: int = 0,
    announce: bool = False,
) -> Command:
    user = free_user() if os.geteuid() == 0 and level.kind != "none" else None
    own = None if writable is None else os.path.realpath(writable)
    if own is not None and user is not None:
        os.chown(own, user, user)
    walled = level.kind == "bwrap"
    name = f"jaxpost-box-{os.getpid()}-{secrets.token_hex(8)}"
    scratch = own or (SCRATCH if walled else os.path.join(tempfile.gettempdir(), name))
    paths = [*interpreter(), *(os.path.realpath(path) for path in readable)]
    home = HOME if walled else str(INSIDE.parent)
    spec = {
        "kind": level.kind,
        "user": user,
        "limits": limits.resources(),
        "readable": [*SYSTEM, *LINKING, *paths, home + "/inside"],
        "writable": [scratch],
        "scratch": scratch,
        "temporary": own is None,
        "files": files,
        "announce": announce,
        "home": home,
        "packages": [sysconfig.get_paths()["purelib"]],
    }
    env = {**ENVIRONMENT, "HOME": scratch, "TMPDIR": "/tmp" if walled else scratch}
    program = [sys.executable, "-sSP", "-c", BOOT, home, json.dumps(spec), *argv]
    if not walled:
        return Command(program, env, scratch)
    mounts = bubblewrap(paths, own, limits.scratch_bytes, user is not None)
    settings = [word for name, value in env.items() for word in ("--setenv", name, value)]
    return Command([level.binary, *mounts, "--chdir", scratch, *settings, "--", *program], {})


def bubblewrap(paths: list[str], own: str | None, size: int, root: bool) -> list[str]:
    """The walls. Root mounts, and `inside.enter` leaves root; others use a user namespace."""
    words = ["--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid"]
    words += ["--unshare-net", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL"]
    if root:
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--disable-userns"]
        words += ["--uid", str(PLAIN_USER), "--gid", str(PLAIN_USER)]
    words += ["--hostname", "box", "--proc", "/proc", "--dev", "/dev"]
    for folder in SYSTEM:
        if os.path.islink(folder):
            words += ["--symlink", os.readlink(folder), folder]
        else:
            words += ["--ro-bind-try", folder, folder]
    scratch = ("/tmp", "/dev/shm", *([] if own else [SCRATCH]))
    for folder in scratch:
        words += ["--perms", "1777", "--size", str(size), "--tmpfs", folder]
    bound = [path for path in (*LINKING, *paths) if os.path.exists(path)]
    for folder in above([*bound, HOME + "/inside", *([own] if own else [])]):
        words += ["--perms", "0755", "--dir", folder]
    for path in bound:
        words += ["--ro-bind", path, path]
    words += ["--ro-bind", str(INSIDE), HOME + "/inside"]
    words += ["--bind", own, own] if own else []
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]


def above(paths: list[str]) -> list[str]:
    """The folders that lead to these paths, outermost first; bubblewrap would close them to all."""
    parents = {str(parent) for path in paths for parent in pathlib.Path(path).parents}
    return sorted(parents - {"/", "/tmp"}, key=len)


def interpreter() -> list[str]:
    """The folders of this Python and of its environment that lie outside of /usr."""
    folders = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), sys.prefix}
    return sorted(folder for folder in folders if not folder.startswith("/usr/"))


def free_user() -> int:
    """A user id that nobody has, another for each box: limits on processes are counted by user."""
    with open("/proc/self/uid_map") as file:
        inside, _, length = (int(word) for word in file.readline().split())
    if length >= 1 << 31:
        return (1 << 30) + secrets.randbelow(1 << 29)
    return inside + length // 2 + secrets.randbelow(length // 4)
