"""Judged completions in a file, a prompt a line, so that a command that was stopped goes on.

Every line says how its completions were drawn and judged. A command whose settings differ is
refused; the last line is cut where a kill cut it short.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jaxpost import config as configs
from jaxpost import rewards, runs
from jaxpost.commands.candidates import judging
from jaxpost.commands.candidates.judging import Asked, Candidates
from jaxpost.commands.candidates.sources import Source

OF_DRAWING = ("completions", "max_new_tokens", "temperature", "top_k", "top_p", "min_p")
OF_JUDGING = ("function", "options", "weight", "parts", "model", "model_weight", "steps")
BEGINNING = b'{"row": '  # of every line


def gathered(source: Source, options: argparse.Namespace) -> list[Candidates]:
    """All completions, judged, in the order of DATA; with --samples those in the file are kept.

    Raises:
      RunError: the file is of other settings or data, or is no such file.
    """
    with judging.judges_of(source.settings) as judges, opened(source, options) as (found, add):
        left = [asked for asked in source.asked if asked.prompt.row not in found]
        for part in source.parts(left) if left else ():
            new = judging.judged(part, judges)
            add(new)
            found |= {one.asked.prompt.row: one for one in new}
    whole = [found[asked.prompt.row] for asked in source.asked]
    judging.tell_missing(whole)
    return whole


@contextlib.contextmanager
def opened(
    source: Source, options: argparse.Namespace
) -> Iterator[tuple[dict[int, Candidates], Any]]:
    """What the file --samples has by the row of DATA, and what adds to it; without one nothing."""
    if options.samples is None:
        yield {}, lambda new: None
        return
    path = Path(options.samples).expanduser()
    way_out = f"to judge its completions anew, give {path} in MODEL's place"
    kind = Kind(settings_of(source), check_lists, "row of judged completions", way_out)
    with continued(path, source.asked, kind) as (rows, write):
        found = {row["row"]: candidates_of(asked, row) for asked, row in rows}
        yield found, lambda new: write([(one.asked, row_of(one)) for one in new])


class Kind(NamedTuple):
    """Lines of a file.

    Attributes:
      settings: what they depend on.
      check: raises ValueError, KeyError or TypeError for a line that is none.
      name: what a line is.
      way_out: what else one may do with a file of other settings.
    """

    settings: Mapping[str, Any]
    check: Callable[[Mapping[str, Any]], None]
    name: str
    way_out: str


Write = Callable[[Sequence[tuple[Asked, Mapping[str, Any]]]], None]


@contextlib.contextmanager
def continued(
    path: Path, asked: Sequence[Asked], kind: Kind
) -> Iterator[tuple[list[tuple[Asked, dict[str, Any]]], Write]]:
    """The lines of rows that are asked, and what writes further ones.

    Raises:
      RunError: the file is of other settings or data, or is no such file.
    """
    with holding(path) as file:
        found = read(path, file, asked, kind)
        if found:
            print(f"{path}: {len(found)} of {len(asked)} prompts are there", file=sys.stderr)

        def write(rows: Sequence[tuple[Asked, Mapping[str, Any]]]) -> None:
            lines = [json.dumps(line_of(*each, kind), ensure_ascii=False) for each in rows]
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

        try:
            yield found, write
        except KeyboardInterrupt:
            print(f"\n{path} keeps what is done; the same command goes on", file=sys.stderr)
            raise


def line_of(asked: Asked, row: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """A line: of which row of DATA, what there is of it, and what that depends on."""
    first = {"row": asked.prompt.row, "where": asked.row.where, "prompt": asked.row.prompt}
    return {**first, **row, "digest": digest_of(asked), "settings": kind.settings}


@contextlib.contextmanager
def holding(path: Path) -> Iterator[BinaryIO]:
    """The file, open for this process alone. Raises RunError."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise runs.RunError(f"{path}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise runs.RunError(
                f"{path} is being written by another process; wait for it, or name another file"
            ) from error
        except OSError:  # some network file systems cannot; two at once are unlikely
            pass
        yield file


