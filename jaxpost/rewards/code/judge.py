"""A program against its tests. What is right stays on this side of the wall; only inputs go in."""

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxpost.rewards import sandbox, score
from jaxpost.rewards.code import compare, tests
from jaxpost.rewards.sandbox.inside import plain

KINDS = {"timeout": "timeout", "memory": "memory", "output": "output-limit"}
SIGSYS = 128 + 31


class Verdict(NamedTuple):
    """Of one test. `reason`: "pass", "wrong", "runtime-error", "timeout", "memory", "output-limit"
    or "violation" (of the protocol, or a forbidden system call).
    """

    reason: str
    message: str = ""


class StopError(Exception):
    """The solution's box is of no more use; the tests that are left get this verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reason)
        self.verdict = verdict


def judge(
    source: str, asked: tests.Tests, limits: sandbox.Limits, level: str | None
) -> list[Verdict]:
    """A verdict for each test; those after one that stopped the program share its verdict.

    Raises score.InfrastructureError when a box failed, ValueError when the tests themselves did.
    """
    if isinstance(asked, tests.Streams):
        return list(streams(source, asked, limits, level))
    if isinstance(asked, tests.Calls):
        return list(calls(source, asked, limits, level))
    return examine(source, asked, limits, level)


def streams(
    source: str, asked: tests.Streams, limits: sandbox.Limits, level: str | None
) -> Iterator[Verdict]:
    """A box for each test. Time is for all: after the first that runs out none is started."""
    stopped = None
    for given, wanted in asked.pairs:
        verdict = stopped or streamed(source, given, wanted, limits, level)
        stopped = verdict if verdict.reason == "timeout" else None
        yield verdict


def streamed(
    source: str, given: str, wanted: str, limits: sandbox.Limits, level: str | None
) -> Verdict:
    room = max(limits.output_bytes, 2 * len(wanted.encode()))
    outcome = sandbox.run(
        ["-m", "inside.script"],
        files={"solution.py": source.encode(errors="replace")},
        stdin=given.encode(),
        limits=dataclasses.replace(limits, output_bytes=room),
        level=level,
    )
    if outcome.kind == "exit" and outcome.returncode == 0:
        right = compare.printed(outcome.stdout.decode(errors="replace"), wanted)
        return Verdict("pass" if right else "wrong")
    return ended(outcome)


def ended(outcome: sandbox.Outcome) -> Verdict:
    """What a program is told that ended where it should not have."""
    said = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300]
    if outcome.kind == "infrastructure":
        raise score.InfrastructureError(f"sandbox: {said}")
    if outcome.kind in KINDS:
        return Verdict(KINDS[outcome.kind])
    if outcome.returncode == SIGSYS:
        return Verdict("violation", "a forbidden system call")
    reason = "memory" if said.startswith("MemoryError") else "runtime-error"
    return Verdict(reason, said or f"ended with code {outcome.returncode}")


class Solution:
    """The program in its box, asked one thing at a time."""

    def __init__(self, source: str, limits: sandbox.Limits, level: str | None) -> None:
        self.box = sandbox.start(["-m", "inside.guest"], limits=limits, level=level)
        self.source = source

    def load(self) -> None:
        answer = self.ask({"run": self.source})
        if "error" in answer:
            raise StopError(failed(answer))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to this request and no other. Raises StopError where there is none."""
        number = secrets.token_hex(8)
        self.box.send(json.dumps({"id": number, **request}).encode() + b"\n")
        line = self.box.line()
        if line is None:
            raise StopError(ended(self.box.finish()))
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict) or answer.get("id") != number or not well_formed(answer):
            raise StopError(Verdict("violation", "a record that is no answer"))
        return answer

    def finish(self) -> None:
        """Nothing may be left to read: what was not asked for is a violation."""
        self.box.close_stdin()
        if self.box.line() is not None or self.box.stdout:
            raise StopError(Verdict("violation", "a record that nobody asked for"))


