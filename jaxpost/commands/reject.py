"""`jaxpost reject MODEL DATA OUT`: completions that pass, as rows to fine-tune on, and pairs."""

import argparse
import collections
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxpost.commands import choosing_usage
from jaxpost.commands.arguments import Parser
from jaxpost.commands.candidates import file, sources
from jaxpost.commands.candidates.judging import Asked, Candidates
from jaxpost.runs import disk

REASONS = {
    "no_reward": "could not be judged, or has no score",
    "cut_off": "ended because it was long, so it has no end to learn",
    "empty": "no words",
    "below": "its reward is under --least",
    "duplicate": "the same text as another of its prompt",
    "over_cap": "--keep better ones of its prompt are kept",
}
NO_PAIR = {
    "no_chosen": "no completion passes",
    "no_rejected": "no other text that is worse",
    "within_margin": "the scores of best and worst are not apart by more than --margin",
}


class Sorted(NamedTuple):
    """The completions of a prompt, by their numbers, the best first.

    Attributes:
      kept: those that pass, each text once.
      failed: those that are whole and do not pass.
      reasons: of what is left out, one each.
    """

    kept: Sequence[int]
    failed: Sequence[int]
    reasons: Sequence[str]


def main(argv: Sequence[str]) -> int:
    """Writes what passes."""
    parser = choosing_usage.reject()
    options = parser.parse_intermixed_args(argv)
    check(parser, options)
    out = Path(options.out).expanduser()
    if options.samples is None:
        options.samples = str(out.with_suffix(".samples.jsonl"))
    source = sources.source_of(options)
    scored = source.settings.scorer is not None
    found = file.gathered(source, options)
    chosen = [sorted_out(one, options.least, options.keep) for one in found]
    count = sum(len(one.texts) for one in found)
    reasons = collections.Counter(reason for each in chosen for reason in each.reasons)
    tell(f"left out of {count} completions", reasons, REASONS)
    none = sum(not each.kept for each in chosen)
    print(f"{none} of {len(found)} prompts have no completion that is kept")
    rows = [
        row_of(one, number, scored)
        for one, each in zip(found, chosen, strict=True)
        for number in each.kept
    ]
    write(out, rows, f"rows of {len(found) - none} prompts")
    if options.pairs is not None:
        write_pairs(options, found, chosen)
    return 0


def check(parser: Parser, options: argparse.Namespace) -> None:
    """Refuses what would keep everything, or write over something. Raises ConfigError."""
    if options.least is None and options.keep is None:
        parser.error("say what passes: --least REWARD, or --keep K for the best of each prompt")
    if options.margin is not None and options.pairs is None:
        parser.error("--margin is of --pairs")
    targets = [Path(path).expanduser() for path in (options.out, options.pairs) if path is not None]
    kept = [] if options.samples is None else [Path(options.samples).expanduser()]
    names = [path.resolve() for path in (*targets, *kept)]
    if len(set(names)) < len(names):
        parser.error("OUT, --pairs and --samples are different files")
    for path in targets:
        if path.suffix != ".jsonl":
            parser.error(f"{path}: rows are written as JSON lines; call it {path.stem}.jsonl")
        if not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}; make it first")
        if path.resolve() in {Path(given).resolve() for given in (options.model, options.data)}:
            parser.error(f"{path} is what is read; choose another name")
        if path.exists() and not options.overwrite:
            parser.error(f"{path} exists; choose another name, or give --overwrite")


# What passes -----------------------------------------------------------------------------------


def sorted_out(one: Candidates, least: float | None, keep: int | None) -> Sorted:
    """Which completions are kept, and why the others are not; of equals the first is better."""
    order = sorted(range(len(one.texts)), key=lambda number: rank(one, number))
    kept: list[int] = []
    failed: list[int] = []
    reasons: list[str] = []
    seen: set[str] = set()
    for number in order:
        reason = unfit(one, number)
        if reason is None and least is not None and one.rewards[number] < least:
            reason = "below"
            failed.append(number)
        text = one.texts[number].strip()
        if reason is None and text in seen:
            reason = "duplicate"
        if reason is None:
            seen.add(text)
            if keep is None or len(kept) < keep:
                kept.append(number)
            else:
                reason = "over_cap"
                failed += [] if least is not None else [number]
        reasons += [] if reason is None else [reason]
    return Sorted(kept, failed, reasons)


