"""The shapes of row that say which completion is better, and the canonical rows they become."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost.data import fine_tuning, pretokenized
from jaxpost.data import messages as chats
from jaxpost.data.kinds import Cells, Kind
from jaxpost.data.rows import ComparedRow, Dropped, Ids, LabelledRow, Message, StepsRow

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
SAID = ("completion", "response", "answer", "text", "content")
SCORED = ("score", "overall_score", "rating", "reward")


# Pairs ---------------------------------------------------------------------------------------


def pair_row(cells: Cells) -> ComparedRow | Dropped:
    """`prompt`, `chosen` and `rejected`; of conversations, the sides may repeat the prompt."""
    prompt, sides = fine_tuning.prompt_of(cells), [words(cells, p) for p in ("chosen", "rejected")]
    if any(isinstance(part, list) for part in (prompt, *sides)) or as_turns(cells):
        asked, turns = fine_tuning.asked(prompt), [fine_tuning.answered(side) for side in sides]
        before = shared(turns)
        begun = bool(before) and before[0]["role"] != "assistant"  # which would go on after it
        if asked and begun and all(message in before for message in asked):
            return conversations(cells, turns)
        prompt, sides = [*system(cells), *asked], turns
    return compared(cells, prompt, sides)


def whole_row(cells: Cells) -> ComparedRow | Dropped:
    """`chosen` and `rejected` alone: whole texts or conversations that begin with the prompt."""
    sides = [words(cells, part) for part in ("chosen", "rejected")]
    if any(isinstance(side, list) for side in sides):
        return conversations(cells, [fine_tuning.answered(side) for side in sides])
    if cells.format.chat:
        raise cells.error("chosen", "is text of no turns; as_chat is for rows with a prompt")
    return compared(cells, None, sides)


def dialogue_row(cells: Cells) -> ComparedRow | Dropped:
    """`chosen` and `rejected` with turns after "Human:" and "Assistant:" (as HH-RLHF has them).

    They stay text, of which the last turn is compared, unless `chat` makes messages of them.
    """
    sides = [cells.text(part) or "" for part in ("chosen", "rejected")]
    turns = [dialogue(side) for side in sides]
    if cells.format.chat:
        return conversations(cells, turns)
    count = len(shared(turns))
    if any(len(side) > count + 1 for side in turns):
        return Dropped("several_turns", cells.where)
    if any(len(side) == count for side in turns):
        return Dropped("identical" if sides[0] == sides[1] else "empty_target", cells.where)
    start = sides[0].rindex(ASSISTANT) + len(ASSISTANT)
    same = sides[1].startswith(sides[0][:start])
    if not same or any(side[-1]["role"] != "assistant" for side in turns):
        return Dropped("prompts_differ", cells.where)
    return compared(cells, sides[0][:start], [side[start:] for side in sides])


def dialogue(text: str) -> list[dict[str, Any]]:
    """A text as messages; what stands before the first turn is a system's."""
    found: list[dict[str, Any]] = []
    rest, role = text, "system"
    while rest or role != "system":
        places = [(rest.find(mark), mark) for mark in (HUMAN, ASSISTANT) if mark in rest]
        end, mark = min(places, default=(len(rest), ""))
        if rest[:end].strip() or role != "system":
            found.append({"role": role, "content": rest[:end].strip()})
        if not mark:
            break
        rest, role = rest[end + len(mark) :], "user" if mark == HUMAN else "assistant"
    return found


def is_dialogue(cells: Cells) -> bool:
    """Whether both texts of the sample have an assistant's turn."""
    return all(ASSISTANT in str(cells.row.get(cells.column(p))) for p in ("chosen", "rejected"))


def step_row(cells: Cells) -> ComparedRow | Dropped:
    """`initial_reason_steps` that are right, and the next step `chosen` and `rejected`."""
    prompt, begun = fine_tuning.prompt_of(cells), cells.text("initial_reason_steps") or ""
    sides = [cells.text(part) or "" for part in ("chosen", "rejected")]
    if isinstance(prompt, list) or as_turns(cells):
        prompt = [*system(cells), *fine_tuning.asked(prompt)]
    return compared(cells, prompt, sides, begun=begun)


def ids_row(cells: Cells) -> ComparedRow | Dropped:
    """`prompt_ids`, `chosen_ids` and `rejected_ids`, as they are."""
    parts = ("prompt_ids", "chosen_ids", "rejected_ids")
    prompt, *sides = [Ids(pretokenized.integers(cells, part) or ()) for part in parts]
    if not all(side.tokens for side in sides):
        return Dropped("empty_target", cells.where)
    return compared(cells, prompt, sides)


