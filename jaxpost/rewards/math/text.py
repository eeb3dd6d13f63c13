"""An answer's LaTeX made plain: one spelling of each thing, its wrapping off."""

import re
import unicodedata

SYMBOLS = {
    "−": "-", "–": "-", "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "π": "\\pi ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "∅": "\\emptyset ", "∪": "\\cup ",
    "∩": "\\cap ", "±": "\\pm ", "°": "^{\\circ}", "√": "\\sqrt ", "∈": "\\in ", "θ": "\\theta ",
    "²": "^{2}", "³": "^{3}", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}",
}  # fmt: skip
SPELLINGS = (
    (r"\\(?:dfrac|tfrac|cfrac)(?![A-Za-z])", r"\\frac"),
    (r"\\(?:dbinom|tbinom)(?![A-Za-z])", r"\\binom"),
    (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|displaystyle|limits)(?![A-Za-z])", ""),
    (r"(?<!\\)\\(?:[,;:!> ]|quad(?![A-Za-z])|qquad(?![A-Za-z])|enspace\b)|~", " "),
    (r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset "),
    (r"\\leq(?:slant)?(?![A-Za-z])", r"\\le"),
    (r"\\geq(?:slant)?(?![A-Za-z])", r"\\ge"),
    (r"\\neq(?![A-Za-z])", r"\\ne"),
    (r"\\mleft|\\mright", ""),
    (r"\\lbrace(?![A-Za-z])", r"\\{"),
    (r"\\rbrace(?![A-Za-z])", r"\\}"),
    (r"\\l?vert(?![A-Za-z])|\\rvert(?![A-Za-z])", "|"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\(?:mathbf|mathit|mathsf|mathrm|textit|textbf|textrm|rm|mbox|hbox)(?![A-Za-z])", r"\\text"),
    (r"\\(?:boldsymbol|bm)(?![A-Za-z])", ""),
    (r"\\operatorname\*?(?![A-Za-z])", r"\\text"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "\N{DEGREE SIGN}"),
    (r"\{,\}", ","),
    (r"(\d)\{ \}(\d)", r"\1 \2"),
    (r"\\(?:cdotp|centerdot)(?![A-Za-z])", r"\\cdot"),
    (r"\\[dlc]?dots(?![A-Za-z])|…", r"\\dots "),
)  # fmt: skip
FRAC = re.compile(r"\\(frac|binom)\s*(\d|[A-Za-z])\s*(\d|[A-Za-z])")
FRAC_LEFT = re.compile(r"\\(frac|binom)\s*(\d|[A-Za-z])\s*(?=\{)")
FRAC_RIGHT = re.compile(r"(\\(?:frac|binom)\s*\{[^{}]*\})\s*(\d|[A-Za-z])")
SQRT = re.compile(r"\\sqrt\s*(\d|[A-Za-z])")
WRAPPED = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`"))
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")


def tidy(text: str) -> str:
    """One spelling: ASCII digits and signs, `\\frac{a}{b}`, no spacing commands, no `$` around."""
    text = "".join(SYMBOLS.get(char, char) for char in text)
    text = unicodedata.normalize("NFKC", text)
    text = "".join(char for char in text if char.isprintable() or char in "\n\t")
    text = unwrapped(text)
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    text = FRAC.sub(r"\\\1{\2}{\3}", text)
    text = FRAC_LEFT.sub(r"\\\1{\2}", text)
    text = FRAC_RIGHT.sub(r"\1{\2}", text)
    text = SQRT.sub(r"\\sqrt{\1}", text)
    return unwrapped(re.sub(r"\s+", " ", text))


def unwrapped(text: str) -> str:
    """Without `$...$` and the like around all of it, and without a full stop at the end."""
    before = None
    while text != before:
        before = text = text.strip()
        for left, right in WRAPPED:
            inner = text[len(left) : len(text) - len(right)]
            long = len(text) >= len(left) + len(right)
            if long and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner.strip()
        if text.endswith(".") and not text.endswith("..") and not text.endswith("\\."):
            text = text[:-1]
        text = text.removesuffix("\\\\").removesuffix("**").removeprefix("**")
    return text


def squeezed(text: str) -> str:
    """For comparing as text: no braces around single characters, spaces between digits only."""
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text))


def groups(text: str, start: int) -> str | None:
    """What stands in the braces that open at `start`, or None where they do not close."""
    depth = 0
    for index in range(start, len(text)):
        escaped = index and text[index - 1] == "\\"
        if text[index] == "{" and not escaped:
            depth += 1
        elif text[index] == "}" and not escaped:
            depth -= 1
            if not depth:
                return text[start + 1 : index]
    return None


def balanced(text: str) -> bool:
    """Whether no bracket closes that did not open in it, and none stays open; of any kind."""
    depth = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False
    return not depth


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between separators that stand in no brackets."""
    parts, depth, begin, index = [], 0, 0, 0
    while index < len(text):
        char = text[index]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        elif not depth and (match := separator.match(text, index)) and match.end() > index:
            parts.append(text[begin:index].strip())
            begin = index = match.end()
            continue
        index += 1
    return [*parts, text[begin:].strip()]
