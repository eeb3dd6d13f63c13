"""`jaxpost pairs KIND SESSIONS OUT`: sessions and answers in steps to preference pairs."""

import argparse
import collections
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpost.commands import pairs_usage
from jaxpost.data import trajectories
from jaxpost.data.rows import Dropped, Note
from jaxpost.data.trajectories import groups, pairs, sessions, steps
from jaxpost.runs import disk

SHOWN = 3  # places of each reason


def main(argv: Sequence[str]) -> int:
    """Writes the pairs of one kind."""
    parser = pairs_usage.parser()
    options = parser.parse_args(argv)
    pairs_usage.refuse_others(parser, options)
    out = Path(options.out).expanduser()
    check_target(parser, out, options)
    build = of_answers if options.kind in ("step", "labels") else of_sessions
    told: list[Dropped | Note] = []
    lines = [json.dumps(row, ensure_ascii=False) for row in rows_of(build(options), told)]
    for line in summary(told):
        print(line)
    what = "rows" if options.kind == "labels" else "pairs"
    if not lines:
        raise ValueError(f"{options.sessions}: no {options.kind} {what}; {out} is not written")
    disk.write(out, "".join(f"{line}\n" for line in lines))
    print(f"wrote {len(lines)} {options.kind} {what} to {out}")
    return 0


def check_target(parser: pairs_usage.Parser, out: Path, options: argparse.Namespace) -> None:
    """Refuses to write over what is there, or where no recipe would read it."""
    if out.suffix != ".jsonl":
        parser.error(f"{out}: OUT is written as JSON lines; call it {out.stem}.jsonl")
    if out.exists() and (
        not options.overwrite or out.samefile(Path(options.sessions).expanduser())
    ):
        parser.error(f"{out} exists; choose another OUT, or give --overwrite (never of SESSIONS)")
    if not out.parent.is_dir():
        parser.error(f"{out}: there is no folder {out.parent}; make it first")


def rows_of(found: Iterable[Any], told: list[Dropped | Note]) -> Iterator[dict[str, Any]]:
    """The rows; what was left out or noted goes to `told`."""
    for one in found:
        if isinstance(one, Dropped | Note):
            told.append(one)
        else:
            yield one.row() if isinstance(one, pairs.Pair) else one


def of_sessions(options: argparse.Namespace) -> Iterator[Any]:
    """What becomes of sessions."""
    found = list(sessions.read(options.sessions, sessions.SESSIONS, drop=drops(options)))
    yield from (one for one in found if isinstance(one, Dropped))
    for task in sessions.by_task(one for one in found if not isinstance(one, Dropped)):
        yield from of_task(task, options)


def of_task(task: Sequence[sessions.Session], options: argparse.Namespace) -> Iterator[Any]:
    """What becomes of the sessions of one task."""
    least = -math.inf if options.least is None else options.least
    if options.kind == "trajectory":
        return pairs.trajectory_pairs(task, least=least, worst=options.worst, whole=options.whole)
    if options.kind == "suffix":
        return pairs.suffix_pairs(task, least=least)
    if options.kind == "segment":
        return pairs.segment_pairs(task)
    return groups.group_pairs(
        task,
        lambda expert: first_turns(expert, options),
        least=least,
        lengths=options.lengths or groups.LENGTHS,
        difficulties=options.difficulties or groups.DIFFICULTIES,
        last_phase=options.phase or 3,
    )


def first_turns(expert: sessions.Session, options: argparse.Namespace) -> Sequence[int]:
    """Where --cut cuts."""
    count, size = len(expert.turns), options.size or 3
    if options.cut == "number":
        return groups.fixed_number(count, size)
    if options.cut in (None, "size"):
        return groups.fixed_size(count, size)
    name = "groups" if options.cut == "column" else "entropies"
    given = expert.groups if options.cut == "column" else expert.entropies
    if given is None:
        raise ValueError(f"{expert.where}: no column {name}, which --cut {options.cut} reads")
    if options.cut == "column":
        return list(map(int, given))
    return groups.by_entropy(given, 80 if options.percentile is None else options.percentile)


def of_answers(options: argparse.Namespace) -> Iterator[Any]:
    """What becomes of answers in steps."""
    separator = unescaped("\\n" if options.separator is None else options.separator)
    whole: list[sessions.Answer] = []
    for one in sessions.read(options.sessions, sessions.ANSWERS, drop=drops(options)):
        if isinstance(one, Dropped):
            yield one
            continue
        answer, notes = steps.in_steps(one, separator)
        whole.append(answer)
        yield from notes
    if options.kind == "labels":
        for answer in whole:
            yield from steps.labelled(answer, separator, soft=options.soft, escape=options.escape)
        return
    for task in sessions.by_task(whole):
        yield from steps.step_pairs(task, separator)


def unescaped(text: str) -> str:
    r"""Text in which \n and \t are written out, as shells pass them on."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def drops(options: argparse.Namespace) -> bool:
    """Whether bad rows are left out."""
    return options.malformed == "drop"


def summary(told: Sequence[Dropped | Note]) -> list[str]:
    """A line a reason: how many, what it means, and the first places."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    for one in told:
        found[one.reason].append(one.where)
    lines = []
    for reason, places in sorted(found.items(), key=lambda item: -len(item[1])):
        said = trajectories.REASONS.get(reason) or trajectories.NOTES[reason]
        shown = list(dict.fromkeys(places))
        more = ", …" if len(shown) > SHOWN else ""
        kind = "left out" if reason in trajectories.REASONS else "noted"
        lines.append(f"{kind}: {len(places)} {reason}: {said} ({', '.join(shown[:SHOWN])}{more})")
    return lines
