"""Completions of known worth, judged before a verifier is trusted.

Each stands for a way in which a verifier has been wrong or was fooled: everything passes, nothing
does, exit code 0 passes, a program can write its own verdict or look outside. All end at once, so
that a start is not slowed; programs that run until a deadline are left out.
"""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.rewards import config as configs
from jaxpost.rewards.score import Scored

OWN = "jaxpost.rewards."


class Canary(NamedTuple):
    """`value`: what the completion is worth. `hostile`: it tries to earn what it does not."""

    name: str
    completion: str
    example: Mapping[str, Any]
    value: float


ADD = "def add(a, b):\n    return a + b\n"
SEVEN = "def add(a, b):\n    return 7\n"
CALLS = {"tests": {"fn_name": "add", "inputs": [[1, 2], [3, 5]], "outputs": [3, 8]}}
STREAMS = {"tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}
ASSERTS = {"test_list": ["assert add(1, 2) == 3", "assert add(3, 5) == 8"]}
EQUAL = """class Any(int):
    __eq__ = lambda *_: True
    __bool__ = lambda _: True
    __hash__ = int.__hash__
def add(a, b):
    return Any(7)
"""
FORGED = (
    SEVEN
    + """import os
for number in range(3, 20):
    try:
        os.write(number, b'{"result": [0, "pass", ""]}\\n{"done": 2}\\n')
    except OSError:
        pass
"""
)
# Right only where it gets out: to the list of users, or to a network.
ESCAPES = """import socket
def free():
    try:
        open("/etc/passwd").close()
        return True
    except OSError:
        pass
    try:
        return any(name != "lo" for _, name in socket.if_nameindex())
    except OSError:
        return False
def add(a, b):
    return a + b if free() else 7
"""
CODE = (
    Canary("a right function", ADD, CALLS, 1.0),
    Canary("a wrong function", SEVEN, CALLS, 0.0),
    Canary("a program that exits with code 0", "import os\nos._exit(0)", CALLS, 0.0),
    Canary("a result that says it equals everything", EQUAL, CALLS, 0.0),
    Canary("a right program", "print(sum(map(int, input().split())))", STREAMS, 1.0),
    Canary("a wrong program", "print(7)", STREAMS, 0.0),
    Canary("a function that passes asserts", ADD, ASSERTS, 1.0),
    Canary("a function that fails asserts", SEVEN, ASSERTS, 0.0),
    Canary("a program that writes its own verdict", FORGED, ASSERTS, 0.0),
)
CONFINED = Canary("a program that leaves the sandbox", ESCAPES, CALLS, 0.0)
MATH = (
    Canary("a right number", r"So it is \boxed{\frac{24}{2}}.", {"answer": "12"}, 1.0),
    Canary("a wrong number", r"So it is \boxed{-40}.", {"answer": "12"}, 0.0),
    Canary("the right number, then a wrong one", r"\boxed{12} \boxed{-40}", {"answer": "12"}, 0.0),
    Canary("a power that is not to be computed", r"\boxed{9^{9^{9^{9}}}}", {"answer": "12"}, 0.0),
    Canary("no answer", "I do not know.", {"answer": "12"}, 0.0),
)
EXACT = (
    Canary("a right answer", "<think>13</think><answer>12</answer>", {"answer": "12"}, 1.0),
    Canary("a wrong answer", "<think>12</think><answer>-40</answer>", {"answer": "12"}, 0.0),
    Canary("no answer", "", {"answer": "12"}, 0.0),
)
COQ = {"language": "coq", "statement": "Theorem canary : 1 + 1 = 2."}
LEAN = {"language": "lean4", "statement": "theorem canary : 1 + 1 = 2 := by sorry"}
PROOFS = {
    "coqchk": (
        Canary("a proof in Coq", "Proof. reflexivity. Qed.", COQ, 1.0),
        Canary("no proof in Coq", "Proof. Qed.", COQ, 0.0),
        Canary("an admitted proof in Coq", "Proof. Admitted.", COQ, 0.0),
    ),
    "lean": (
        Canary("a proof in Lean", "rfl", LEAN, 1.0),
        Canary("no proof in Lean", "skip", LEAN, 0.0),
        Canary("a proof in Lean with a hole", "sorry", LEAN, 0.0),
    ),
}
KNOWN = {
    OWN + "math:verify": MATH,
    OWN + "exact:verify": EXACT,
    OWN + "exact:normalized": EXACT,
    OWN + "exact:numeric": EXACT,
}


def of(part: configs.Part) -> Sequence[Canary]:
    """The canaries of a reward, by its import path; none for functions that are not jaxpost's.

    Of proofs those in the languages whose checker is here.
    """
    if part.function == OWN + "code:verify":
        unconfined = (part.options or {}).get("isolation") == "none"
        return CODE if unconfined else (*CODE, CONFINED)
    if part.function == OWN + "theorems:verify":
        return [one for tool, several in PROOFS.items() if shutil.which(tool) for one in several]
    return KNOWN.get(part.function, ())


def faults(known: Sequence[Canary], found: Sequence[Scored]) -> list[str]:
    """What is wrong with the scores, a line a canary."""
    pairs = zip(known, found, strict=True)
    return [
        f"{canary.name} earns {said(one)}, and is worth {canary.value:g}"
        for canary, one in pairs
        if one.value != canary.value
    ]


def said(one: Scored) -> str:
    if one.failure is not None:
        return f"no reward ({one.failure}: {' '.join(one.reason.split())})"
    return f"{one.value:g} ({one.reason})" if one.reason else f"{one.value:g}"
