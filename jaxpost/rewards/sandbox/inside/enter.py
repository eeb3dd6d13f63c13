"""The first program of a box: it takes the last rights away, then becomes the program asked for.

Started as `python -c BOOT SPEC ARGV...`, with SPEC in JSON (see box.spec). What it does is done
before anything hostile runs; it writes one byte, ENTERED, when it is done, by which the outside
tells a box that failed from a program that failed.
"""

import binascii
import contextlib
import importlib
import json
import os
import resource
import runpy
import signal
import sys

from . import confine, syscalls

ENTERED = b"\x06"
DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]


def main() -> None:
    os.closerange(3, 1024)
    spec, argv = json.loads(sys.argv[1]), sys.argv[2:]
    files = read_files(spec["files"])
    if spec["kind"] == "bwrap":
        os.umask(0o022)
        write_files(files, spec["scratch"])
        become_program(spec, argv)
    keep(spec, argv, files)


def read_files(size: int) -> dict[str, bytes]:
    """The job's files, the first `size` bytes of stdin; what follows is the program's."""
    text = b""
    while len(text) < size:
        part = os.read(0, size - len(text))
        if not part:
            raise EOFError(f"stdin ended {size - len(text)} bytes before the job's files did")
        text += part
    return {name: binascii.a2b_base64(data) for name, data in json.loads(text or b"{}").items()}


def write_files(files: dict[str, bytes], folder: str) -> None:
    for name, data in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        os.chmod(path, 0o444)


def become_program(spec: dict, argv: list[str]) -> None:
    for name, limit in spec["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limit)
    confine.no_new_privileges()
    if spec["kind"] == "landlock":
        confine.landlock(spec["readable"], [*spec["writable"], *DEVICES])
    if spec["user"] is not None:
        confine.become(spec["user"], keep_reading=spec["kind"] == "landlock")
    if spec["kind"] != "none":
        confine.filter_calls(syscalls.program(namespaces=spec["kind"] == "bwrap"))
    if spec["announce"]:
        os.write(1, ENTERED)
    start(spec, argv)


def start(spec: dict, argv: list[str]) -> None:
    """`-m inside.NAME` and `script.py` run in this interpreter, which saves starting another."""
    inside = argv[0] == "-m"
    if not inside and not argv[0].endswith(".py"):
        os.execvp(argv[0], argv)
    module = importlib.import_module(argv[1]) if inside else None
    sys.path[:] = [path for path in sys.path if path != spec["home"]]
    sys.path += spec["packages"]
    sys.argv = argv
    if module is not None:
        module.main()
    else:
        sys.path[:0] = [os.path.dirname(os.path.abspath(argv[0]))]
        runpy.run_path(argv[0], run_name="__main__")
    sys.exit(0)


def keep(spec: dict, argv: list[str], files: dict[str, bytes]) -> None:
    """Without a pid namespace: this process stays outside the box and ends all that it leaves.

    As a subreaper it inherits every orphan. It ends as the program did (128 + signal, as a shell).
    """
    confine.prctl(confine.PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    confine.prctl(confine.PR_SET_PDEATHSIG, signal.SIGTERM)
    scratch = spec["scratch"]
    if spec["temporary"]:
        os.mkdir(scratch, 0o700)
    if spec["user"] is not None:
        os.chown(scratch, spec["user"], spec["user"])
    write_files(files, scratch)
    signal.signal(signal.SIGTERM, lambda *_: end_all())
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.chdir(scratch)
        become_program(spec, argv)
    if os.getppid() != parent:
        end_all()
    for descriptor in (0, 1, 2):
        os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_all()
    if spec["temporary"]:
        import shutil  # which takes longer to import than all else that a box needs

        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(code if code >= 0 else 128 - code)


def end_all() -> None:
    """Kills all descendants. None is waited for before all are dead: the dead still count against
    the limit on processes, so that a fork bomb cannot go on in the room that they would leave.
    """
    while alive := [pid for pid in descendants(os.getpid()) if not dead(pid)]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> list[int]:
    found = [root]
    for pid in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


def dead(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "ZX"
    return True
