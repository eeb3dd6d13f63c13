"""Messages as the field writes them to messages as chat templates read them.

A canonical message has a `role` among `ROLES`, `content` as text (or, where spans of it have
weights of their own, as text parts), `tool_calls` in the form of OpenAI's API with arguments as a
map, and whatever else it carried (`name`, `tool_call_id`, `thinking`, …).
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from jaxpost.data import json_text

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHER_NAMES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
CALLS = ("function_call", "tool_call")
WEIGHTS = ("weight", "train", "training")
SMALLEST, LARGEST = 1e-6, 1e6  # weights beyond are lost in float32 sums with others, or lose them
THOUGHTS = ("thinking", "reasoning", "reasoning_content")


def canonical(value: Any) -> tuple[list[dict[str, Any]], list[float] | None]:
    """Messages in canonical form, and one weight a message or None where no message has one.

    A message's weight is its `weight` (a number) or `train` (true or false). Where some messages
    have none, an assistant's counts 1 and another's 0.

    Raises:
      ValueError: not a list of messages; the message says which item and why.
    """
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of messages, got {described(value)}")
    messages, weights = [], []
    for index, item in enumerate(value):
        try:
            message, own = one(item)
        except ValueError as error:
            raise ValueError(f"message {index}: {error}") from error
        messages.append(message)
        weights.append(own)
    if all(own is None for own in weights):
        return messages, None
    standard = [float(message["role"] == "assistant") for message in messages]
    pairs = zip(weights, standard, strict=True)
    return messages, [other if own is None else own for own, other in pairs]


def one(item: Any) -> tuple[dict[str, Any], float | None]:
    """One message in canonical form, and its own weight if it has one."""
    if not isinstance(item, Mapping):
        raise ValueError(f"expected a map with role and content, got {described(item)}")
    item = {key: value for key, value in item.items() if value is not None}
    name = item.pop("role", None) or item.pop("from", None)
    content = item.pop("content", item.pop("value", None))
    weights = [weight(item.pop(key)) for key in WEIGHTS if key in item]
    role, calls = role_of(name), item.pop("tool_calls", None)
    if str(name).lower() in CALLS:
        calls, content = calls_in(content)
    message: dict[str, Any] = {"role": role}
    if content is not None:
        message["content"] = text_of(content)
    if calls:
        message["tool_calls"] = [call_of(call) for call in calls]
    message |= item
    if content is None and not calls and not any(key in message for key in THOUGHTS):
        raise ValueError(f"the {role}'s message has neither content nor tool_calls")
    return message, math.prod(weights) if weights else None


def role_of(name: Any) -> str:
    """A role under its usual name."""
    if not isinstance(name, str):
        found = "no role" if name is None else f"the role {described(name)}"
        raise ValueError(f"expected a role among {', '.join(ROLES)}, got {found}")
    role = name.lower().replace("-", "_")
    role = OTHER_NAMES.get(role, role)
    if role not in ROLES:
        near = difflib.get_close_matches(role, [*ROLES, *OTHER_NAMES], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"expected a role among {', '.join(ROLES)}, got {name!r}{hint}")
    return role


def text_of(content: Any) -> str | list[dict[str, Any]]:
    """Content as text; typed parts are joined unless one of them has a weight."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple):
        raise ValueError(f"content: expected text or a list of parts, got {described(content)}")
    parts = [part_of(part) for part in content]
    if any("weight" in part for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def part_of(part: Any) -> dict[str, Any]:
    """A text part `{"type": "text", "text": …}`, with `weight` if it has one."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        raise ValueError(f"content: expected a part with type and text, got {described(part)}")
    kind = part.get("type", "text")
    if kind != "text":
        raise ValueError(f"content: a part of type {kind}, and only text is trained")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"content: a text part whose text is {described(part.get('text'))}")
    found: dict[str, Any] = {"type": "text", "text": part["text"]}
    if part.get("weight") is not None:
        found["weight"] = weight(part["weight"])
    return found


def call_of(call: Any) -> dict[str, Any]:
    """A tool call with its function's name and its arguments as a map where they are JSON."""
    if not isinstance(call, Mapping):
        raise ValueError(f"tool_calls: expected a map, got {described(call)}")
    call = {key: value for key, value in call.items() if value is not None}
    if not isinstance(call.get("function"), Mapping):
        outside = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call["function"] = outside
    function = dict(call["function"])
    if not isinstance(function.get("name"), str):
        raise ValueError(f"tool_calls: expected a function's name, got {described(call)}")
    arguments = function.get("arguments", {})
    function["arguments"] = parsed(arguments) if isinstance(arguments, str) else arguments
    return {"type": "function"} | call | {"function": function}


def calls_in(content: Any) -> tuple[list | None, Any]:
    """The tool calls written as JSON in a message's content, or the content as it is."""
    found = parsed(content) if isinstance(content, str) else content
    calls = found if isinstance(found, list) else [found]
    if all(isinstance(call, Mapping) and "name" in call for call in calls):
        return calls, None
    return None, content


def parsed(text: str) -> Any:
    """JSON text as what it stands for; any other text as it is."""
    try:
        return json_text.loads(text)
    except ValueError:
        return text


def weight(value: Any) -> float:
    """A weight: 0, or a number of SMALLEST to LARGEST, or true or false."""
    number = isinstance(value, bool | int | float)
    if not number or not (value == 0 or SMALLEST <= value <= LARGEST):
        raise ValueError(
            f"expected a weight of 0, or of {SMALLEST:g} to {LARGEST:g}, got {described(value)}"
        )
    return float(value)


def described(value: Any) -> str:
    """A value in a few words, for messages."""
    kinds = {list: "a list", tuple: "a list", dict: "a map", str: "text", type(None): "null"}
    name = kinds.get(type(value), type(value).__name__)
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    shown = (
        ""
        if value is None
        else f" {str(value)[:60]!r}"
        if isinstance(value, str)
        else (f" {str(value)[:60]}")
    )
    return f"{name}{shown}"
