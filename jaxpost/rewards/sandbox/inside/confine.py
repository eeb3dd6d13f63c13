"""The calls that a process makes to confine itself: privileges, seccomp and Landlock.

Linux's own interfaces by ctypes: prctl(2), seccomp(2), landlock(7), capset(2).
"""

import ctypes
import os
import stat
import struct

libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 36, 38
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, SECCOMP_MODE_FILTER = 8, 47, 2, 2
CAP_DAC_READ_SEARCH = 2
CAPABILITY_VERSION_3 = 0x20080522
CAPSET = {"x86_64": 126, "aarch64": 91}
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
# Landlock's file rights, by bit: 0 execute, 1 write, 2 read, 3 list, 4-13 make, remove and rename
# (6 a character device, 11 a block device), 14 truncate, 15 ioctl of a device.
ALL = (1 << 16) - 1
READ = 1 | 1 << 2 | 1 << 3
WRITE = ALL & ~(1 << 6 | 1 << 11)
OF_A_FILE = 1 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
NETWORK, SCOPES = 3, 3  # bind and connect; abstract sockets and signals


def checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, *values: int) -> None:
    words = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    checked(libc.prctl(ctypes.c_int(option), *words), f"prctl({option})")


def syscall(number: int, *values: object) -> int:
    return libc.syscall(ctypes.c_long(number), *values)


def no_new_privileges() -> None:
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def become(user: int, keep_reading: bool) -> None:
    """From root to another user for good, all capabilities gone.

    `keep_reading` keeps the one to read and search any folder; it is for a process whose paths
    Landlock already limits, where the interpreter lies in root's own home.
    """
    if keep_reading:
        prctl(PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kept = 1 << CAP_DAC_READ_SEARCH if keep_reading else 0
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    sets = struct.pack("=6I", kept, kept, kept, 0, 0, 0)
    checked(syscall(CAPSET[os.uname().machine], header, sets), "capset")
    if keep_reading:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH)


def filter_calls(program: bytes) -> None:
    """Installs a seccomp filter, in this process and all that it starts."""
    buffer = ctypes.create_string_buffer(program, len(program))
    words = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    description = ctypes.create_string_buffer(words, len(words))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(description))


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none. Signals are confined from 6 on."""
    return max(syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(1)), 0)


def landlock(readable: list[str], writable: list[str]) -> None:
    """From now on only these paths, and what is below them; no TCP, no signals to the outside."""
    attributes = struct.pack("=QQQ", ALL, NETWORK, SCOPES)
    ruleset = syscall(
        CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    checked(ruleset, "landlock_create_ruleset")
    for rights, paths in ((READ, readable), (WRITE, writable)):
        for path in filter(os.path.exists, paths):
            allow(ruleset, path, rights)
    checked(syscall(RESTRICT_SELF, ruleset, ctypes.c_uint(0)), "landlock_restrict_self")
    os.close(ruleset)


def allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
        rights &= OF_A_FILE
    rule = struct.pack("=Qi", rights, descriptor)
    checked(syscall(ADD_RULE, ruleset, 1, rule, ctypes.c_uint(0)), f"landlock_add_rule({path})")
    os.close(descriptor)
