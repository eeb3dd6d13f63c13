"""Proofs, checked by the proof assistant itself as a process of its own.

    theorems.verify(completion, {"language": "coq", "statement": "Theorem t : 1 + 1 = 2."})

The completion's last fenced block (or `<answer>`, or all of it) is a whole file that holds the
statement byte for byte, helper lemmas around it, or only what follows the statement. A proof counts
when the checker accepts it, for the very type that the statement has where the completion was never
read, from no axiom but those that the header's libraries bring. What it then depends on the checker
is asked, not the text; the text is screened besides, for holes, axioms, and commands that switch
checks off or reach beyond the proof.
"""

from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import score
from jaxpost.rewards.theorems import coq, lean, process

LANGUAGES = {"coq": coq.verify, "rocq": coq.verify, "lean": lean.verify, "lean4": lean.verify}


def verify(
    completion: str, example: Mapping[str, Any], *, seconds: float = process.SECONDS
) -> score.Score:
    """1 for a proof, 0 for none; None where the statement itself does not compile.

    Raises score.InfrastructureError without the checker, or where its box fails.

    `example`: `statement` (or `formal_statement`), `header` (imports; may be left out), `language`
    (coq, lean4; lean4 where it is left out). `seconds`: the checker's deadline; at it, 0 (so
    `reward.deadline`, at which a worker is masked, must be longer).
    """
    language = str(example.get("language") or "lean4").lower()
    if language not in LANGUAGES:
        raise ValueError(f"language is {language}; use one of {', '.join(LANGUAGES)}")
    return LANGUAGES[language](completion, example, seconds=seconds)
