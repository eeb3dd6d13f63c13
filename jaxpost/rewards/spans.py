"""Where in a completion its answer stands: one rule for the verifiers."""

import re

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
FENCE = re.compile(r"^```([^\n`]*)$", re.MULTILINE)


def spoken(completion: str) -> str:
    """What follows the last `</think>`, up to a thought that is not closed."""
    return completion.rpartition("</think>")[2].partition("<think>")[0]


def answer(completion: str) -> str:
    """The last `<answer>...</answer>` after the thought; without the tag, all that follows it."""
    said = spoken(completion)
    tagged = ANSWER.findall(said)
    return (tagged[-1] if tagged else said).strip()


def code(completion: str) -> str:
    """The last fenced block of the answer, fences removed; without one, the answer itself."""
    said = answer(completion)
    blocks = fenced(said)
    return blocks[-1] if blocks else said


def fenced(text: str) -> list[str]:
    """What stands in closed fences, in time linear in the text."""
    blocks, begun = [], None
    for fence in FENCE.finditer(text):
        if begun is None:
            begun = fence.end() + 1
        elif not fence[1].strip():
            blocks.append(text[begun : fence.start()])
            begun = None
    return blocks
