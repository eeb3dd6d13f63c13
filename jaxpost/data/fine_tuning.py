"""The shapes of row that fine-tuning reads, and the canonical rows they become."""

from collections.abc import Mapping
from typing import Any

from jaxpost.data import json_text, pretokenized
from jaxpost.data import messages as chats
from jaxpost.data.kinds import Cells, Kind
from jaxpost.data.rows import ChatRow, CompletionRow, Dropped, ReasoningRow, TextRow


def text_row(cells: Cells) -> TextRow | Dropped:
    """`text`: plain text."""
    text = cells.text("text")
    if not text:
        return Dropped("empty_text", cells.where)
    return TextRow(text, **cells.common())


def chat_row(cells: Cells) -> ChatRow | Dropped:
    """`messages`: a conversation, in role and content or in from and value."""
    found = cells.json("messages")
    if found is None or found in ([], ()):
        return Dropped("empty_messages", cells.where)
    messages, own = read_messages(cells, "messages", found)
    weights = turn_weights(cells, messages, own)
    system = cells.text("system")
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
        weights = None if weights is None else [0.0, *weights]
    return ChatRow(messages, **extras(cells), weights=weights, **cells.common())


def completion_row(cells: Cells) -> CompletionRow | ChatRow | Dropped:
    """`prompt` and `completion`: text or messages each; one of each makes a conversation.

    Where messages of the completion have weights of their own, the whole is a weighted `ChatRow`.
    """
    prompt, completion, own = prompt_of(cells), cells["completion"], None
    if isinstance(completion, Mapping):
        completion = [completion]
    if completion is None or completion in ("", [], ()):
        return Dropped("empty_target", cells.where)
    if not isinstance(completion, str):
        check_words(cells, "completion", completion)
        completion, own = read_messages(cells, "completion", completion)
    if cells.format.chat or isinstance(prompt, list) or isinstance(completion, list):
        prompt, completion = asked(prompt), answered(completion)
    weight = cells["prompt_weight"]
    weight = 0.0 if weight is None else cells.weight("prompt_weight", weight)
    parts = {**extras(cells), **cells.common()}
    if own is not None:
        weights = [weight] * len(prompt) + own
        return ChatRow([*asked(prompt), *answered(completion)], weights=weights, **parts)
    return CompletionRow(prompt, completion, prompt_weight=weight, **parts)


def question_row(cells: Cells) -> CompletionRow | Dropped:
    """`question` and `answer`."""
    return turns(cells, cells.text("question"), cells.text("answer", number=True))


def alpaca_row(cells: Cells) -> CompletionRow | Dropped:
    """`instruction`, `input` (after a blank line) and `output`; earlier turns in `history`."""
    asks = (cells.text("instruction"), cells.text("input"))
    return turns(cells, "\n\n".join(filter(None, asks)), cells.text("output", number=True))


def turns(cells: Cells, prompt: str | None, completion: str | None) -> CompletionRow | Dropped:
    """Text asked and answered, as turns of a user and an assistant unless `chat` is False."""
    if not completion:
        return Dropped("empty_target", cells.where)
    if not prompt:
        return Dropped("empty_prompt", cells.where)
    past, system = cells.json("history") or [], cells.text("system")
    if cells.format.chat is False:
        if past or system:
            raise cells.error("history" if past else "system", "needs chat to be true or null")
        return CompletionRow(prompt, completion, **cells.common())
    messages = [{"role": "system", "content": system}] if system else []
    for index, pair in enumerate(past):
        if not isinstance(pair, list | tuple) or list(map(type, pair)) != [str, str]:
            raise cells.error("history", f"item {index} is no pair of prompt and completion")
        messages += asked(pair[0]) + answered(pair[1])
    return CompletionRow(messages + asked(prompt), answered(completion), **cells.common())


def reasoning_row(cells: Cells) -> ReasoningRow | Dropped:
    """`prompt`, `reasoning` and `answer`; missing reasoning stays empty."""
    prompt, reasoning = prompt_of(cells), cells.text("reasoning") or ""
    answer = cells.text("answer", number=True)
    if not answer:
        return Dropped("empty_target", cells.where)
    if cells.format.chat:
        prompt = asked(prompt)
    return ReasoningRow(prompt, reasoning, answer, **extras(cells), **cells.common())


def prompt_of(cells: Cells) -> str | list[dict[str, Any]]:
    """The prompt as text or messages; null is empty text."""
    prompt = cells["prompt"]
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    check_words(cells, "prompt", prompt)
    return read_messages(cells, "prompt", prompt)[0]


def check_words(cells: Cells, part: str, value: Any) -> None:
    """Refuses what is neither text nor a list."""
    if not isinstance(value, list | tuple):
        found = chats.described(value)
        raise cells.error(part, f"expected text or a list of messages, got {found}")


def asked(prompt: str | list) -> list:
    """A prompt as messages; empty text makes none."""
    if isinstance(prompt, list):
        return prompt
    return [{"role": "user", "content": prompt}] if prompt else []


def answered(completion: str | list) -> list:
    """A completion as messages."""
    if isinstance(completion, list):
        return completion
    return [{"role": "assistant", "content": completion}]


def read_messages(cells: Cells, part: str, value: Any) -> tuple[list[dict[str, Any]], Any]:
    """Messages in canonical form and their own weights, or None."""
    try:
        return chats.canonical(value)
    except ValueError as error:
        raise cells.error(part, str(error)) from error


