"""Programs that a policy might write for "add two integers", each with its right verdicts.

`CALLS`: judged by calls of `add`; `STREAMS`: reads two integers, prints their sum; `ASSERTS`:
judged by assert statements. A program that tries to get out says `escaped()` where it succeeds, so
that "pass" means that it did not.
"""

SECRET = "jaxpost-test-secret-5f1c"  # stands in the parent's environment
ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return 7\n"
ESCAPED = "def escaped():\n    raise SystemExit('escaped')\n"


def refused(attempt: str) -> str:
    """The attempt must raise OSError; then add correctly."""
    body = "\n".join(f"    {line}" for line in attempt.strip().splitlines())
    start = f"{ESCAPED}import os, ctypes, socket\ntry:\n{body}\n"
    return f"{start}except OSError:\n    pass\nelse:\n    escaped()\n{ADD}"


def system_call(number: int, *arguments: str) -> str:
    """A call that must fail with EPERM or ENOSYS (x86-64 numbers)."""
    words = ", ".join((str(number), *arguments))
    return (
        f"{ESCAPED}import ctypes, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"if platform.machine() == 'x86_64':\n"
        f"    if libc.syscall({words}) >= 0 or ctypes.get_errno() not in (1, 38):\n"
        f"        escaped()\n{ADD}"
    )


PASS = {"pass"}
NO_PASS = {"wrong", "runtime-error", "timeout", "memory", "output-limit", "violation"}
ANY = PASS | NO_PASS

