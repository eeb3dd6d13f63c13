"""Is a text plain arithmetic of a harmless size? Asked before it meets a parser that evaluates.

sympy's parser, and some scorers, run the text as Python. `refuses` reads the text's syntax tree and
lets through numbers, the given names, + - * / **, signs and one-argument calls of given functions:
nothing that runs code, and nothing whose value is too large to compute.
"""

import ast
import math
from collections.abc import Collection

LONGEST = 2_000  # characters
LARGEST = 10**12  # of a number as written
WEIGHT = 2_000  # of a formula: its terms, each times its powers
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)


class RefusedError(ValueError):
    """What is wrong with a formula."""


def refuses(text: str, names: Collection[str] = (), functions: Collection[str] = ()) -> str | None:
    """Why a text may not be evaluated, or None.

    `names` "a-z" lets every single letter through.
    """
    if len(text) > LONGEST:
        return f"a formula of {len(text)} characters (at most {LONGEST})"
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        weight = weigh(tree, frozenset(names), frozenset(functions))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as wrong:
        return str(wrong) or "too deep"
    return f"a formula of weight {weight} (at most {WEIGHT})" if weight > WEIGHT else None


def is_literal(text: str) -> bool:
    """A Python number, string, list, ... written out."""
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def weigh(node: ast.expr, names: frozenset[str], functions: frozenset[str]) -> int:
    """About how many terms the formula has when its powers are multiplied out."""
    match node:
        case ast.Constant(value=bool()):
            raise RefusedError("a truth value")
        case ast.Constant(value=int() | float() as number) if abs(number) <= LARGEST:
            return 1
        case ast.Name(id=name) if name in names or ("a-z" in names and len(name) == 1):
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return weigh(operand, names, functions)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            terms, times = weigh(base, names, functions), power(base, exponent, names, functions)
            return max(terms * times, math.comb(terms + times - 1, times))
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, OPERATORS):
            return weigh(left, names, functions) + weigh(right, names, functions)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions:
            return 1 + weigh(argument, names, functions)
    raise RefusedError(f"not plain arithmetic: {type(node).__name__}")


def power(
    base: ast.expr, exponent: ast.expr, names: frozenset[str], functions: frozenset[str]
) -> int:
    """How much an exponent multiplies: a number written out, or over a name any formula."""
    match exponent:
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return power(base, operand, names, functions)
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            if abs(number) > WEIGHT:
                raise RefusedError(f"an exponent of {number}")
            return max(1, math.ceil(abs(number)))
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant()):
            return power(base, left, names, functions)
    if isinstance(base, ast.Name):
        return 1 + weigh(exponent, names, functions)
    raise RefusedError("an exponent that is itself computed")
