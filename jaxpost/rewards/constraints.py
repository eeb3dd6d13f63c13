"""Puzzles as SMT-LIB 2 text, and whether an assignment satisfies them, which z3 decides."""

import fractions
import json
import re
from collections.abc import Mapping
from typing import Any

from jaxpost.rewards import score

try:
    import z3
except ImportError as error:
    raise ImportError("z3-solver is not installed; pip install 'jaxpost[rewards]'") from error

COLUMNS = ("constraints", "smtlib")
LONGEST = 20_000  # characters of an answer
DIGITS = 100  # of a number
LINE = re.compile(r"^[\s*-]*+([^\s=:,]++)\s*(?:=|:|\bis\b)\s*([^\s,;]+?)[.]?\s*$")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:/\d+)?")
TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


def column(example: Mapping[str, Any]) -> str:
    for name in COLUMNS:
        if example.get(name):
            return str(example[name])
    raise KeyError(f"a puzzle needs the column constraints (it has {', '.join(example)})")


def parse(text: str) -> list[Any]:
    """The puzzle's assertions. Raises ValueError with z3's complaint."""
    try:
        found = z3.parse_smt2_string(text)
    except z3.Z3Exception as error:
        raise ValueError(f"the constraints are not SMT-LIB 2: {error}") from error
    return [found[index] for index in range(len(found))]


def read(said: str) -> dict[str, str] | None:
    """The values by name, as text; None without any, or with two for one name."""
    said = said[:LONGEST].strip()
    try:
        written = json.loads(said, object_pairs_hook=list, parse_int=str, parse_float=str)
        pairs = [(name, spelt(value)) for name, value in written]
    except (ValueError, TypeError, RecursionError):
        found = (LINE.match(line) for line in re.split(r"[\n,;]", said))
        pairs = [(match[1], match[2]) for match in found if match]
    values = dict(pairs)
    return values if values and len(values) == len(pairs) else None


def spelt(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def judge(assertions: list[Any], given: Mapping[str, str], seconds: float) -> score.Score:
    assigned = []
    for name, constant in unknowns(assertions).items():
        equal = equality(constant, given[name]) if name in given else None
        if equal is None:
            return score.Score(0.0, {}, "unparsable" if name in given else "incomplete")
        assigned.append(equal)
    found = check([*assertions, *assigned], seconds)
    if found == z3.sat:
        return score.Score(1.0, {}, "right")
    possible = check(assertions, seconds) if found == z3.unsat else z3.unknown
    if possible == z3.sat:
        return score.Score(0.0, {}, "wrong")
    return score.Score(None, {}, "no solution" if possible == z3.unsat else "undecided")


def check(assertions: list[Any], seconds: float) -> Any:
    solver = z3.Solver()
    solver.set("timeout", int(1000 * seconds))
    solver.add(*assertions)
    return solver.check()


def unknowns(assertions: list[Any]) -> dict[str, Any]:
    """The uninterpreted constants in the assertions, by name."""
    found, seen, waiting = {}, set(), list(assertions)
    while waiting:
        node = waiting.pop()
        if node.get_id() in seen:
            continue
        seen.add(node.get_id())
        if z3.is_const(node) and node.decl().kind() == z3.Z3_OP_UNINTERPRETED:
            found[node.decl().name()] = node
        waiting += [node.body()] if z3.is_quantifier(node) else node.children()
    return found


def equality(constant: Any, text: str) -> Any:
    """`constant` = the value that the text writes, or None where it writes none of its sort."""
    sort = constant.sort()
    if sort.kind() == z3.Z3_BOOL_SORT:
        truth = TRUTHS.get(text.lower())
        return None if truth is None else constant == truth
    if sort.kind() in (z3.Z3_INT_SORT, z3.Z3_REAL_SORT):
        return number(constant, text, whole=sort.kind() == z3.Z3_INT_SORT)
    if sort.kind() == z3.Z3_DATATYPE_SORT:
        makers = [sort.constructor(index) for index in range(sort.num_constructors())]
        named = {maker.name().lower(): maker for maker in makers if maker.arity() == 0}
        maker = named.get(text.lower())
        return None if maker is None else constant == maker()
    raise ValueError(f"{constant} is of sort {sort}; use Bool, Int, Real or an enumeration")


def number(constant: Any, text: str, whole: bool) -> Any:
    if len(text) > DIGITS or not NUMBER.fullmatch(text):
        return None
    try:
        value = fractions.Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
    if whole:
        return constant == int(value) if value.denominator == 1 else None
    return constant == z3.Q(value.numerator, value.denominator)
