"""Numbers as they are written: to exact fractions, without a parser that evaluates."""

import re
from fractions import Fraction

DIGITS = 2000  # a longer number is no literal
EXPONENT = 400
INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ ]\d{3})+|\d+)"
DECIMAL = rf"(?:{INTEGER}(?:\.\d*)?|\.\d+)"
SIGNED = rf"[-+]?\s*{DECIMAL}"
POWER = r"10\s*\^\s*(?:\{\s*([-+]?\d+)\s*\}|([-+]?\d+))"
PLAIN = re.compile(rf"{DECIMAL}")
SCIENTIFIC = re.compile(rf"({DECIMAL})\s*[eE]\s*([-+]?\d+)")
TIMES_POWER = re.compile(rf"(?:({DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?{POWER}")
RATIO = re.compile(rf"({SIGNED})\s*/\s*({SIGNED})")
FRACTION = re.compile(rf"\\frac\s*\{{\s*({SIGNED})\s*\}}\s*\{{\s*({SIGNED})\s*\}}")
MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)|(\d+)\s*\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")


def literal(text: str) -> Fraction | None:
    """The value of a number that is written out; None for anything still to be computed.

    Integers (with thousands separators), decimals, `a/b`, `\\frac{a}{b}`, mixed numbers, repeating
    decimals (`0.\\overline{3}`), `1.2e3`, `1.2\\times10^{3}`, `10^{3}`, each with a sign.
    """
    text = text.strip()
    if len(text) > DIGITS:
        return None
    bare = text.lstrip("+-").strip()
    sign = -1 if text[: len(text) - len(bare)].count("-") % 2 else 1
    if len(text) - len(text.lstrip("+-")) > 1:
        return None
    found = unsigned(inside(bare) if sign == 1 else bare)
    return None if found is None else sign * found


def inside(text: str) -> str:
    """Without the brackets around all of it: `(1,000)`, `{5}`."""
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}") and PLAIN.fullmatch(text[1:-1]):
        text = text[1:-1]
    return text


def unsigned(text: str) -> Fraction | None:
    if PLAIN.fullmatch(text):
        return decimal(text)
    if match := SCIENTIFIC.fullmatch(text):
        return scaled(match[1], match[2])
    if match := TIMES_POWER.fullmatch(text):
        return scaled(match[1] or "1", match[2] or match[3])
    if match := RATIO.fullmatch(text) or FRACTION.fullmatch(text):
        return divided(decimal(match[1]), decimal(match[2]))
    if match := MIXED.fullmatch(text):
        whole, above, below = (int(part) for part in match.groups() if part is not None)
        part = divided(Fraction(above), Fraction(below))
        return None if part is None else whole + part
    if match := REPEATING.fullmatch(text):
        whole, fixed, again = match.groups()
        tail = Fraction(int(again), (10 ** len(again) - 1) * 10 ** len(fixed))
        return decimal(f"{whole or 0}.{fixed}") + tail
    return None


def decimal(text: str) -> Fraction:
    digits = text.replace(",", "").replace(" ", "")
    return Fraction(digits + "0" if digits.endswith(".") else digits)


def scaled(text: str, exponent: str) -> Fraction | None:
    power = int(exponent) if len(exponent) < 6 else EXPONENT + 1
    return decimal(text) * Fraction(10) ** power if abs(power) <= EXPONENT else None


def divided(above: Fraction, below: Fraction) -> Fraction | None:
    return above / below if below else None