def conversations(cells: Cells, turns: Sequence[list]) -> ComparedRow | Dropped:
    """Whole conversations; what they share before the turn that differs is the prompt."""
    before = shared(turns)
    if all(len(side) == len(before) for side in turns):
        return Dropped("identical", cells.where)
    sides = [side[len(before) :] for side in turns]
    if not all(sides):
        return Dropped("empty_target", cells.where)
    if before and before[-1]["role"] == "assistant":
        return Dropped("prompts_differ", cells.where)
    if not before or before[0]["role"] != "system":
        before = [*system(cells), *before]
    return compared(cells, before, sides)


def compared(cells: Cells, prompt: Any, sides: Sequence[Any], begun: str | None = None):
    """The row of two sides, or why it is dropped: nothing in a side, or scores that deny it."""
    if not all(side.tokens if isinstance(side, Ids) else side for side in sides):
        return Dropped("empty_target", cells.where)
    scores = [number(cells, part, cells[part]) for part in ("score_chosen", "score_rejected")]
    known = [score for score in scores if score is not None]
    if len(known) == 2 and known[0] <= known[1]:
        return Dropped("tie" if known[0] == known[1] else "misordered", cells.where)
    return ComparedRow(
        prompt,
        sides,
        scores=known if len(known) == 2 else None,
        margin=number(cells, "margin", cells["margin"]),
        begun=begun,
        **extras(cells),
    )


# Rankings ------------------------------------------------------------------------------------


def ranked_row(cells: Cells) -> ComparedRow | Dropped:
    """`prompt` and `completions` with `scores` or `ranks`, or with a score or rank in each."""
    items = cells.json("completions")
    if not isinstance(items, list | tuple):
        raise cells.error("completions", f"expected a list, got {chats.described(items)}")
    said = [completion_of(cells, item) for item in items]
    scores = scores_of(cells, items)
    if len(said) < 2 or not all(said):
        return Dropped("empty_target", cells.where)
    prompt = fine_tuning.prompt_of(cells)
    if isinstance(prompt, list) or as_turns(cells) or any(isinstance(s, list) for s in said):
        prompt = [*system(cells), *fine_tuning.asked(prompt)]
        said = [fine_tuning.answered(one) for one in said]
    order = sorted(range(len(said)), key=lambda i: -scores[i])
    return ComparedRow(
        prompt, [said[i] for i in order], [scores[i] for i in order], **extras(cells)
    )


def completion_of(cells: Cells, item: Any) -> str | list:
    """One of several completions: text, messages, or a map that holds one of these."""
    if isinstance(item, Mapping) and "role" in item:
        item = [item]
    if isinstance(item, Mapping):
        keys = [key for key in SAID if key in item]
        if not keys:
            raise cells.error("completions", f"an item has none of the keys {', '.join(SAID)}")
        item = item[keys[0]]
    if item is None or isinstance(item, str):
        return item or ""
    return fine_tuning.read_messages(cells, "completions", item)[0]


def scores_of(cells: Cells, items: Sequence[Any]) -> list[float]:
    """One score an item, higher is better; a rank counts from the best."""
    for part, sign in (("scores", 1), ("ranks", -1)):
        column = cells.json(part)
        if column is not None:
            if not isinstance(column, list | tuple) or len(column) != len(items):
                found = chats.described(column)
                raise cells.error(part, f"expected {len(items)}, one a completion, got {found}")
            return [sign * required(cells, part, value) for value in column]
    for key, sign in (*((key, 1) for key in SCORED), ("rank", -1)):
        if all(isinstance(item, Mapping) and item.get(key) is not None for item in items):
            return [sign * required(cells, "completions", item[key]) for item in items]
    raise cells.error(
        "completions",
        "which is better cannot be told: give scores or ranks, or one of "
        f"{', '.join(SCORED)}, rank in every item",
    )


def is_ranked(cells: Cells) -> bool:
    """Whether the completions are alternatives, and not the steps of one."""
    return cells.row.get("labels") is None


# Single completions and steps ----------------------------------------------------------------


def labelled_row(cells: Cells) -> LabelledRow | Dropped:
    """`prompt`, `completion` and `label`: true where the completion is desirable."""
    label = cells["label"]
    if label not in (True, False):
        found = chats.described(label)
        raise cells.error("label", f"expected true or false (or 1 or 0), got {found}")
    prompt, completion = fine_tuning.prompt_of(cells), words(cells, "completion")
    if not completion:
        return Dropped("empty_target", cells.where)
    if isinstance(prompt, list) or isinstance(completion, list) or as_turns(cells):
        prompt = [*system(cells), *fine_tuning.asked(prompt)]
        completion = fine_tuning.answered(completion)
    return LabelledRow(prompt, completion, bool(label), **extras(cells))