def rank(one: Candidates, number: int) -> tuple[float, int]:
    """Sorts the highest score first, what has none last."""
    score = one.scores[number]
    return (math.inf if math.isnan(score) else -score, number)


def unfit(one: Candidates, number: int) -> str | None:
    """Why a completion is not trained on, whatever its reward."""
    if one.reasons[number]:
        return "no_reward"
    if one.cut[number]:
        return "cut_off"
    return None if one.texts[number].strip() else "empty"


def tell(title: str, counted: collections.Counter[str], said: Mapping[str, str]) -> None:
    """A line for each reason."""
    print(f"{title}: {counted.total()}")
    for reason, count in counted.most_common():
        print(f"  {count} {reason}: {said[reason]}")


# Rows ------------------------------------------------------------------------------------------


def row_of(one: Candidates, number: int, scored: bool) -> dict[str, Any]:
    """A row that fine-tuning reads, of one completion."""
    text = one.texts[number]
    score = {"score": float(one.scores[number])} if scored else {}
    return {
        **prompt_of(one.asked),
        "completion": said(one.asked, text),
        "reward": float(one.rewards[number]),
        **score,
        "copies": sum(other.strip() == text.strip() for other in one.texts),
    }


def prompt_of(asked: Asked) -> dict[str, Any]:
    """The prompt, and what else its chat template reads."""
    row = asked.row
    extras = {"tools": row.tools, "chat_template_kwargs": row.template_kwargs}
    return {"prompt": row.prompt, **{name: value for name, value in extras.items() if value}}


def said(asked: Asked, text: str) -> Any:
    """A completion in the form of its prompt: text, or an assistant's message."""
    return text if isinstance(asked.row.prompt, str) else [{"role": "assistant", "content": text}]


def write(path: Path, rows: Sequence[Mapping[str, Any]], what: str) -> None:
    """All rows or, with an error, none."""
    if not rows:
        raise ValueError(f"nothing is left, and {path} is not written; lower what is asked")
    disk.write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"wrote {len(rows)} {what} to {path}")


# Pairs -----------------------------------------------------------------------------------------


def write_pairs(
    options: argparse.Namespace, found: Sequence[Candidates], chosen: Sequence[Sorted]
) -> None:
    """The pairs of --pairs, and why some prompts have none."""
    rows: list[dict[str, Any]] = []
    reasons: collections.Counter[str] = collections.Counter()
    for one, each in zip(found, chosen, strict=True):
        pair = pair_of(one, each, options.least, options.margin or 0.0)
        if isinstance(pair, str):
            reasons[pair] += 1
        else:
            rows.append(pair)
    tell("prompts without a pair", reasons, NO_PAIR)
    write(Path(options.pairs).expanduser(), rows, "pairs")


def pair_of(
    one: Candidates, each: Sorted, least: float | None, margin: float
) -> dict[str, Any] | str:
    """The best completion that passes against the worst that does not, or why there is no pair."""
    if not each.kept:
        return "no_chosen"
    best, others = (
        each.kept[0],
        each.failed if least is not None else [*each.kept[1:], *each.failed],
    )
    others = [number for number in others if one.texts[number].strip() != one.texts[best].strip()]
    if not others:
        return "no_rejected"
    worst = min(others, key=lambda number: (one.scores[number], number))
    if one.scores[best] - one.scores[worst] <= margin:
        return "within_margin"
    return {
        **prompt_of(one.asked),
        "chosen": said(one.asked, one.texts[best]),
        "rejected": said(one.asked, one.texts[worst]),
        "score_chosen": float(one.scores[best]),
        "score_rejected": float(one.scores[worst]),
    }