def well_formed(answer: dict[str, Any]) -> bool:
    if "error" in answer:
        return all(isinstance(answer.get(key), str) for key in ("error", "message"))
    try:
        plain.decode(answer["value"], plain.Opaque)
    except (KeyError, ValueError, TypeError, RecursionError, OverflowError):
        return False
    return True


def failed(answer: dict[str, Any]) -> Verdict:
    reason = "memory" if answer["error"] == "MemoryError" else "runtime-error"
    return Verdict(reason, f"{answer['error']}: {answer['message']}"[:300])


def calls(
    source: str, asked: tests.Calls, limits: sandbox.Limits, level: str | None
) -> list[Verdict]:
    longest = max(len(json.dumps(wanted)) for _, wanted in asked.pairs)
    room = dataclasses.replace(limits, output_bytes=max(limits.output_bytes, 8 * longest))
    solution = Solution(source, room, level)
    verdicts: list[Verdict] = []
    with contextlib.closing(solution.box):
        try:
            solution.load()
            for args, wanted in asked.pairs:
                verdicts.append(called(solution, asked, args, wanted))
            solution.finish()
        except StopError as stop:
            if stop.verdict.reason == "violation":
                verdicts = []
            verdicts += [stop.verdict] * (len(asked.pairs) - len(verdicts))
    return verdicts


def called(solution: Solution, asked: tests.Calls, args: list[Any], wanted: Any) -> Verdict:
    sent = [plain.encode(one, refuse) for one in (args, {})]
    answer = solution.ask({"call": [asked.name, *sent]})
    if "error" in answer:
        return failed(answer)
    said = plain.decode(answer["value"], plain.Opaque)
    right = compare.returned(said, wanted)
    right = right or (asked.boxed and compare.returned(said, wanted[0]))
    return Verdict("pass" if right else "wrong")


def refuse(value: Any) -> int:
    raise ValueError(f"a test passes a {type(value).__name__}, which no sandbox can be given")


def examine(
    source: str, asked: tests.Asserts, limits: sandbox.Limits, level: str | None
) -> list[Verdict]:
    """Two boxes: the tests in one, the solution in the other, each record carried across by us."""
    paper = {"prelude": asked.prelude, "tests": list(asked.statements), "entry": asked.entry}
    outside = dataclasses.replace(limits, seconds=limits.seconds and limits.seconds + 5)
    examiner = sandbox.start(["-m", "inside.examiner"], limits=outside, level=level)
    with contextlib.closing(examiner):
        solution = Solution(source, limits, level)
        with contextlib.closing(solution.box):
            return carry(examiner, solution, paper, len(asked.statements))


def carry(
    examiner: sandbox.Box, solution: Solution, paper: dict[str, Any], total: int
) -> list[Verdict]:
    verdicts: list[Verdict] = []
    try:
        solution.load()
        examiner.send(json.dumps(paper).encode() + b"\n")
        while "done" not in (record := told(examiner)):
            if "result" in record:
                verdicts.append(Verdict(*record["result"][1:]))
                continue
            if "broken" in record:
                raise ValueError(f"the tests do not run: {record['broken']}")
            answer = solution.ask(record["ask"])
            examiner.send(json.dumps(answer).encode() + b"\n")
        solution.finish()
    except StopError as stop:
        if stop.verdict.reason == "violation":
            verdicts = []
        verdicts += [stop.verdict] * max(1, total - len(verdicts))
    return verdicts


def told(examiner: sandbox.Box) -> dict[str, Any]:
    """The examiner's next record; it runs the row's own tests and is believed."""
    line = examiner.line()
    if line is not None:
        return json.loads(line)
    verdict = ended(examiner.finish())
    if verdict.reason == "timeout":
        raise StopError(verdict)
    raise ValueError(f"the tests do not run: {verdict.reason} {verdict.message}")
