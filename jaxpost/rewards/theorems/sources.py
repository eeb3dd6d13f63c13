"""A proof as text: the statement in it, its comments, its words."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple


class Syntax(NamedTuple):
    """`opening` and `closing` of a comment (they nest), `line` what begins a line comment.

    `quoted`: strings in comments hide what closes them, as in Coq. `backslash`: it escapes a quote.
    """

    opening: str
    closing: str
    line: str = ""
    quoted: bool = False
    backslash: bool = False


COQ = Syntax("(*", "*)", quoted=True)
LEAN = Syntax("/-", "-/", "--", backslash=True)


def uncommented(text: str, syntax: Syntax) -> str:
    """The text with a space for each comment; strings stay."""
    string = r'"(?:[^"\\]|\\.)*"?' if syntax.backslash else r'"[^"]*"?'
    marks = [re.escape(syntax.opening), re.escape(syntax.closing), string]
    if syntax.line:
        marks.append(re.escape(syntax.line) + r"[^\n]*")
    kept, depth, place = [], 0, 0
    while found := re.compile("|".join(marks), re.DOTALL).search(text, place):
        mark, start = found.group(), place
        place = found.end()
        if mark.startswith('"') and depth and not syntax.quoted:
            place = found.start() + 1  # no string in a comment: only its quote is passed
        if depth == 0:
            kept.append(text[start : found.start()])
        if mark == syntax.opening:
            depth += 1
        elif mark == syntax.closing and depth:
            depth -= 1
            kept.append(" " if depth == 0 else "")
        elif depth == 0 and not (syntax.line and mark.startswith(syntax.line)):
            kept.append(mark)
        elif depth and syntax.line and mark.startswith(syntax.line):
            place = found.start() + 1  # nor a line comment
    return "".join(kept) + (text[place:] if depth == 0 else "")


def statement(example: Mapping[str, Any]) -> str:
    """The statement's column. KeyError where the example has none."""
    for column in ("statement", "formal_statement"):
        if example.get(column):
            return str(example[column]).strip()
    raise KeyError(
        f"a theorem needs the column statement or formal_statement (it has {', '.join(example)})"
    )


def joined(code: str, statement: str, declares: str, syntax: Syntax) -> str | None:
    """The code with the statement in it, once, outside comments; None where it is not as given.

    Code that declares nothing of the statement's name (`declares`, a pattern) is what follows it.
    """
    bare = uncommented(code, syntax)
    if not re.search(declares, bare):
        return f"{statement}\n{code}"
    there = uncommented(statement, syntax).strip()
    return code if code.count(statement) == 1 and bare.count(there) == 1 else None


def forbidden(code: str, words: str, syntax: Syntax) -> str | None:
    """The first word outside comments that a proof may not hold, or None."""
    found = re.search(words, uncommented(code, syntax))
    return found.group().strip() if found else None
