"""Knights and knaves: knights say the truth, knaves lie.

A statement is ("telling-truth", i), ("lying", i), ("not", s), ("and", s...), ("or", s...),
("->", s, t) or ("<=>", s, t), where i counts the people from 0, as the K&K data and reasoning-gym
write it; person i said statement i.
"""

import ast
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

LONGEST = 20_000  # characters of an answer


class Puzzle(NamedTuple):
    names: tuple[str, ...]
    statements: tuple[Any, ...]
    words: tuple[str, str] = ("knight", "knave")


def puzzle(example: Mapping[str, Any]) -> Puzzle:
    """From the columns `names`, `statements` (nested, or as JSON or Python text), `words`.

    Columns of the row itself, or of `entry`'s or `extra_info`'s. Raises KeyError without them.
    """
    for inner in (example, *(literal(example.get(key)) for key in ("entry", "extra_info"))):
        inner = inner.get("metadata", inner) if isinstance(inner, Mapping) else {}
        if "names" in inner and "statements" in inner:
            names, statements = literal(inner["names"]), literal(inner["statements"])
            return Puzzle(tuple(map(str, names)), tuple(statements), words(inner))
    raise KeyError(f"a puzzle needs the columns names and statements (it has {', '.join(example)})")


def words(row: Mapping[str, Any]) -> tuple[str, str]:
    """What the two are called: `knight_knave` of K&K, `knight_knave_terms` of reasoning-gym."""
    terms = literal(row.get("knight_knave") or row.get("knight_knave_terms") or {})
    knight, knave = terms.get("knight", "knight"), terms.get("knave", "knave")
    return bare(knight), bare(knave)


def bare(term: str) -> str:
    return re.sub(r"^an? ", "", term.strip().lower())


def literal(value: Any) -> Any:
    """JSON or Python text as the value that it writes; what is no text as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return ast.literal_eval(value)


def holds(statement: Sequence[Any], knights: Sequence[bool]) -> bool:
    """Is the statement true where these are knights?"""
    kind, *parts = statement
    if kind in ("telling-truth", "lying"):
        return knights[int(parts[0])] == (kind == "telling-truth")
    truths = [holds(part, knights) for part in parts]
    match kind, truths:
        case "not", [truth]:
            return not truth
        case "and", _:
            return all(truths)
        case "or", _:
            return any(truths)
        case "->", [first, then]:
            return not first or then
        case "<=>", [first, then]:
            return first == then
    raise ValueError(f"a statement of kind {kind!r} with {len(parts)} parts")


def consistent(puzzle: Puzzle, knights: Sequence[bool]) -> bool:
    """Each one's statement is true just where they are a knight."""
    said = (holds(statement, knights) for statement in puzzle.statements)
    return all(truth == knight for truth, knight in zip(said, knights, strict=True))


def solvable(puzzle: Puzzle) -> bool:
    """Up to 16 people all worlds are tried; larger puzzles are taken to have a solution."""
    worlds = itertools.product((False, True), repeat=len(puzzle.names))
    return len(puzzle.names) > 16 or any(consistent(puzzle, world) for world in worlds)


def read(said: str, puzzle: Puzzle) -> list[bool] | None:
    """Who is a knight, by "NAME is a knight"; None unless each is called one thing only."""
    found = []
    kinds = "|".join(map(re.escape, puzzle.words))
    for name in puzzle.names:
        pattern = rf"\b{re.escape(name)}\b\s*(?:is|:|=|-)\s*(?:an?\s+)?\**({kinds})\b"
        called = {kind.lower() for kind in re.findall(pattern, said[:LONGEST], re.IGNORECASE)}
        if len(called) != 1:
            return None
        found.append(called == {puzzle.words[0]})
    return found