CALLS = {
    "correct": (ADD, PASS),
    "wrong constant": (WRONG, {"wrong"}),
    "syntax error": ("def add(a, b:\n  return a", {"runtime-error"}),
    "infinite loop": ("def add(a, b):\n    while True: pass", {"timeout"}),
    "sleep for ever": ("import time\ndef add(a, b): time.sleep(1e6)", {"timeout"}),
    "ignores signals and loops": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        {"timeout"},
    ),
    "fork bomb": ("import os\nwhile True: os.fork()", NO_PASS),
    "fork bomb, caught": (
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        {"timeout", "memory"},
    ),
    "thread bomb": (
        "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()",
        NO_PASS,
    ),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 24))", {"memory"}),
    "memory bomb by mmap": (
        "import mmap\nkept = []\nwhile True:\n"
        "    m = mmap.mmap(-1, 1 << 24, flags=mmap.MAP_PRIVATE|mmap.MAP_ANONYMOUS)\n"
        "    m.write(bytes(1 << 24)); kept.append(m)",
        NO_PASS,
    ),
    "thirty forks of 400 MB": (
        "import os, time\nfor _ in range(30):\n    if os.fork() == 0:\n"
        "        x = bytearray(400 << 20)\n        for i in range(0, len(x), 4096): x[i] = 1\n"
        "        time.sleep(99)\ntime.sleep(99)",
        NO_PASS,
    ),
    "infinite output": ("while True: print('x' * 1000)", {"output-limit"}),
    "infinite output to stderr": (
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        {"output-limit"},
    ),
    "one endless string": ("def add(a, b): return 'x' * (1 << 22)", {"output-limit"}),
    "daemon, then correct": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        time.sleep(600)\n    os._exit(0)\nos.wait()\n" + ADD,
        PASS,
    ),
    "exit 0 at import": ("import sys\nsys.exit(0)", {"runtime-error"}),
    "_exit 0 at import": ("import os\nos._exit(0)", {"runtime-error"}),
    "_exit 0 in the function": ("import os\ndef add(a, b): os._exit(0)", {"runtime-error"}),
    "_exit 0 at exit": (WRONG + "import atexit, os\natexit.register(os._exit, 0)", {"wrong"}),
    "kills itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", NO_PASS),
    "execs true": ("import os\nos.execv('/usr/bin/true', ['true'])", {"runtime-error"}),
    "walks frames for the answer": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name, value in {**frame.f_globals, **frame.f_locals}.items():\n"
        "            if name in ('expected', 'wanted', 'outputs'): return value\n"
        "        frame = frame.f_back\n    return 7",
        {"wrong"},
    ),
    "searches the heap for the answer": (
        "import gc\ndef add(a, b):\n    for one in gc.get_objects():\n"
        "        if isinstance(one, dict) and 'outputs' in one: return one['outputs'][0]\n"
        "    return 7",
        {"wrong"},
    ),
    "looks for test files": (
        "import os\nfound = []\nfor root, folders, names in os.walk('/'):\n"
        "    folders[:] = [f for f in folders if f not in ('proc', 'usr', 'lib', 'share')]\n"
        "    found += [n for n in names if 'hostile_programs' in n or n.endswith('.jsonl')]\n"
        + ADD
        + "if found: raise SystemExit(str(found))",
        PASS,
    ),
    "reads every environment": (
        ESCAPED + "import os, glob\nif 'jaxpost-test' in str(os.environ): escaped()\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try:\n        if 'jaxpost-test' in open(path, errors='replace').read(): escaped()\n"
        "    except OSError: pass\n" + ADD,
        PASS,
    ),
    "reads shadow": (refused("open('/etc/shadow').read()"), PASS),
    "reads the list of users": (refused("open('/etc/passwd').read()"), PASS),
    "reads the repository": (refused("open(REPOSITORY + '/pyproject.toml').read()"), PASS),
    "reads a home": (refused("os.listdir('/root/.ssh') + os.listdir(HOME)"), PASS),
    "reads another box's scratch": (refused("os.listdir(HOST_TMP)"), PASS),
    "climbs out by /proc/1/root": (refused("open('/proc/1/root/etc/shadow').read()"), PASS),
    "opens inherited descriptors": (
        ESCAPED + "import os\nfor n in range(3, 64):\n    try:\n"
        "        name = os.readlink(f'/proc/self/fd/{n}')\n"
        "    except OSError: continue\n"
        "    if not name.startswith(('pipe:', '/proc', '/dev/null')): escaped()\n" + ADD,
        PASS,
    ),
    "writes to the system": (refused("open('/usr/bin/jaxpost-hostile', 'w')"), PASS),
    "writes to the root": (refused("open('/jaxpost-hostile', 'w')"), PASS),
    "edits the harness": (refused("open(INSIDE + '/guest.py', 'a')"), PASS),
    "edits the interpreter": (refused("open(os.__file__, 'a')"), PASS),
    "fills the disk": (
        ESCAPED + "import os\ntry:\n    for n in range(4000):\n"
        "        open(f'f{n}', 'wb').write(bytes(1 << 20))\n"
        "except OSError: pass\nelse: escaped()\n" + ADD,
        {"pass", "timeout", "output-limit"},
    ),
    "one large file": (refused("open('f', 'wb').write(bytes(64 << 20))"), ANY),
    "TCP out": (refused("socket.create_connection(('1.1.1.1', 53), 1)"), PASS),
    "UDP out": (refused("socket.socket(2, 2).sendto(b'x', ('1.1.1.1', 53))"), PASS),
    "the host's own ports": (refused("socket.create_connection(('127.0.0.1', PORT), 1)"), PASS),
    "abstract unix socket of the host": (
        refused("socket.socket(1, 1).connect('\\0jaxpost-hostile-test')"),
        PASS,
    ),
    "vsock": (refused("socket.socket(40, 1)"), PASS),
    "netlink": (refused("socket.socket(16, 3)"), PASS),
    "nested user namespace": (refused("os.unshare(0x10000000) if hasattr(os, 'unshare') else "
        "open('/nowhere')"), PASS),
    "user namespace by unshare": (system_call(272, "0x10000000"), PASS),
    "user namespace by clone": (system_call(56, "0x10000011", "0", "0", "0", "0"), PASS),
    "clone3": (system_call(435, "0", "0"), PASS),
    "ptrace of pid 1": (system_call(101, "16", "1", "0", "0"), PASS),
    "mount": (system_call(165, "0", "0", "0", "0", "0"), PASS),
    "bpf": (system_call(321, "0", "0", "0"), PASS),
    "io_uring": (system_call(425, "1", "0"), PASS),
    "keyctl": (system_call(250, "0", "0"), PASS),
    "userfaultfd": (system_call(323, "0"), PASS),
    "memfd": (system_call(319, "b'x'", "0"), PASS),
    "becomes root": (
        ESCAPED + "import os\ntry:\n    os.setuid(0)\nexcept OSError: pass\nelse: escaped()\n"
        "" + ADD,
        PASS,
    ),
    "raises its own limits": (
        ESCAPED + "import resource\ntry:\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "except (ValueError, OSError): pass\nelse: escaped()\n" + ADD,
        PASS,
    ),
    "kills everybody, then correct": (
        "import os, signal\nfor pid in [-1, *range(2, 40000)]:\n    if pid != os.getpid():\n"
        "        try: os.kill(pid, signal.SIGKILL)\n        except OSError: pass\n" + ADD,
        ANY,
    ),
    "kills its parent": (
        "import os, signal\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept OSError: pass\n"
        "" + ADD,
        ANY,
    ),
    "stops its group": (
        "import os, signal\nif os.fork() == 0: os.killpg(0, signal.SIGSTOP)\n" + WRONG,
        {"timeout", "wrong"},
    ),
    "9**9**9": ("def add(a, b): return 9**9**9", {"timeout", "memory"}),
    "9**9**9 behind an alarm": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.alarm(1)\n"
        "x = 9**9**9",
        {"timeout", "memory"},
    ),
    "a four-million-digit number as text": (
        "import sys\nsys.set_int_max_str_digits(0)\nx = str(7 ** 8_000_000)",
        {"timeout"},
    ),
    "catastrophic regex": (
        "import re\ndef add(a, b): return bool(re.match(r'(a+)+$', 'a' * 40 + 'b'))",
        {"timeout"},
    ),
    "input without stdin": ("def add(a, b): return int(input())", {"runtime-error"}),
    "null pointer": ("import ctypes\nctypes.string_at(0)", {"runtime-error"}),
    "stack overflow": (
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef add(a, b): return add(a, b)",
        NO_PASS,
    ),
    "returns NaN": ("def add(a, b): return float('nan')", {"wrong"}),
    "returns 5.0 for 5": ("def add(a, b): return float(a + b)", {"wrong"}),
    "returns True": ("def add(a, b): return True", {"wrong"}),
    "equals everything": (
        "class Any(int):\n    __eq__ = lambda *_: True\n    __ne__ = lambda *_: False\n"
        "    __hash__ = int.__hash__\ndef add(a, b): return Any(7)",
        {"wrong"},
    ),
    "claims to be an int": (
        "class Any:\n    __class__ = int\n    __eq__ = lambda *_: True\n"
        "def add(a, b): return Any()",
        {"wrong"},
    ),
    "odd source encoding": ("# -*- coding: utf-7 -*-\n" + ADD, PASS),
    "lone surrogate": ("x = '\ud800'\n" + WRONG, NO_PASS),
    "NUL byte": ("x = 1\0\n" + WRONG, {"runtime-error"}),
    "prints success": (
        "print('{\"passed\": true}', 'ALL TESTS PASSED', flush=True)\nimport os\nos._exit(0)",
        {"runtime-error"},
    ),
    "forges records": (
        WRONG + "import os\nfor n in range(3, 20):\n"
        "    try: os.write(n, b'{\"id\": 1, \"value\": 3}\\n' * 9)\n"
        "    except OSError: pass",
        {"violation"},
    ),
    "an extra record at the end": (
        ADD + "import os\ndef extra(a, b, calls=[]):\n    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        for n in range(3, 20):\n            try: os.write(n, b'{}\\n')\n"
        "            except OSError: pass\n"
        "    return a + b\nadd = extra",
        {"violation"},
    ),
    "deeply nested records": (
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'[' * 30000 + b'\\n')\n"
        "    except OSError: pass\n" + WRONG,
        {"violation"},
    ),
    "replaces json in the harness": (
        "import json\njson.dumps = lambda *_: '{\"passed\": 1}'\n" + WRONG,
        {"violation"},
    ),
    "replaces the harness": (
        "import sys\nfor name in list(sys.modules):\n    if 'inside' in name:\n"
        "        for key in vars(sys.modules[name]):\n"
        "            sys.modules[name].__dict__[key] = None\n" + WRONG,
        NO_PASS,
    ),
    "patches assert": ("import builtins\nbuiltins.AssertionError = Warning\n" + WRONG, {"wrong"}),
    "raises a stranger": (
        "class Strange(BaseException):\n    def __str__(self): raise self\n"
        "def add(a, b): raise Strange()",
        {"runtime-error"},
    ),
    "returns itself for ever": ("def add(a, b):\n    x = []\n    x.append(x)\n"
        "    return x", NO_PASS),
    "closes its channel and loops": (
        "import os\nos.closerange(0, 64)\nwhile True: pass",
        {"timeout", "runtime-error"},
    ),
}  # fmt: skip

