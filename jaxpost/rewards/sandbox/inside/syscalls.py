"""The seccomp filter: a deny list of system calls, written as classic BPF for this machine."""

import os
import struct

EPERM, ENOSYS = 1, 38
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian
# CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
NAMESPACES = (
    0x80 | 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
)
X32 = 0x40000000

# Each row: number on x86-64, number on arm64 (-1: there is none), name.
DENIED = """
101 117 ptrace / 272 97 unshare / 308 268 setns / 165 40 mount / 166 39 umount2 / 155 41 pivot_root
161 51 chroot / 428 428 open_tree / 429 429 move_mount / 430 430 fsopen / 431 431 fsconfig
432 432 fsmount / 433 433 fspick / 442 442 mount_setattr / 467 467 open_tree_attr / 321 280 bpf
298 241 perf_event_open / 248 217 add_key / 249 218 request_key / 250 219 keyctl
323 282 userfaultfd / 425 425 io_uring_setup / 426 426 io_uring_enter / 427 427 io_uring_register
310 270 process_vm_readv / 311 271 process_vm_writev / 319 279 memfd_create / 447 447 memfd_secret
135 92 personality / 303 264 name_to_handle_at / 304 265 open_by_handle_at / 246 104 kexec_load
320 294 kexec_file_load / 175 105 init_module / 313 273 finit_module / 176 106 delete_module
169 142 reboot / 167 224 swapon / 168 225 swapoff / 103 116 syslog / 163 89 acct / 179 60 quotactl
443 443 quotactl_fd / 164 170 settimeofday / 227 112 clock_settime / 305 266 clock_adjtime
159 171 adjtimex / 172 -1 iopl / 173 -1 ioperm / 154 -1 modify_ldt / 312 272 kcmp
440 440 process_madvise / 448 448 process_mrelease / 438 438 pidfd_getfd / 300 262 fanotify_init
212 18 lookup_dcookie / 153 58 vhangup / 256 238 migrate_pages / 279 239 move_pages
"""
# Landlock leaves these open: they change files that cannot be opened, or reach other processes.
DENIED_WITHOUT_NAMESPACES = """
90 -1 chmod / 91 52 fchmod / 268 53 fchmodat / 452 452 fchmodat2 / 92 -1 chown / 93 55 fchown
94 -1 lchown / 260 54 fchownat / 188 5 setxattr / 189 6 lsetxattr / 190 7 fsetxattr
197 14 removexattr / 198 15 lremovexattr / 199 16 fremovexattr / 132 -1 utime / 235 -1 utimes
261 -1 futimesat / 280 88 utimensat / 141 140 setpriority / 142 118 sched_setparam
144 119 sched_setscheduler / 314 274 sched_setattr / 251 30 ioprio_set / 29 194 shmget
68 186 msgget / 64 190 semget / 240 180 mq_open
"""
ONLY_ITSELF = "302 261 prlimit64 / 203 122 sched_setaffinity"  # the first argument must be 0
CLONE, SOCKET, CLONE3 = (56, 220), (41, 198), (435, 435)
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


def numbers(table: str, column: int) -> list[int]:
    rows = table.replace("\n", " / ").split("/")
    found = [int(row.split()[column]) for row in rows if row.strip()]
    return [number for number in found if number >= 0]


def instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def refuse(error: int) -> bytes:
    return instruction(RETURN, ERRNO | error)


def when(number: int, body: bytes) -> bytes:
    """`body` for one system call; every body ends the filter."""
    return instruction(JUMP_EQUAL, number, 0, len(body) // 8) + body


def supported() -> bool:
    return os.uname().machine in MACHINES


def program(namespaces: bool) -> bytes:
    """The filter. `namespaces`: mount, pid and network namespaces are in place around it.

    A call of another architecture kills the process; a denied one fails with EPERM; clone3, whose
    flags a filter cannot read, says ENOSYS, so that the C library falls back to clone.
    """
    architecture, column = MACHINES[os.uname().machine]
    denied = numbers(DENIED, column)
    denied += [] if namespaces else numbers(DENIED_WITHOUT_NAMESPACES, column)
    families = (AF_UNIX, AF_INET, AF_INET6) if namespaces else ()
    first = instruction(LOAD, ARGUMENT)
    allow = instruction(RETURN, ALLOW)
    parts = [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, architecture, 1, 0) + instruction(RETURN, KILL),
        instruction(LOAD, NUMBER),
        *(
            [instruction(JUMP_AT_LEAST, X32, 0, 1) + instruction(RETURN, KILL)]
            if not column
            else []
        ),
        *(when(number, refuse(EPERM)) for number in denied),
        when(CLONE3[column], refuse(ENOSYS)),
        when(
            CLONE[column], first + instruction(JUMP_ANY, NAMESPACES, 0, 1) + refuse(EPERM) + allow
        ),
        when(
            SOCKET[column],
            first + b"".join(when(family, allow) for family in families) + refuse(EPERM),
        ),
    ]
    if not namespaces:
        itself = first + when(0, allow) + refuse(EPERM)
        parts += [when(number, itself) for number in numbers(ONLY_ITSELF, column)]
    return b"".join(parts) + allow
