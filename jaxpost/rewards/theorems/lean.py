"""Lean 4: the proof must have the reference's type, and stand on the usual axioms only."""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import textwrap
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import score, spans
from jaxpost.rewards.theorems import process, sources

DECLARES = r"\b(?:theorem|lemma|def|abbrev)\s+"
# What leaves the proof: holes, axioms, code that runs while Lean reads it, new syntax (it could
# change how the check below is read), variables (they would stand before the check as well),
# attributes that are not known to be harmless, options that switch checks off.
FORBIDDEN = (
    r"\b(?:sorry|admit|sorryAx|axiom|unsafe|implemented_by|extern|native_decide|initialize|macro"
    r"|macro_rules|syntax|elab|elab_rules|by_elab|run_\w+|notation3?|infix[lr]?|prefix|postfix"
    r"|declare_\w+|binder_predicate|simprocs?|import|dbg_trace|variables?|include|Lean|IO"
    r"|set_option(?!\s+(?:maxHeartbeats|maxRecDepth)\b))\b|#eval|#exit|\beval%|'\"'|\br#*\""
    r"|(?:@|\battribute\s*)\[(?!(?:local )?(?:simp|ext|gcongr|reducible|irreducible)\])"
)
HOLE = re.compile(r"\s*:=\s*(?:by\b)?\s*(?:sorry)?\s*$")
AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})
REFERENCE, CHECKED = "jaxpost_reference", "jaxpost_checked"


def verify(
    completion: str, example: Mapping[str, Any], *, seconds: float = process.SECONDS
) -> score.Score:
    """Needs `lean` on the path, and LEAN_PATH where the header imports more than Lean itself."""
    wanted = HOLE.sub("", sources.statement(example))
    named = re.search(DECLARES + r"([\w.'!?«»]+)", sources.uncommented(wanted, sources.LEAN))
    if named is None:
        raise ValueError(f"no theorem with a name in the statement {wanted!r}")
    name, header = named.group(1), str(example.get("header") or "")
    code = beheaded(spans.code(completion), header)
    word = sources.forbidden(code, FORBIDDEN, sources.LEAN)
    if word:
        return score.Score(0.0, {}, f"forbidden: {word}")
    declares = rf"{DECLARES}{re.escape(name)}(?![\w.'!?])"
    if not re.search(declares, sources.uncommented(code, sources.LEAN)):
        code = code if code.lstrip().startswith((":=", "|")) else f":= by\n{indented(code)}"
    source = sources.joined(code, wanted, declares, sources.LEAN)
    if source is None:
        return score.Score(0.0, {}, "statement changed")
    lean = binary()
    if lean is None:
        raise score.InfrastructureError("no lean on the path; install it with elan")
    return check(lean, compose(header, wanted, name, source), seconds)


def beheaded(code: str, header: str) -> str:
    """A whole file without its header and its own imports: the header is put there anyway."""
    code = code.removeprefix(header.strip())
    return re.sub(r"\A(?:\s*import [\w.]+[ \t]*(?:\n|\Z))+", "", code)


def indented(tactics: str) -> str:
    """What stands after `:= by`, which the statement of a data set often ends with."""
    bare = re.sub(r"\A\s*by\b[ \t]*\n?", "", tactics)
    return textwrap.indent(textwrap.dedent(bare), "  ")


def compose(header: str, wanted: str, name: str, source: str) -> str:
    """The file that Lean reads. The reference stands before the proof, so its meaning is fixed;
    `checked` has the reference's type, whatever the proof called by that name.
    """
    named = DECLARES + re.escape(name)
    reference = re.sub(named, f"theorem _root_.{REFERENCE}", wanted, count=1)
    return (
        f"{header}\n{reference} := by sorry\n\n{source}\n\n"
        f"theorem _root_.{CHECKED} : type_of% @_root_.{REFERENCE} := @{name}\n"
        f"#print axioms _root_.{CHECKED}\n"
    )


def check(lean: str, source: str, seconds: float) -> score.Score:
    """Messages are read with their lines, so nothing that the proof prints is taken for Lean's."""
    libraries = os.environ.get("LEAN_PATH", "")
    outcome = process.run(
        ["env", f"LEAN_PATH={libraries}", lean, "--json", "Proof.lean"],
        {"Proof.lean": source},
        [pathlib.Path(lean).parent.parent, *filter(None, libraries.split(":"))],
        seconds,
    )
    if outcome.kind != "exit" or outcome.returncode:
        return process.ended(outcome) or score.Score(0.0, {}, "wrong")
    lines = outcome.stdout.decode("utf-8", "replace").splitlines()
    messages = [json.loads(line) for line in lines if line.startswith("{")]
    last = source.count("\n")
    printed = [found["data"] for found in messages if found["pos"]["line"] == last]
    if any(found["severity"] == "error" for found in messages) or len(printed) != 1:
        return score.Score(0.0, {}, "wrong")
    if not axioms(printed[0]) <= AXIOMS:
        return score.Score(0.0, {}, "new axioms")
    return score.Score(1.0, {}, "right")


@functools.cache
def binary() -> str | None:
    """The real `lean`: what elan puts on the path only starts it, and needs a home to do so."""
    found = shutil.which("lean")
    if found is None:
        return None
    prefix = subprocess.run([found, "--print-prefix"], capture_output=True, text=True, check=True)
    return str(pathlib.Path(prefix.stdout.strip(), "bin", "lean"))


def axioms(printed: str) -> set[str]:
    """What `#print axioms` lists."""
    if "does not depend on any axioms" in printed:
        return set()
    listed = re.search(r"depends on axioms: \[([^\]]*)\]", printed)
    return {axiom.strip() for axiom in listed.group(1).split(",")} if listed else {printed}