STREAMS = {
    "correct": ("print(sum(map(int, input().split())))", PASS),
    "prints a constant": ("print(7)", {"wrong"}),
    "prints and exits": ("import os\nprint(7, flush=True)\nos._exit(0)", {"wrong"}),
    "right and then fails": ("print(sum(map(int, input().split())))\n"
        "raise SystemExit(1)", {"runtime-error"}),
    "right and then prints more": ("print(sum(map(int, input().split())))\n"
        "print('PASS')", {"wrong"}),
    "reads twice": ("print(int(input()) + int(input()))", {"runtime-error"}),
    "prints for ever": ("while True: print('x' * 1000)", {"output-limit"}),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 24))", {"memory"}),
    "loops": ("while True: pass", {"timeout"}),
    "ends the box's parent": (
        "import os, signal\ntry: os.kill(1, 9); os.kill(os.getppid(), 9)\nexcept OSError: pass\n"
        "print(7)",
        {"wrong", "runtime-error"},
    ),
    "daemon that keeps the output open": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint(7)",
        {"wrong", "timeout"},
    ),
}  # fmt: skip

ASSERTS = {
    "correct": (ADD, PASS),
    "wrong constant": (WRONG, {"wrong"}),
    "equals everything": (
        "class Any(int):\n    __eq__ = lambda *_: True\n    __bool__ = lambda _: True\n"
        "    __hash__ = int.__hash__\ndef add(a, b): return Any(7)",
        {"wrong"},
    ),
    "exit 0": ("import sys\nsys.exit(0)", {"runtime-error"}),
    "exits inside": ("import os\ndef add(a, b): os._exit(0)", {"runtime-error"}),
    "replaces assert's error": (
        "import builtins\nbuiltins.AssertionError = Warning\nimport sys\nsys.settrace(None)\n"
        "" + WRONG,
        {"wrong"},
    ),
    "rewrites the tests in its memory": (
        "import gc\nfor one in gc.get_objects():\n"
        "    if isinstance(one, list) and one and 'assert' in str(one[0])[:9]: one.clear()\n"
        + WRONG,
        {"wrong"},
    ),
    "claims results of its own": (
        WRONG + "import os\nfor n in range(3, 20):\n"
        "    try: os.write(n, b'{\"result\": [0, \"pass\", \"\"]}\\n{\"done\": 3}\\n')\n"
        "    except OSError: pass",
        {"violation"},
    ),
    "no such function": ("def sub(a, b): return a - b", {"runtime-error"}),
    "loops": ("def add(a, b):\n    while True: pass", {"timeout"}),
}  # fmt: skip
