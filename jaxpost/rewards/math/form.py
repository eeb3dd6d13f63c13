"""What an answer is made of: a list, a tuple or interval, or one thing with its name and unit."""

import re
from typing import Literal, NamedTuple

from jaxpost.rewards import literals
from jaxpost.rewards.math import text as texts

Kind = Literal["one", "list", "tuple"]
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
COMMA = re.compile(r"[,;]")
CUP = re.compile(r"\\cup(?![A-Za-z])")
WORDED = re.compile(r"\s*,?\s*\\text\s*\{\s*(?:and|or)\s*\}\s*|\s*,?\s+(?:and|or)\s+")
EQUALS = re.compile(r"(?<![\\<>!:])=")
NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'*(?:\([A-Za-z, ]+\))?")
MEMBER = re.compile(r"\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*(?=[(\[{\\])")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
ENDING = re.compile(r"(.*\S)\s*\\text\s*\{([^{}]*)\}\s*(\^\s*\{?\s*([23])\s*\}?)?")
NUMBERLIKE = r"[-+]?(?:\$|\\\$)?(?:[\d.,/ ]+|\d*\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})"
UNITED = re.compile(rf"({NUMBERLIKE})\s*([A-Za-z][A-Za-z. /]*?)\s*(\^\s*\{{?\s*([23])\s*\}}?)?")
# What is no unit: `5 \text{ (or 6)}` leaves the answer open. Powers are: `m2`, `s^-1`.
OPEN = re.compile(r"(?<![A-Za-z^])(?<!\^-)\d|[,;]|\b(?:or|not)\b", re.IGNORECASE)
ONE_LETTER = ("m", "g", "s", "h", "L", "l", "J", "N", "W", "V", "A", "K", "C", "F")
MONEY = re.compile(r"\\?\$|\\(?:pounds|euro|yen)(?![A-Za-z])|[€£¥]")
PERCENT = re.compile(r"\\?%")
UNITS = {
    "dollar": "$", "usd": "$", "degree": "°", "deg": "°", "centimeter": "cm", "centimetre": "cm",
    "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "millimeter": "mm",
    "millimetre": "mm", "inche": "inch", "in": "inch", "feet": "foot", "ft": "foot", "gram": "g",
    "kilogram": "kg", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "liter": "l", "litre": "l", "mile": "mi", "yard": "yd", "percent": "%", "cent": "¢",
    "square unit": "unit^2", "sq unit": "unit^2", "cubic unit": "unit^3",
}  # fmt: skip


class Form(NamedTuple):
    """`text` is all of it, tidy. A list and a tuple have `items`, one thing name, body and unit.

    `opening` and `closing` are the brackets of a tuple. `worded`: its body stood in `\\text{}`.
    """

    kind: Kind
    text: str
    items: tuple["Form", ...] = ()
    opening: str = ""
    closing: str = ""
    name: str = ""
    body: str = ""
    unit: str = ""
    percent: bool = False
    worded: bool = False


def read(text: str) -> Form:
    """An answer that `texts.tidy` has been over."""
    text = MEMBER.sub("", WORDED.sub(",", text).strip(" ,"))
    if THOUSANDS.fullmatch(bare := text.removeprefix("\\").removeprefix("$").strip("()")):
        return Form("one", text, body=bare)
    parts = [part for part in texts.split(text, COMMA) if part]
    if len(parts) == 1 and len(whole := texts.split(text, CUP)) > 1:
        parts = whole
    if len(parts) > 1 and not is_grouped(text):
        return Form("list", text, tuple(map(read, parts)))
    if "\\pm" in text:
        both = (re.sub(r"\\pm(?![A-Za-z])\s*", sign, text) for sign in "+-")
        return Form("list", text, tuple(read(one.lstrip("+")) for one in both))
    return bracketed(text) or single(text)


def is_grouped(text: str) -> bool:
    """`1,234,567` and `1,234 cm` are numbers; `1, 234` is a list."""
    return bool(re.fullmatch(rf"{THOUSANDS.pattern}\s*(?:\\?%|°|\\text.*|[A-Za-z ]+)", text))


def bracketed(text: str) -> Form | None:
    """`(a,b)`, `[a,b)`, `\\{a,b\\}`: None where the brackets do not hold all of it, or one item."""
    if text.startswith("\\{") and text.endswith("\\}") and "\\{" not in text[2:]:
        inner = [part for part in texts.split(text[2:-2], COMMA) if part]
        return Form("list", text, tuple(map(read, inner))) if inner else None
    if not text or text[0] not in "([" or text[-1] not in ")]":
        return None
    parts = texts.split(text[1:-1], COMMA)
    if len(parts) < 2 or not texts.balanced(text[1:-1]):
        return None
    return Form("tuple", text, tuple(map(read, parts)), text[0], text[-1])


def single(text: str) -> Form:
    """One thing: `x = 2+3 = 5\\text{ cm}` has the name x, the body 5 and the unit cm."""
    sides = [side.strip() for side in EQUALS.split(text)]
    name, body = "", text
    if len(sides) > 1 and all(sides) and NAME.fullmatch(sides[0]):
        name, body = sides[0], sides[-1]
    percent = bool(PERCENT.search(body))
    body, unit = united(unbracketed(PERCENT.sub("", body).strip()))
    if unit == "%":
        percent, unit = True, ""
    whole = TEXT.fullmatch(body)
    body = TEXT.sub(lambda match: match[1], body).strip()
    return Form(
        "one", text, name=name, body=body, unit=unit, percent=percent, worded=whole is not None
    )


def unbracketed(text: str) -> str:
    """Without brackets around all of it: `(-5)`, `\\left(\\frac{7}{2}\\right)`."""
    while len(text) > 2 and text[0] + text[-1] in ("()", "{}"):
        inner = text[1:-1]
        if not texts.balanced(inner):
            break
        text = inner.strip()
    return text


def united(text: str) -> tuple[str, str]:
    """Body and unit."""
    unit = ""
    if MONEY.match(text.lstrip("-+ ")) or MONEY.search(text[-2:]):
        sign = "-" if text.startswith("-") else ""
        text, unit = sign + MONEY.sub("", text).strip(" -"), "$"
    if text.endswith("°"):
        return text[:-1].strip(), "°"
    if (match := ENDING.fullmatch(text)) and not OPEN.search(match[2]):
        words = known(match[2], match[4])
        return match[1], words or unit
    match = UNITED.fullmatch(text)
    if match is None or OPEN.search(match[2]):
        return text, unit
    if (len(match[2]) > 1 or match[2] in ONE_LETTER) and match[1].strip(" ,"):
        spaced = text[len(match[1].rstrip()) :].startswith(" ") or len(match[2]) > 2
        scientific = literals.literal(text) is not None
        if spaced and not scientific:
            return match[1].strip(), known(match[2], match[4]) or unit
    return text, unit


def known(words: str, power: str | None = None) -> str:
    """A unit in one spelling: `square centimeters` and `cm^2` alike."""
    words = " ".join(words.lower().replace(".", " ").split())
    for prefix, power_of in (("square ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if words.startswith(prefix):
            words, power = words.removeprefix(prefix), power_of
    singular = words[:-1] if words.endswith("s") and len(words) > 2 else words
    words = UNITS.get(singular, UNITS.get(words, singular))
    return words + (f"^{power}" if power and words else "")
