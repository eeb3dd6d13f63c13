"""One side of a comparison in a process of its own, and the memory that it took."""

import json
import os
import subprocess
from pathlib import Path


def run(script: str, python: str, *arguments: str, huge_pages: bool) -> dict:
    """What `python script arguments` prints in its last line; no compiled program is kept."""
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if huge_pages else {}
    environment = os.environ | tunables | {"JAXPOST_CACHE_DIR": "none"}
    command = [python, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int:
    """The largest memory this process has held, by the kernel's count (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