def settings_of(source: Source) -> dict[str, Any]:
    """What completions and their rewards depend on."""
    settings = source.settings
    judges = {name: judge_of(getattr(settings, name)) for name in ("reward", "scorer")}
    identity = source.identity()
    if "model" in identity:
        drawing = {name: getattr(settings.rollout, name) for name in OF_DRAWING}
        identity |= {
            **drawing,
            "stop_strings": list(settings.rollout.stop_strings),
            "cache_dtype": settings.rollout.cache_dtype,
            "template_kwargs": settings.data.template_kwargs,
            "seed": settings.seed,
        }
    return json.loads(json.dumps({**identity, **judges}))


def judge_of(config: rewards.RewardConfig | None) -> Any:
    """What a reward's numbers depend on."""
    if config is None:
        return None
    told = configs.to_dict(config, "reward")
    return {name: told[name] for name in OF_JUDGING if told.get(name) is not None}


def read(
    path: Path, file: BinaryIO, asked: Sequence[Asked], kind: Kind
) -> list[tuple[Asked, dict[str, Any]]]:
    """What the file has of the prompts that are asked. Raises RunError."""
    file.seek(0)
    lines = file.read().split(b"\n")
    cut = lines.pop()
    if not (cut.startswith(BEGINNING) or BEGINNING.startswith(cut)):
        lines.append(cut)  # it is none of ours, which is said below
    known, found = {one.prompt.row: one for one in asked}, []
    for number, line in enumerate(lines, 1):
        row = checked(f"{path}:{number}", path, line, kind)
        one = known.get(row["row"])
        if one is None:
            continue
        if row["digest"] != digest_of(one):
            raise runs.RunError(
                f"{path}:{number}: row {row['row']} of DATA was another ({one.row.where} now); put "
                "the data back, or name another file"
            )
        found.append((one, row))
    file.truncate(sum(len(line) + 1 for line in lines))  # what a kill cut short goes
    return found


def checked(where: str, path: Path, line: bytes, kind: Kind) -> dict[str, Any]:
    """A line's row. Raises RunError if it is none, or was drawn or judged otherwise."""
    try:
        row = json.loads(line)
        old = row["settings"]
        kind.check(row)
        row |= {"row": int(row["row"]), "digest": str(row["digest"])}
    except (ValueError, KeyError, TypeError) as error:
        raise runs.RunError(
            f"{where} is no {kind.name}; name another file, or move this one away"
        ) from error
    changes = runs.config_changes(old, kind.settings)
    if changes:
        said = "\n  ".join(map(str, changes))
        raise runs.RunError(
            f"{path} was made with other settings:\n  {said}\nPut them back, or name another file; "
            f"{kind.way_out}"
        )
    return row


def check_lists(row: Mapping[str, Any]) -> None:
    """Refuses a row whose completions have not one of everything."""
    names = ("cut", "rewards", "scores", "reasons")
    if {len(row[name]) for name in names} != {len(row["completions"])}:
        raise ValueError("lists of other lengths")


def row_of(one: Candidates) -> dict[str, Any]:
    """What is kept of a prompt, which `data.completions` reads too."""
    return {
        "completions": list(one.texts),
        "cut": list(one.cut),
        "rewards": plain(one.rewards),
        "scores": plain(one.scores),
        "reasons": list(one.reasons),
    }


def candidates_of(asked: Asked, row: Mapping[str, Any]) -> Candidates:
    """The inverse of `row_of`."""
    rewards, scores = (
        np.array([math.nan if one is None else one for one in row[name]], float)
        for name in ("rewards", "scores")
    )
    return Candidates(asked, row["completions"], row["cut"], rewards, scores, row["reasons"])


def plain(values: np.ndarray) -> list[float | None]:
    """NaN as null, which JSON has."""
    return [None if math.isnan(value) else float(value) for value in values]


def digest_of(asked: Asked) -> str:
    """Of all that a row of DATA says."""
    row = asked.row
    said = [row.prompt, row.tools, row.template_kwargs, row.meta]
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
