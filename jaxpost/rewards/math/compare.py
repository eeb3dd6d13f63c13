"""Whether two answers are the same; expressions are judged by math-verify.

| what | rule |
|---|---|
| numbers | equal as fractions: 0.5 is 1/2, 0.333 is not 1/3, 0.3333333333 neither |
| where a number is right | it is to be written out: 2+2 is not 4 (`evaluated=False` allows it) |
| percent | `50%` is 0.5, and 50 |
| units | may be left out or added; two different ones are wrong |
| lists, sets | in any order, as often; `a,b` is `{a,b}` |
| tuples, intervals | in order, with these brackets; those of a tuple may be left out |
| `x=5` | is 5; not y=5 |
| `2+3=5` | is 5; `6=5` is nothing |
| words | whatever their case |
| expressions | equal by algebra; decimals in them are exact |
"""

import logging
import re
from fractions import Fraction
from typing import Any, NamedTuple

from jaxpost.rewards import literals
from jaxpost.rewards.math import screens
from jaxpost.rewards.math import text as texts
from jaxpost.rewards.math.form import EQUALS, Form

try:
    import math_verify
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
except ImportError as error:
    raise ImportError(
        "jaxpost.rewards.math needs math-verify: pip install 'jaxpost[rewards]'"
    ) from error