def extras(cells: Cells) -> dict[str, Any]:
    """`tools` and `template_kwargs`, from a list or map, or from JSON text."""
    kwargs = cells.json("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise cells.error("chat_template_kwargs", f"expected a map, got {chats.described(kwargs)}")
    kwargs = dict(kwargs or {})
    if (thinking := cells["enable_thinking"]) is not None:
        kwargs.setdefault("enable_thinking", thinking)
    return {"tools": tools_of(cells), "template_kwargs": kwargs}


def tools_of(cells: Cells) -> list | None:
    """The schemas of tools; an empty list is None."""
    tools = cells.json("tools")
    if tools is not None and not isinstance(tools, list | tuple):
        raise cells.error("tools", f"expected a list of schemas, got {chats.described(tools)}")
    try:
        tools = [json_text.loads(tool) if isinstance(tool, str) else tool for tool in tools or ()]
    except ValueError as error:
        raise cells.error("tools", f"holds text that is not JSON: {error}") from error
    for tool in tools:
        if not isinstance(tool, Mapping):
            raise cells.error("tools", f"expected schemas (maps), got {chats.described(tool)}")
    return tools or None


def turn_weights(cells: Cells, messages: list, own: list[float] | None) -> list[float] | None:
    """One weight a message: the product of its own, `weights` and `turn_mask`; None if none is.

    `weights` holds one number a message, or one an assistant's message. `turn_mask` holds one truth
    value an assistant's message, and true leaves that turn untrained (as SWE-Lego's data does).
    """
    weights = own
    for part in ("weights", "turn_mask"):
        column = turn_column(cells, part, messages, assistants_only=part == "turn_mask")
        if column is not None:
            old = weights or [1.0] * len(column)
            weights = [weight * number for weight, number in zip(old, column, strict=True)]
    return weights


def turn_column(
    cells: Cells, part: str, messages: list, *, assistants_only: bool
) -> list[float] | None:
    """One weight a message, 0 for those that a column of assistants' numbers leaves out."""
    column = cells.json(part)
    if column is None:
        return None
    speakers = [message["role"] == "assistant" for message in messages]
    every = "" if assistants_only else f"{len(messages)} numbers, one a message, or "
    lengths = {sum(speakers)} if assistants_only else {len(messages), sum(speakers)}
    if not isinstance(column, list | tuple) or len(column) not in lengths:
        raise cells.error(
            part,
            f"expected {every}{sum(speakers)}, one an assistant's message; "
            f"got {chats.described(column)}",
        )
    numbers = [cells.weight(part, number) for number in column]
    if assistants_only:
        numbers = [0.0 if number else 1.0 for number in numbers]
    elif len(numbers) == len(messages):
        return numbers
    following = iter(numbers)
    return [next(following) if speaks else 0.0 for speaks in speakers]


def is_unpaired(cells: Cells) -> bool:
    """Whether `label` says if a completion is good, rather than what the answer is."""
    return isinstance(cells.row.get("label"), bool)


CHAT_PARTS = ("tools", "chat_template_kwargs", "enable_thinking")

MESSAGES = Kind(
    "messages",
    {"messages": ("messages", "conversations", "conversation")},
    chat_row,
    (*CHAT_PARTS, "weights", "turn_mask", "system"),
)
REASONING = Kind(
    "reasoning",
    {
        "prompt": ("prompt", "question", "problem", "instruction", "query", "input"),
        "reasoning": ("reasoning", "reasoning_content", "thinking", "rationale", "cot"),
        "answer": ("answer", "completion", "response", "output", "solution"),
    },
    reasoning_row,
    CHAT_PARTS,
)
ALPACA = Kind(
    "alpaca",
    {"instruction": ("instruction",), "output": ("output", "response")},
    alpaca_row,
    ("input", "history", "system"),
    turns=True,
)
COMPLETION = Kind(
    "prompt-completion",
    {"prompt": ("prompt", "input", "query"), "completion": ("completion", "response", "output")},
    completion_row,
    (*CHAT_PARTS, "prompt_weight"),
    lambda cells: not is_unpaired(cells),
)
QUESTION = Kind(
    "question-answer",
    {"question": ("question", "problem"), "answer": ("answer", "solution", "response")},
    question_row,
    ("history", "system"),
    turns=True,
)
TEXT = Kind("text", {"text": ("text",)}, text_row)

SFT = (pretokenized.KIND, MESSAGES, REASONING, ALPACA, COMPLETION, QUESTION, TEXT)

# Kinds that other recipes read: recognised here, so that the error can say which.
OTHERS = (
    Kind(
        "preference",
        {"chosen": ("chosen", "chosen_ids"), "rejected": ("rejected", "rejected_ids")},
        recipes="a preference recipe (dpo, reward_model)",
    ),
    Kind(
        "unpaired preference",
        {"prompt": ("prompt",), "completion": ("completion", "response"), "label": ("label",)},
        matches=is_unpaired,
        recipes="an unpaired preference recipe (kto, bco)",
    ),
    Kind(
        "stepwise",
        {"prompt": ("prompt",), "completions": ("completions",), "labels": ("labels",)},
        recipes="the recipe of a process reward model",
    ),
    Kind(
        "prompt-only",
        {"prompt": ("prompt", "question", "problem")},
        recipes="a reinforcement learning recipe (grpo, ppo, pmd)",
    ),
)
