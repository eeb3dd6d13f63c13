"""Which answers never reach a reasoning-gym scorer: those that it would run, or choke on."""

import fractions
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxpost.rewards import formulas

Entry = Mapping[str, Any]

LONGEST = 2_000  # characters of an answer, or four times those of the entry's own
NAN = re.compile(r"\bnan\b", re.IGNORECASE)  # no comparison with it fails: some scorers take it
CIRCULAR = ("sin", "cos", "tan", "sec", "csc", "cot")
FUNCTIONS = frozenset(
    (
        "exp",
        "log",
        "sqrt",
        "Abs",
        *(f"{a}{name}{h}" for name in CIRCULAR for a in ("", "a") for h in ("", "h")),
    )
)


def refuses(dataset: str, said: str, entry: Entry) -> str | None:
    """Why an answer is not shown to the scorer ("too_long", "refused", "wrong"), or None."""
    own = entry["answer"] or ""
    if own and said == own:
        return None
    if len(said) > max(LONGEST, 4 * len(own)):
        return "too_long"
    if NAN.search(said) and not NAN.search(own):
        return "refused"
    return SCREENS[dataset](said, entry) if dataset in SCREENS else None


def arithmetic(said: str, entry: Entry) -> str | None:
    return "refused" if formulas.refuses(said) else None


def puzzle(said: str, entry: Entry) -> str | None:
    """Arithmetic on the puzzle's own numbers, each once."""
    if formulas.refuses(said):
        return "refused"
    used = sorted(map(int, re.findall(r"\d+", said)))
    return None if used == sorted(entry["metadata"]["numbers"]) else "wrong"


def polynomial(said: str, entry: Entry) -> str | None:
    return "refused" if formulas.refuses(said, {"a-z"}) else None


def integral(said: str, entry: Entry) -> str | None:
    names = {entry["metadata"]["variable"], "C", "E", "pi"}
    return "refused" if formulas.refuses(said, names, FUNCTIONS) else None


def roots(said: str, entry: Entry) -> str | None:
    """Of an equation without any, only the empty answer (or a pair of quotes) is right."""
    return "wrong" if not entry["answer"] and said not in ("", '""', "''") else None


def literal(said: str, entry: Entry) -> str | None:
    """Words and numbers do nothing when they are run; else it must be a Python literal."""
    plain = re.fullmatch(r"[\w\s.,-]*", said) or formulas.is_literal(said)
    return None if plain else "refused"


def probability(said: str, entry: Entry) -> str | None:
    """Within 1e-4, as a decimal or a fraction; the scorer gives 1 to a matching first digit."""
    if not re.fullmatch(r"\d{0,9}(\.\d{0,30}|/\d{1,9})?", said):
        return "unparsable"
    try:
        distance = fractions.Fraction(said) - fractions.Fraction(entry["answer"])
    except (ValueError, ZeroDivisionError):
        return "unparsable"
    return "wrong" if abs(distance) > 1e-4 else None


def truth(said: str, entry: Entry) -> str | None:
    """The scorer takes any text for True, "False" too."""
    return "wrong" if said.casefold() != entry["answer"].casefold() else None


def short(digits: str) -> Callable[[str, Entry], str | None]:
    """A repeat with that many digits is a size, not a move."""
    return lambda said, entry: "refused" if re.search(digits, said) else None


SCREENS: Mapping[str, Callable[[str, Entry], str | None]] = {
    "binary_matrix": literal,
    "n_queens": literal,
    "spiral_matrix": literal,
    "string_insertion": literal,
    "countdown": arithmetic,
    "puzzle24": puzzle,
    "polynomial_multiplication": polynomial,
    "simple_integration": integral,
    "intermediate_integration": integral,
    "polynomial_equations": roots,
    "coin_flip": probability,
    "game_of_life_halting": truth,
    "rubiks_cube": short(r"\d{3}"),
    "rush_hour": short(r"\d{2}"),
}