PLAIN = NormalizationConfig(
    basic_latex=True,
    units=False,
    malformed_operators=True,
    nits=False,
    boxed="none",
    equations=False,
)
DECIMAL = re.compile(r"(?<![\w.])(\d*)\.(\d+)")
IMAGINARY = re.compile(r"(?<![A-Za-z\\])i(?![A-Za-z])")
WORDS = re.compile(r"[A-Za-z][A-Za-z .,'’-]*")
SHORT_WORDS = ("yes", "no", "odd", "even", "true", "none", "east", "west", "all", "both")
CHOICE = re.compile(r"\(?([A-Ja-j])[.)]?")
POINTS = (5, 9)
LEARNT = (
    (r"\frac{x^{2}-1}{2}", r"\frac{1}{2}(x-1)(x+1)"),
    (r"\sqrt{12}-e^{-x}+\pi", r"2\sqrt{3}-e^{-x}+\pi"),
    (r"\sin^{2}(2\pi x)+\ln 5", r"1-\cos^{2}(2\pi x)+\ln{5}"),
    (r"x\ge -1", r"-1 \le x"),
    (r"(0,\infty]", r"\emptyset"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&a_1\end{pmatrix}"),
    (r"y^2+x=3+4i", r"|x+3|"),
)


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that the time limit is ours


class Policy(NamedTuple):
    """`evaluated`: where a number is right, it is to be written out. `tolerance` is relative."""

    evaluated: bool = True
    tolerance: float = 0.0


def same(gold: Form, said: Form, policy: Policy) -> bool:
    if texts.squeezed(gold.text) == texts.squeezed(said.text):
        return True
    if gold.kind == said.kind == "one":
        return same_one(gold, said, policy)
    if {gold.kind, said.kind} == {"one", "list"}:
        one, other = alone(gold), alone(said)
        return one.kind == other.kind == "one" and same(one, other, policy)
    if gold.kind == "one" or said.kind == "one" or len(gold.items) != len(said.items):
        return False
    if gold.kind == said.kind == "tuple":
        brackets = (gold.opening, gold.closing) == (said.opening, said.closing)
        return brackets and in_order(gold, said, policy)
    if gold.kind == said.kind == "list":
        return in_any_order(gold, said, policy)
    pair = gold if gold.kind == "tuple" else said
    bare = not (said if pair is gold else gold).text.startswith("\\{")
    return bare and (pair.opening, pair.closing) == ("(", ")") and in_order(gold, said, policy)


def alone(form: Form) -> Form:
    """The item of a list of one."""
    return form.items[0] if form.kind == "list" and len(form.items) == 1 else form


def in_order(gold: Form, said: Form, policy: Policy) -> bool:
    return all(same(one, other, policy) for one, other in zip(gold.items, said.items, strict=True))


def in_any_order(gold: Form, said: Form, policy: Policy) -> bool:
    """Each item has its own. Unnamed answers to differently named ones stand in order."""
    names = {one.name for one in gold.items}
    if len(names) > 1 and not any(one.name for one in said.items):
        return in_order(gold, said, policy)
    left = list(said.items)
    for one in gold.items:
        found = next((i for i, other in enumerate(left) if same(one, other, policy)), None)
        if found is None:
            return False
        del left[found]
    return True


def same_one(gold: Form, said: Form, policy: Policy) -> bool:
    if gold.unit and said.unit and gold.unit != said.unit:
        return False
    if gold.name and said.name and texts.squeezed(gold.name) != texts.squeezed(said.name):
        return False
    right, given = literals.literal(gold.body), literals.literal(last_side(gold, said))
    if contradicts(gold, said, given, policy):
        return False
    if right is not None:
        if given is not None:
            return same_number(right, given, gold.percent, said.percent, policy)
        if policy.evaluated:
            return False
    if texts.squeezed(gold.body) == texts.squeezed(said.body):
        return True
    if is_words(gold):
        return plain_words(gold.body) == plain_words(said.body)
    return same_expression(gold.body, said.body)


def last_side(gold: Form, said: Form) -> str:
    """Of `2+3=5`, for a right answer that is no equation, 5."""
    return said.body if "=" in gold.body else said.body.rpartition("=")[2].strip()


def contradicts(gold: Form, said: Form, given: Fraction | None, policy: Policy) -> bool:
    """Whether an earlier side of the answer is a number, and another than the last side."""
    if "=" in gold.body:
        return False
    sides = {side: literals.literal(side) for side in EQUALS.split(said.text)[:-1]}
    for side, value in sides.items():
        if value is None:
            continue
        if given is None and not same_expression(gold.body, side):
            return True
        if given is not None and not same_number(given, value, said.percent, False, policy):
            return True
    return False


def same_number(
    right: Fraction, given: Fraction, percent: bool, said_percent: bool, policy: Policy
) -> bool:
    """One percent sign more or less means either a hundredth or nothing."""
    factors = (Fraction(1),)
    if percent != said_percent:
        factors = (Fraction(1), Fraction(100) if percent else Fraction(1, 100))
    bound = Fraction(policy.tolerance) * abs(right)
    return any(abs(given * factor - right) <= bound for factor in factors)


def is_words(form: Form) -> bool:
    """Text rather than a product of letters: it stood in \\text{}, or it is long, or well known."""
    body = form.body
    if CHOICE.fullmatch(body):
        return form.worded or len(body) > 1 or body.isupper()
    if not WORDS.fullmatch(body):
        return form.worded
    return form.worded or len(body) > 3 or body.lower() in SHORT_WORDS


def plain_words(text: str) -> str:
    choice = CHOICE.fullmatch(text.strip())
    return choice[1].upper() if choice else re.sub(r"[^\w]+", " ", text).strip().casefold()


def same_expression(gold: str, said: str) -> bool:
    """By algebra. False where the answer cannot be read, or is not to be computed."""
    if not said or screens.refuses(said, gold):
        return False
    real = not IMAGINARY.search(gold + " " + said)
    try:
        pair = (expression(gold, real), expression(said, real))
    except Exception:  # the parser raises many kinds on what it cannot read
        return False
    if any(refuted(*pair, number) for number in POINTS):
        return False
    return math_verify.verify(*pair, float_rounding=12, timeout_seconds=None)


def refuted(one: Any, other: Any, number: int) -> bool:
    """Whether two expressions differ where their symbols have some values, by far: cheaply told."""
    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return False
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    values = [(name, sympy.Rational(number + 7 * i, 13)) for i, name in enumerate(symbols)]
    try:
        left, right = (complex(sympy.N(side.subs(values), 20)) for side in (one, other))
    except Exception:  # no number, or not defined here
        return False
    return abs(left - right) > 1e-6 * (1 + abs(left))


def expression(text: str, real: bool = True) -> sympy.Basic | sympy.MatrixBase:
    """LaTeX as a sympy object, decimals as fractions. Raises what the parser does."""
    exact = DECIMAL.sub(
        lambda match: rf"\frac{{{match[1] + match[2]}}}{{1{'0' * len(match[2])}}}", text
    )
    found = latex2sympy(exact, is_real=real, convert_degrees=False, normalization_config=PLAIN)
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        raise ValueError(f"no expression: {text}")
    return found


def readable(gold: Form) -> bool:
    """Whether an answer can be compared to this right one at all."""
    if gold.kind != "one":
        return all(map(readable, gold.items))
    if not gold.body or screens.refuses(gold.body):
        return False
    if literals.literal(gold.body) is not None or is_words(gold):
        return True
    try:
        expression(gold.body, not IMAGINARY.search(gold.body))
    except Exception:  # as above
        return False
    return True


for one, other in LEARNT:  # what is learnt here (parser's tables, caches) a worker's forks share
    same_expression(one, other)
