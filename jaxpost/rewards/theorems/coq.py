"""Coq: compile the proof, compare its type, ask for its axioms, recheck it with the kernel."""

import re
import shutil
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import score, spans
from jaxpost.rewards.theorems import process, sources

DECLARES = r"\b(?:Theorem|Lemma|Fact|Remark|Corollary|Proposition|Property|Definition)\s+"
FORBIDDEN = (
    r"\b(?:Admitted|admit|give_up|Axioms?|Parameters?|Conjectures?|Declare|Primitive|Register"
    r"|Redirect|Extraction|Load|Cd|Drop|LoadPath|bypass_check|native_compute|Checking)\b"
)
CLOSED = "Closed under the global context"
CHECK = """Require Job.Reference Job.Submission.
Definition same : ltac:(let t := type of Job.Reference.{name} in exact t) := Job.Submission.{name}.
Print Assumptions same.
"""
# Exit 3: the example's own statement does not compile. The reference is compiled last, so that
# nothing the submission wrote can stand in its place.
SCRIPT = """compile() { coqc -q -R . Job "$1.v"; }
compile Submission >&2; submission=$?
compile Reference >&2 || exit 3
[ $submission = 0 ] || exit 4
compile Check || exit 5
for part in Reference Submission; do
  echo "== $part"
  coqchk -silent -o -norec "Job.$part" -R . Job 2>&1 || exit 6
done
"""


def verify(
    completion: str, example: Mapping[str, Any], *, seconds: float = process.SECONDS
) -> score.Score:
    """Needs `coqc` and `coqchk` on the path. See `theorems.verify`."""
    if not (shutil.which("coqc") and shutil.which("coqchk")):
        return score.Score(None, {}, "infrastructure: no coqc and coqchk (apt-get install coq)")
    statement, header = sources.statement(example), str(example.get("header") or "")
    named = re.search(DECLARES + r"([\w']+)", sources.uncommented(statement, sources.COQ))
    if named is None:
        raise ValueError(f"no Theorem, Lemma, ... with a name in the statement {statement!r}")
    name = named.group(1)
    code = spans.code(completion)
    word = sources.forbidden(code, FORBIDDEN, sources.COQ)
    if word:
        return score.Score(0.0, {}, f"forbidden: {word}")
    declares = rf"{DECLARES}{re.escape(name)}(?![\w'])"
    submission = sources.joined(code, statement, declares, sources.COQ)
    if submission is None:
        return score.Score(0.0, {}, "statement changed")
    files = {
        "Submission.v": f"{header}\n{submission}\n",
        "Reference.v": f"{header}\n{statement}\nAdmitted.\n",
        "Check.v": CHECK.format(name=name),
    }
    return judge(process.run(["sh", "-c", SCRIPT], files, seconds=seconds))


def judge(done: process.Done) -> score.Score:
    if done.code is None:
        return score.Score(0.0, {}, "timeout")
    if done.code == 3:
        return score.Score(None, {}, "infrastructure: the statement itself does not compile")
    if done.code:
        return score.Score(0.0, {}, {4: "wrong", 5: "another statement"}.get(done.code, "refused"))
    assumed, reference, submission = re.split(r"^== \w+\n", done.output, flags=re.MULTILINE)
    allowed, found = axioms(reference), axioms(submission)
    own = [axiom for axiom in found if axiom.startswith("Job.Submission.")]
    if own or not assumptions(assumed) <= known(allowed) or unsafe(submission):
        return score.Score(0.0, {}, "new axioms")
    return score.Score(1.0)


def assumptions(printed: str) -> set[str]:
    """What `Print Assumptions` lists: each begins a line, axioms and switched-off checks alike."""
    if printed.strip() == CLOSED:
        return set()
    lines = [line for line in printed.splitlines() if line and not line[0].isspace()]
    return {line.split()[0].rstrip(":") for line in lines} - {"Axioms"} or {""}


def axioms(summary: str) -> list[str]:
    """What coqchk lists under Axioms, by full name."""
    part = summary.partition("* Axioms:")[2].partition("\n* ")[0]
    return [line.strip() for line in part.splitlines() if "." in line]


def known(full: list[str]) -> set[str]:
    """Each name as Coq may shorten it."""
    ends = (name.split(".")[first:] for name in full for first in range(name.count(".") + 1))
    return {".".join(end) for end in ends}


def unsafe(summary: str) -> bool:
    """A switched-off check of guards, universes or positivity."""
    lines = [line for line in summary.splitlines() if line.startswith("* ")]
    return sum(line.endswith("<none>") for line in lines if "Axioms" not in line) != 3
