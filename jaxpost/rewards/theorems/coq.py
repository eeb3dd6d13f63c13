"""Coq: compile the proof, compare its type, ask for its axioms, recheck it with the kernel."""

import os
import re
import shutil
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import sandbox, score, spans
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
SCRIPT = """compile() { coqc -q -R . Job "$1.v" 2>/dev/null; }
compile Submission >/dev/null; submission=$?
compile Reference >/dev/null || exit 3
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
    if not (shutil.which("coqc") and shutil.which("coqchk")):
        raise score.InfrastructureError("no coqc and coqchk on the path; apt-get install coq")
    files = {
        "Submission.v": f"{header}\n{submission}\n",
        "Reference.v": f"{header}\n{statement}\nAdmitted.\n",
        "Check.v": CHECK.format(name=name),
    }
    return judge(process.run(["sh", "-c", SCRIPT], files, settings(), seconds))


def settings() -> list[str]:
    """What Debian's coqc reads outside of /usr."""
    paths = ("/etc/ocamlfind.conf", "/etc/ocamlfind.conf.d")
    return [path for path in paths if os.path.exists(path)]


def judge(outcome: sandbox.Outcome) -> score.Score:
    unfinished = process.ended(outcome)
    if unfinished:
        return unfinished
    if outcome.returncode == 3:
        return score.Score(None, {}, "the statement itself does not compile")
    if outcome.returncode:
        reason = {4: "wrong", 5: "another statement"}.get(outcome.returncode, "refused")
        return score.Score(0.0, {}, reason)
    printed = outcome.stdout.decode("utf-8", "replace")
    assumed, reference, submission = re.split(r"^== \w+\n", printed, flags=re.MULTILINE)
    own = [axiom for axiom in axioms(submission) if axiom.startswith("Job.Submission.")]
    if own or unsafe(submission) or not assumptions(assumed) <= known(axioms(reference)):
        return score.Score(0.0, {}, "new axioms")
    return score.Score(1.0, {}, "right")


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