def steps_row(cells: Cells) -> StepsRow | Dropped:
    """`prompt`, `completions` (the steps) and `labels`, one a step: truth values, or parts of 1.

    A step whose label is null is read and not judged.
    """
    steps, labels = cells.json("completions"), cells.json("labels")
    for part, column in (("completions", steps), ("labels", labels)):
        if not isinstance(column, list | tuple):
            raise cells.error(part, f"expected a list, got {chats.described(column)}")
    if len(labels) != len(steps):
        raise cells.error("labels", f"expected {len(steps)}, one a step, got {len(labels)}")
    for step in steps:
        if not isinstance(step, str):
            raise cells.error("completions", f"expected text, got {chats.described(step)}")
    if not steps:
        return Dropped("empty_target", cells.where)
    numbers = [float(label) if isinstance(label, bool) else label for label in labels]
    found = [number(cells, "labels", label) for label in numbers]
    if all(label is None for label in found):
        return Dropped("no_label", cells.where)
    if not all(label is None or 0 <= label <= 1 for label in found):
        raise cells.error("labels", f"expected truth values, or numbers of 0 to 1, got {labels}")
    prompt = fine_tuning.prompt_of(cells)
    if isinstance(prompt, list) or as_turns(cells):
        prompt = [*system(cells), *fine_tuning.asked(prompt)]
    return StepsRow(prompt, steps, found, **extras(cells))


# Parts of rows -------------------------------------------------------------------------------


def words(cells: Cells, part: str) -> str | list[dict[str, Any]]:
    """A completion as text or messages; null is empty text.

    Raises:
      ValueError: it is neither, or its messages have weights of their own.
    """
    value = cells[part]
    value = [value] if isinstance(value, Mapping) else value
    if value is None or isinstance(value, str):
        return value or ""
    fine_tuning.check_words(cells, part, value)
    found, weights = fine_tuning.read_messages(cells, part, value)
    if weights is not None:
        raise cells.error(part, "messages that are compared have no weights; leave them out")
    return found


def shared(turns: Sequence[Sequence[Message]]) -> list[Message]:
    """The messages that conversations have in common from their beginning."""
    alike = itertools.takewhile(
        lambda several: all(one == several[0] for one in several), zip(*turns, strict=False)
    )
    return [several[0] for several in alike]


def as_turns(cells: Cells) -> bool:
    """Whether plain text becomes turns of a user and an assistant."""
    return bool(cells.format.kind.turns if cells.format.chat is None else cells.format.chat)


def system(cells: Cells) -> list[dict[str, Any]]:
    """The message that a column `system` makes, if it has words."""
    text = cells.text("system")
    return [{"role": "system", "content": text}] if text else []


def extras(cells: Cells) -> dict[str, Any]:
    """What every canonical row carries."""
    return {**fine_tuning.extras(cells), **cells.common()}


def number(cells: Cells, part: str, value: Any) -> float | None:
    """A finite number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise cells.error(part, f"expected a number, got {chats.described(value)}")
    return float(value)


def required(cells: Cells, part: str, value: Any) -> float:
    """A finite number."""
    found = number(cells, part, value)
    if found is None:
        raise cells.error(part, "expected a number, got null")
    return found


PLAIN = {"prompt": ("prompt", "input", "query")}
ASKED = {"prompt": ("question", "problem", "instruction")}
SIDES = {"chosen": ("chosen",), "rejected": ("rejected",)}
CHAT = (*fine_tuning.CHAT_PARTS, "system")
PAIR = (*CHAT, "margin", "score_chosen", "score_rejected")
STEPS = {"initial_reason_steps": ("initial_reason_steps",)}
SEVERAL = {"completions": ("completions", "answers", "responses", "generations")}
RANK = (*CHAT, "scores", "ranks")
IDS = {part: (part,) for part in ("prompt_ids", "chosen_ids", "rejected_ids")}

PAIRS = (
    Kind("preference tokens", IDS, ids_row, PAIR),
    Kind("preference step", {**PLAIN, **STEPS, **SIDES}, step_row, PAIR, turns=True),
    Kind("preference", {**PLAIN, **SIDES}, pair_row, PAIR),
    Kind("preference question", {**ASKED, **SIDES}, pair_row, PAIR, turns=True),
    Kind("preference dialogue", SIDES, dialogue_row, PAIR, is_dialogue),
    Kind("preference without prompt", SIDES, whole_row, PAIR),
)
RANKINGS = (
    Kind("ranking", {**PLAIN, **SEVERAL}, ranked_row, RANK, is_ranked),
    Kind("ranking question", {**ASKED, **SEVERAL}, ranked_row, RANK, is_ranked, turns=True),
)
UNPAIRED = (
    Kind(
        "unpaired preference",
        {**PLAIN, "completion": ("completion", "response", "output"), "label": ("label",)},
        labelled_row,
        CHAT,
    ),
)
STEPWISE = (
    Kind(
        "stepwise",
        {
            "prompt": (*PLAIN["prompt"], *ASKED["prompt"]),
            "completions": ("completions", "steps"),
            "labels": ("labels",),
        },
        steps_row,
        CHAT,
    ),
)
