"""From a completion and a row to a score: extract the program, run the tests, count what passed."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import sandbox, score, spans
from jaxpost.rewards.code import judge, tests

LONGEST = 200_000  # characters of a program


def verify(
    completion: str,
    example: Mapping[str, Any],
    *,
    seconds: float = 10.0,
    memory_mb: int = 512,
    isolation: str | None = None,
) -> score.Score:
    """1 when every test of the row passes, else 0; the part "passed" is the fraction that did.

    The program is the last fenced block after the thought, else all of it; a row with an
    `entry_point` that the program does not define is HumanEval's, and its prompt goes before it.
    `reason` is the first failing test's: see judge.Verdict. Tests that cannot be read or run are
    the row's fault: None. Raises score.InfrastructureError when the sandbox is at fault.
    `isolation`: None takes the strongest, "none" runs unconfined.
    """
    limits = dataclasses.replace(sandbox.DEFAULT, seconds=seconds, memory=memory_mb << 20)
    try:
        asked = tests.read(example)
    except (ValueError, TypeError, SyntaxError) as error:
        return score.Score(None, reason=f"unparsable tests: {error}"[:200])
    source = program(completion, example)
    if not source.strip():
        return score.Score(0.0, {"passed": 0.0}, "no-code")
    if len(source) > LONGEST:
        return score.Score(0.0, {"passed": 0.0}, "too-long")
    try:
        verdicts = judge.judge(source, asked, limits, isolation)
    except sandbox.RefusedError as error:
        raise score.InfrastructureError(str(error)) from error
    except ValueError as error:
        return score.Score(None, reason=f"unparsable tests: {error}"[:200])
    reasons = [verdict.reason for verdict in verdicts]
    passed = reasons.count("pass") / len(reasons)
    first = next((reason for reason in reasons if reason != "pass"), "pass")
    return score.Score(float(first == "pass"), {"passed": passed}, first)


def program(completion: str, example: Mapping[str, Any]) -> str:
    """The code of a completion; HumanEval's continues the prompt."""
    said = spans.spoken(completion)
    blocks = spans.fenced(said)
    source = blocks[-1] if blocks else said
    entry, prompt = example.get("entry_point"), example.get("prompt")
    if isinstance(entry, str) and isinstance(prompt, str) and tests.compiles(prompt):
        continues = f"def {entry}(" not in source
        return prompt + source if continues else f"{prompt}\n    pass\n\n{source}"
    return source
