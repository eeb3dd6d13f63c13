"""Rows that hold whole sessions of an agent, and answers in steps."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxpost.data import fine_tuning, formats, paths
from jaxpost.data import messages as chats
from jaxpost.data.kinds import Cells, Kind
from jaxpost.data.rows import Dropped, Message


@dataclasses.dataclass(frozen=True)
class Session:
    """Messages of an agent (the assistant) and its partner, user or environment.

    Attributes:
      reward: of the whole; several numbers are compared in their order, later ones break ties. None
        for a part of a session.
      task: sessions of the same task are compared; None: of the same messages before turn 0.
      error_turn: the turn at which the session goes wrong.
      end_turn: the last turn of the segment that counts; None: the session's last.
      branch: the first turn of its own, where it was begun in the middle of another session.
      returns: a turn: the rewards of rollouts from the state after it.
      entropies: a turn: the policy's entropy at it.
      groups: first turns of groups of actions.
      extras: columns that pairs carry on, `tools` and `chat_template_kwargs`.
    """

    messages: Sequence[Message]
    reward: tuple[float, ...] | None
    task: str | int | None = None
    error_turn: int | None = None
    end_turn: int | None = None
    branch: int | None = None
    returns: Sequence[Sequence[float]] | None = None
    entropies: Sequence[float] | None = None
    groups: Sequence[int] | None = None
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""

    @property
    def prompt(self) -> Sequence[Message]:
        """What stands before the agent's first message."""
        return self.messages[: self.turns[0]]

    @property
    def turns(self) -> list[int]:
        """Where the agent's messages stand."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]


@dataclasses.dataclass(frozen=True)
class Answer:
    """A prompt and an answer in steps.

    Attributes:
      steps: or the text that they are in.
      correct: whether the final answer is right, if that is known.
      error_step: the first step that is wrong, from 0.
      rollouts: a step: whether each completion begun after it reached the right answer.
      unfinished: it was cut off, within its last step.
    """

    prompt: str | Sequence[Message]
    steps: Sequence[str] | str
    correct: bool | None = None
    error_step: int | None = None
    rollouts: Sequence[Sequence[bool | int]] | None = None
    unfinished: bool = False
    task: str | int | None = None
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


def read(path: str, kinds: Sequence[Kind], *, drop: bool = False) -> Iterator[Any]:
    """The rows of every file that a path stands for; with `drop`, bad ones as `Dropped`.

    Raises:
      ValueError: a row that cannot be read; the message names file and line.
    """
    for reader in paths.open_path(path):
        for index in range(len(reader)):
            try:
                row, where = reader[index]
                found = formats.detect(row.keys(), row, accept=kinds, where=where)
                yield formats.normalize(row, found, where)
            except ValueError as error:
                if not drop:
                    raise
                yield Dropped("malformed", str(error))


def session_row(cells: Cells) -> Session:
    """`messages` and `reward`, with what is known of the turns."""
    found = cells.json("messages")
    messages, weights = fine_tuning.read_messages(cells, "messages", found)
    if weights is not None:
        raise cells.error("messages", "messages that are compared have no weights; leave them out")
    count = sum(message["role"] == "assistant" for message in messages)
    if not count:
        raise cells.error("messages", "no assistant's message, so no turn to compare")
    session = Session(
        messages,
        reward_of(cells),
        error_turn=index(cells, "error_turn", count),
        end_turn=index(cells, "end_turn", count),
        branch=index(cells, "branch", count),
        returns=returns_of(cells, "returns", count),
        entropies=numbers(cells, "entropies", count),
        groups=groups_of(cells, count),
        task=task_of(cells),
        extras=extras_of(cells),
        where=cells.where,
    )
    if session.reward is None and not session.branch:
        raise cells.error("reward", "is needed, except of a session that branches off another")
    return session


def steps_row(cells: Cells) -> Answer:
    """`prompt` and `steps`."""
    steps = cells.json("steps")
    if not isinstance(steps, list | tuple) or not all(isinstance(step, str) for step in steps):
        raise cells.error("steps", f"expected a list of texts, got {chats.described(steps)}")
    if not all(step.strip() for step in steps):
        raise cells.error("steps", "a step without words")
    return answer_of(cells, steps)


def text_row(cells: Cells) -> Answer:
    """`prompt` and `completion`, text that is split into steps later."""
    return answer_of(cells, cells.text("completion") or "")


def answer_of(cells: Cells, steps: Sequence[str] | str) -> Answer:
    """What rows of either shape hold beside the steps."""
    prompt = fine_tuning.prompt_of(cells)
    errors = cells.json("error_step")
    for error in errors if isinstance(errors, list) else [errors]:
        if error is not None and not is_index(error, math.inf):
            raise cells.error("error_step", f"expected a step from 0 on, got {error!r}")
    if isinstance(errors, list):
        errors = min(errors, default=None)
    rollouts = returns_of(cells, "rollouts", None)
    for value in (value for step in rollouts or () for value in step if value not in (0, 1)):
        raise cells.error("rollouts", f"expected true or false (or 1 or 0), got {value!r}")
    return Answer(
        prompt,
        steps,
        correct=truth(cells, "correct"),
        error_step=errors,
        rollouts=None if rollouts is None else [[v == 1 for v in step] for step in rollouts],
        unfinished=bool(truth(cells, "unfinished")),
        task=task_of(cells),
        extras=extras_of(cells),
        where=cells.where,
    )


# Cells ---------------------------------------------------------------------------------------


def reward_of(cells: Cells) -> tuple[float, ...] | None:
    """A number, or several in the order in which they count."""
    value = cells.json("reward")
    if value is None:
        return None
    values = value if isinstance(value, list | tuple) else [value]
    if not values or not all(is_number(one) for one in values):
        raise cells.error("reward", f"expected a number or a list of these, got {value!r}")
    return tuple(float(one) for one in values)


def index(cells: Cells, part: str, count: int) -> int | None:
    """A turn, from 0 to `count` - 1."""
    value = cells[part]
    if value is not None and not is_index(value, count):
        raise cells.error(part, f"expected a turn from 0 to {count - 1}, got {value!r}")
    return value


def numbers(cells: Cells, part: str, count: int) -> list[float] | None:
    """One number a turn."""
    values = cells.json(part)
    if values is None:
        return None
    known = isinstance(values, list) and all(is_number(value) for value in values)
    if not known or len(values) != count:
        got = chats.described(values)
        raise cells.error(part, f"expected {count} numbers, one a turn, got {got}")
    return values


def returns_of(cells: Cells, part: str, count: int | None) -> list[list[float]] | None:
    """A list of numbers a turn or step; null stands for none, for a list or in one."""
    values = cells.json(part)
    if values is None:
        return None
    if not isinstance(values, list) or count not in (None, len(values)):
        many = "lists" if count is None else f"{count} lists"
        raise cells.error(part, f"expected {many}, one a turn, got {chats.described(values)}")
    for value in values:
        known = value is None or isinstance(value, list)
        if not known or not all(one is None or is_number(one, truths=True) for one in value or ()):
            raise cells.error(part, f"expected lists of numbers, one of them is {value!r}")
    return [[one for one in value or () if one is not None] for value in values]


def groups_of(cells: Cells, count: int) -> list[int] | None:
    """First turns of groups: 0, and on upwards."""
    starts = cells.json("groups")
    if starts is None:
        return None
    known = isinstance(starts, list) and all(is_index(start, count) for start in starts)
    if not known or starts != sorted({0, *starts}):
        raise cells.error("groups", f"expected first turns, from 0 upwards, got {starts!r}")
    return starts


def truth(cells: Cells, part: str) -> bool | None:
    """True, false or null."""
    value = cells[part]
    if value not in (None, True, False):
        raise cells.error(part, f"expected true or false (or 1 or 0), got {value!r}")
    return None if value is None else bool(value)


def task_of(cells: Cells) -> str | int | None:
    """A name or number."""
    value = cells["task"]
    if value is not None and not isinstance(value, str | int):
        raise cells.error("task", f"expected text or a whole number, got {value!r}")
    return value


def by_task(rows: Iterable[Any]) -> list[list[Any]]:
    """Sessions or answers of one task each, in the order of their first ones.

    Raises:
      ValueError: the sessions of a task have different numbers of rewards.
    """
    found: dict[str, list[Any]] = {}
    for row in rows:
        key = [row.task] if row.task is not None else row.prompt
        found.setdefault(json.dumps(key, sort_keys=True), []).append(row)
    for several in found.values():
        check_rewards([one for one in several if isinstance(one, Session)])
    return list(found.values())


def check_rewards(sessions: Sequence[Session]) -> None:
    """Refuses rewards of one task that cannot be compared."""
    counts = [(len(one.reward), one.where) for one in sessions if one.reward is not None]
    for count, where in counts:
        if count != counts[0][0]:
            raise ValueError(
                f"{where}: column reward: {count} numbers, and {counts[0][0]} at {counts[0][1]}, "
                "of the same task"
            )


def extras_of(cells: Cells) -> dict[str, Any]:
    """What a pair carries on, under the names that its reader knows."""
    found = fine_tuning.extras(cells)
    named = {"tools": found["tools"], "chat_template_kwargs": found["template_kwargs"]}
    return {name: value for name, value in named.items() if value}


def is_index(value: Any, count: float) -> bool:
    """Whether it counts one of `count` things, from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count


def is_number(value: Any, truths: bool = False) -> bool:
    """Whether it is finite and a number; truth values only where they are welcome."""
    if isinstance(value, bool):
        return truths
    return isinstance(value, int | float) and math.isfinite(value)


ASKED = ("prompt", "input", "query", "question", "problem", "instruction")
KNOWN = (*fine_tuning.CHAT_PARTS, "task")
SESSION = Kind(
    "session",
    {"messages": ("messages", "conversations", "conversation")},
    session_row,
    (*KNOWN, "reward", "error_turn", "end_turn", "branch", "returns", "entropies", "groups"),
)
STEP_PARTS = (*KNOWN, "correct", "error_step", "rollouts", "unfinished")
STEPS = Kind("answer in steps", {"prompt": ASKED, "steps": ("steps",)}, steps_row, STEP_PARTS)
TEXT = Kind(
    "answer as text",
    {"prompt": ASKED, "completion": ("completion", "response", "answer")},
    text_row,
    STEP_PARTS,
)
SESSIONS, ANSWERS = (SESSION,), (STEPS, TEXT)
