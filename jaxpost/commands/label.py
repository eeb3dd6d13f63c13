"""`jaxpost label MODEL DATA OUT [key=value ...]`: labels of steps, from completions after each."""

import argparse
import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpost import config as configs
from jaxpost.commands import compile_cache, inputs, label_usage, labelling, models, pairs
from jaxpost.commands.arguments import Parser
from jaxpost.commands.candidates import file, judging, sources
from jaxpost.commands.candidates.judging import Asked
from jaxpost.commands.labelling import Labelled, Solution
from jaxpost.data.rows import Dropped
from jaxpost.data.trajectories import steps
from jaxpost.recipes import setup


def main(argv: Sequence[str]) -> int:
    """Writes the rows, and says what came of the steps."""
    parser = label_usage.parser()
    options = parser.parse_intermixed_args(argv)
    out = Path(options.out).expanduser()
    check(parser, out, options)
    inputs.check_data(options.data, "DATA")
    separator = pairs.unescaped(options.separator)
    compile_cache.use_compile_cache()
    opened = models.open_model(
        options.model, step=options.step, dtype=options.dtype, adapter=options.adapter
    )
    source = sources.from_model(opened, options)
    if source.settings.scorer is not None:
        raise configs.ConfigError("scorer chooses among completions, and none is chosen; remove it")
    policy = setup.Policy(opened.model, opened.params, opened.tokenizer, None)
    solutions, dropped = read(source.asked, separator, options)
    correct = source.correct if options.correct is None else options.correct
    how = {"correct": correct, "separator": separator, "soft": options.soft}
    settings = {**file.settings_of(source), **how, "escape": options.escape}
    kind = file.Kind(settings, check_row, "row of labelled steps", "--overwrite begins anew")
    asked = [one.asked for one in solutions]
    with (
        judging.judges_of(source.settings) as (scorer,),
        file.continued(begun(out, options), asked, kind) as (kept, write),
    ):
        rows = [row for _, row in kept]
        done = {row["row"] for row in rows}
        left = [one for one in solutions if one.asked.prompt.row not in done]
        for found in labelling.labelled(
            policy,
            left,
            scorer,
            source.settings.rollout,
            source.settings.seed,
            correct,
            options.batch_size or sources.BATCH_SIZE,
        ):
            new = [(one.solution.asked, row_of(one, separator, options)) for one in found]
            write(new)
            rows += [row for _, row in new]
    print("\n".join(summary(rows, dropped)))
    print(f"wrote {len(rows)} rows to {out}")
    return 0


def begun(out: Path, options: argparse.Namespace) -> Path:
    """OUT, made empty where it is to be written anew."""
    if options.overwrite:
        out.unlink(missing_ok=True)
    return out


def check(parser: Parser, out: Path, options: argparse.Namespace) -> None:
    """Refuses an OUT that no recipe would read, or that is what is read. Raises ConfigError."""
    if out.suffix != ".jsonl":
        parser.error(f"{out}: rows are written as JSON lines; call it {out.stem}.jsonl")
    if not out.parent.is_dir():
        parser.error(f"{out}: there is no folder {out.parent}; make it first")
    if out.resolve() in {Path(given).resolve() for given in (options.model, options.data)}:
        parser.error(f"{out} is what is read; choose another name")
    if not options.separator:
        parser.error("--separator is empty; give what is between steps")


def read(
    asked: Sequence[Asked], separator: str, options: argparse.Namespace
) -> tuple[list[Solution], list[Dropped]]:
    """The solutions, and those without a step. Raises ConfigError."""
    try:
        found = [labelling.solution_of(one, separator) for one in asked]
        for one in found:
            if isinstance(one, Solution):
                escaped(one, separator, options)
    except ValueError as error:
        raise configs.ConfigError(f"DATA, {error}") from error
    solutions = [one for one in found if isinstance(one, Solution)]
    if not solutions:
        raise configs.ConfigError(f"DATA, {options.data}: no solution has a step")
    return solutions, [one for one in found if isinstance(one, Dropped)]


def escaped(solution: Solution, separator: str, options: argparse.Namespace) -> list[str]:
    """Its steps without the separator in them."""
    try:
        return [steps.escaped(one, separator, options.escape) for one in solution.steps]
    except ValueError as error:
        raise ValueError(f"{solution.asked.row.where}: {error}") from error


def check_row(row: Mapping[str, Any]) -> None:
    """Refuses a row that has not one label, and one list of outcomes, a step."""
    if {len(row[name]) for name in ("labels", "rollouts")} != {len(row["steps"])}:
        raise ValueError("lists of other lengths")
    if not all(isinstance(row[name], int) for name in ("cut", "no_room")):
        raise ValueError("counts that are none")
    collections.Counter(row["unjudged"])


def row_of(one: Labelled, separator: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of a solution: its labels, and what they were made of."""
    labels = [steps.monte_carlo(each or (), soft=options.soft) for each in one.outcomes]
    if one.solution.finished:
        labels[-1] = None if one.correct is None else float(one.correct)
    row = one.solution.asked.row
    extras = {"tools": row.tools, "chat_template_kwargs": row.template_kwargs}
    said = escaped(one.solution, separator, options)
    return {
        **{name: value for name, value in extras.items() if value},
        "steps": said,
        "labels": labels,
        "rollouts": [None if each is None else list(each) for each in one.outcomes],
        "correct": one.correct,
        "unjudged": one.unjudged,
        "cut": one.cut,
        "no_room": one.no_room,
        "escaped": sum(new != old for new, old in zip(said, one.solution.steps, strict=True)),
    }


def summary(rows: Sequence[Mapping[str, Any]], dropped: Sequence[Dropped]) -> list[str]:
    """What came of all steps, those of an earlier command too, and what was left out."""
    labels = [label for row in rows for label in row["labels"]]
    known = [label for label in labels if label is not None]
    right = sum(label >= 0.5 for label in known)
    lines = [f"{len(labels)} steps, of which {right} are right and {len(known) - right} wrong"]
    missing = len(labels) - len(known)
    no_room = sum(row["no_room"] for row in rows)
    if missing:
        lines.append(
            f"{missing} steps without a label: {no_room} after which there is no room for a "
            f"completion, {missing - no_room} of which nothing could be judged"
        )
    unjudged = sum((collections.Counter(row["unjudged"]) for row in rows), collections.Counter())
    judged = sum(len(each or ()) for row in rows for each in row["rollouts"])
    judged += sum(row["correct"] is not None for row in rows)
    if unjudged:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(unjudged.items()))
        total = unjudged.total()
        lines.append(f"{total} of {judged + total} completions could not be judged: {kinds}")
    if cut := sum(row["cut"] for row in rows):
        lines.append(f"{cut} completions ended because they were long")
    if changed := sum(row["escaped"] for row in rows):
        lines.append(f"{changed} steps hold the separator, which is escaped in them")
    if dropped:
        lines.append(f"left out: {len(dropped)} rows without a step ({dropped[0].where}, …)")
    return lines
