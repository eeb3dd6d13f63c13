"""What is not given to a computer algebra system: texts that would keep it busy for ever."""

import re

LENGTH = 2000  # characters of an answer
DEPTH = 50  # brackets within brackets
ITEMS = 100  # of a list
RULES = (
    (re.compile(r"\d[\s})]*(?:\^|\*\*)[\s{(]*[-+]?[\d.]+[\s})]*(?:\^|\*\*)"), "power tower"),
    (re.compile(r"(?:\^|\*\*)[\s{(]*[-+]?\d{4,}"), "large power"),
    (re.compile(r"[A-Za-z][^^]{0,400}[})]\s*(?:\^|\*\*)[\s{(]*[-+]?\d{3,}"), "large power"),
    (re.compile(r"(?:\^|\*\*)[\s{(]*[^{}()^]*!"), "power of a factorial"),
    (re.compile(r"\d{4,}\s*!|[)}!]\s*!"), "large factorial"),
    (re.compile(r"\\binom\s*\{[^{}]*(?:\d{5,}|[!^])"), "large binomial"),
    (re.compile(r"\d{200,}"), "long number"),
)
MOST = ((("\\frac",), 20), (("\\sqrt",), 20), (("!", "^"), 40))  # of these in an answer
OPERATORS = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf|det|sup|inf)(?![A-Za-z])")


def refuses(text: str, gold: str | None = None) -> str:
    """Why an answer is not computed, or "".

    An operator (sum, integral, limit, ...) that the right answer has not is an exercise, not its
    answer.
    """
    if len(text) > LENGTH:
        return "too long"
    if depth(text) > DEPTH:
        return "too deep"
    if text.count(",") > ITEMS:
        return "too many items"
    if gold is not None and not OPERATORS.search(gold) and OPERATORS.search(text):
        return "not evaluated"
    if any(sum(map(text.count, marks)) > most for marks, most in MOST):
        return "too complex"
    return next((reason for rule, reason in RULES if rule.search(text)), "")


def depth(text: str) -> int:
    deepest = now = 0
    for char in text:
        now += (char in "([{") - (char in ")]}")
        deepest = max(deepest, now)
    return deepest
