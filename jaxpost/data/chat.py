"""From rows to tokens, with what is trained of them. Masks come from positions in the text.

Of a conversation, an assistant's turn is found between the template's generation markers, or
without these by rendering the conversation up to the turn and through it: what the second adds is
the turn. Where a template rewrites earlier turns once later ones follow (Qwen3 drops their
reasoning), the turn's content is found by putting other words in its place. A turn that can be
found in no way is an error; nothing is guessed from token ids.

A turn's end-of-turn token is trained with it, and the newline that a template puts after it is not.
"""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxpost.batch import Example
from jaxpost.data import messages as chats
from jaxpost.data.formats import (
    ChatRow,
    CompletionRow,
    Dropped,
    Note,
    Noted,
    PromptRow,
    ReasoningRow,
    Row,
    TextRow,
    TokensRow,
)
from jaxpost.data.tokenizers import Tokenizer
from jaxpost.options import check_ranges, option

Messages = Sequence[Mapping[str, Any]]
Prompted = CompletionRow | PromptRow
PLACEHOLDER = "jaxpostplaceholder"


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """How rows become tokens, and which of these are trained."""

    train_on: Literal["assistant", "last", "all"] = option(
        "assistant", "every assistant turn (the completion), only the last one, or every token"
    )
    reasoning_weight: float = option(
        1.0, "loss weight of reasoning (rows with `reasoning`)", least=0
    )
    answer_weight: float = option(1.0, "loss weight of the answer after the reasoning", least=0)
    reasoning_open: str = option("<think>\n", "text that opens reasoning")
    reasoning_close: str = option("\n</think>\n\n", "text that closes reasoning")
    template_kwargs: dict[str, Any] | None = option(
        None, "further arguments of the chat template, such as {enable_thinking: false}"
    )

    def __post_init__(self):
        check_ranges(self, "chat.")
        for key in ("reasoning_weight", "answer_weight"):
            try:
                chats.weight(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"chat.{key}: {error}") from error


class Span(NamedTuple):
    """Characters `start` … `end`-1 of a text, and the loss weight of the tokens they spell."""

    start: int
    end: int
    weight: float


class Question(NamedTuple):
    """What is asked, as ids, and the text that would be right."""

    prompt: tuple[int, ...]
    answer: str


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """`tokenize`, to be handed to data workers, with a note of special tokens spelt in a row.

    With the model's `vocab_size`, rows with an id that it has no embedding for are dropped, as
    `outside_vocabulary`: a tokenizer may have added tokens above it.
    """

    tokenizer: Tokenizer
    options: ChatOptions
    vocab_size: int | None = None

    def __call__(self, row: Row) -> Example | Noted | Dropped:
        found = tokenize(row, self.tokenizer, self.options)
        if isinstance(found, Dropped):
            return found
        if self.vocab_size is not None and found.tokens.max() >= self.vocab_size:
            return Dropped("outside_vocabulary", row.where)
        spelt = self.tokenizer.spelt_in("\0".join(texts_of(row)))
        if not spelt:
            return found
        return Noted(found, tuple(Note(token, row.where) for token in spelt))


def texts_of(row: Row) -> list[str]:
    """What the people in a row say, without what a template puts around it."""
    if isinstance(row, TextRow):
        return [row.text]
    if isinstance(row, ChatRow):
        return [plain_text(message) for message in row.messages]
    if isinstance(row, TokensRow):
        return []
    rest = [row.completion] if isinstance(row, CompletionRow) else [row.reasoning, row.answer]
    parts = [[part] if isinstance(part, str) else part for part in (row.prompt, *rest)]
    turns = [turn for part in parts for turn in part]
    return [turn if isinstance(turn, str) else plain_text(turn) for turn in turns]


def tokenize(row: Row, tokenizer: Tokenizer, options: ChatOptions) -> Example | Dropped:
    """Tokens of a row, which of them are trained, and with what weight.

    Dropped, for these reasons: `empty_target` (nothing to train on), `fully_masked` (all of it has
    weight 0), `unclosed_reasoning`, `too_short` (a single token has no target),
    `tools_not_rendered` and `tool_calls_not_rendered` (the chat template leaves them out).

    Raises:
      ValueError: the template refuses the row or its turns cannot be found; ids out of range.
    """
    if isinstance(row, TextRow):
        found = text_example(row.text, tokenizer)
    elif isinstance(row, TokensRow):
        found = tokens_example(row, tokenizer)
    elif isinstance(row, ChatRow):
        found = chat_example(row, tokenizer, options)
    elif isinstance(row, CompletionRow):
        found = completion_example(row, tokenizer, options)
    else:
        found = reasoning_example(row, tokenizer, options)
    if isinstance(found, str):
        return Dropped(found, row.where)
    if len(found.tokens) < 2:
        return Dropped("too_short", row.where)
    if not found.mask[1:].any():
        return Dropped("fully_masked", row.where)
    return found


def question(row: Row, tokenizer: Tokenizer, options: ChatOptions) -> Question | None:
    """A row's prompt as the sampler must see it, and the answer; None where it has no such parts.

    Raises:
      ValueError: the template refuses the prompt.
    """
    if isinstance(row, ChatRow):
        *before, last = row.messages
        if last["role"] != "assistant" or not plain_text(last) or not before:
            return None
        row = CompletionRow(before, [last], row.tools, row.template_kwargs, where=row.where)
    if isinstance(row, ReasoningRow):
        row = CompletionRow(row.prompt, row.answer, row.tools, row.template_kwargs, where=row.where)
    if not isinstance(row, CompletionRow):
        return None
    completion = row.completion
    answer = completion if isinstance(completion, str) else plain_text(completion[-1])
    return Question(tuple(prompt_ids(row, tokenizer, options)), answer)


def prompt_ids(row: Prompted, tokenizer: Tokenizer, options: ChatOptions) -> list[int]:
    """The ids that a completion is sampled after: BOS and text, or the template up to a new turn.

    Raises:
      ValueError: the template refuses the prompt.
    """
    if isinstance(row.prompt, str):
        return begin(tokenizer) + without_second_bos(tokenizer.encode(row.prompt), tokenizer)
    kwargs = template_kwargs(row, options)
    try:
        text = tokenizer.render(flat(row.prompt), row.tools, add_generation_prompt=True, **kwargs)
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from error
    return tokenizer.encode(text)


def template_kwargs(row: Any, options: ChatOptions) -> dict[str, Any]:
    return {**(options.template_kwargs or {}), **row.template_kwargs}


def plain_text(message: Mapping[str, Any]) -> str:
    """A message's content as one text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def flat(messages: Messages) -> list[dict[str, Any]]:
    """The messages with their parts put together, as chat templates read them."""
    return [
        {**message, "content": plain_text(message)} if message.get("content") else dict(message)
        for message in messages
    ]


def says_something(message: Mapping[str, Any]) -> bool:
    """Whether a message has words, reasoning or a tool call."""
    others = ("tool_calls", "reasoning_content", "reasoning", "thinking")
    return bool(plain_text(message).strip()) or any(message.get(key) for key in others)


# Plain rows ----------------------------------------------------------------------------------


def begin(tokenizer: Tokenizer) -> list[int]:
    """BOS, if the tokenizer begins its texts with one."""
    return [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []


def finish(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """EOS, unless the ids end in one (of any kind) already."""
    if (ids and ids[-1] in tokenizer.eos_ids) or tokenizer.eos_id is None:
        return []
    return [tokenizer.eos_id]


def without_second_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    return ids[1:] if ids and begin(tokenizer) and ids[0] == tokenizer.bos_id else ids


def text_example(text: str, tokenizer: Tokenizer) -> Example | str:
    """BOS, the text and EOS, all of it trained."""
    ids = without_second_bos(tokenizer.encode(text), tokenizer)
    if not ids:
        return "empty_target"
    ids = begin(tokenizer) + ids
    return example(ids + finish(ids, tokenizer), np.ones(len(ids) + 1, np.float32))


def tokens_example(row: TokensRow, tokenizer: Tokenizer) -> Example | str:
    """A row that is tokenised already.

    Raises:
      ValueError: an id that the vocabulary does not have.
    """
    tokens = np.asarray(row.tokens, np.int64)
    if len(tokens) == 0:
        return "empty_target"
    outside = (tokens < 0) | (tokens >= tokenizer.vocab_size)
    if outside.any():
        place = int(outside.argmax())
        raise ValueError(
            f"{row.where}: token {place} is {tokens[place]}, outside the vocabulary of "
            f"{tokenizer.vocab_size}; was it made with another tokenizer?"
        )
    weights = np.ones(len(tokens), np.float32)
    if row.weights is not None:
        weights = np.asarray(row.weights, np.float32)
    if row.mask is not None:
        weights = np.where(np.asarray(row.mask, bool), weights, 0.0)
    return example(tokens.tolist(), weights)


def example(ids: list[int], weights: Sequence[float] | np.ndarray) -> Example:
    weights = np.asarray(weights, np.float32)[: len(ids)]
    return Example(np.asarray(ids, np.int32), weights > 0, weights)


def completion_example(
    row: CompletionRow, tokenizer: Tokenizer, options: ChatOptions
) -> Example | str:
    """A prompt, and a completion with its end."""
    everything = options.train_on == "all"
    if not isinstance(row.prompt, str) and not isinstance(row.completion, str):
        weights = [row.prompt_weight] * len(row.prompt) + written(row.completion, options)
        turns = ChatRow(
            [*row.prompt, *row.completion],
            row.tools,
            row.template_kwargs,
            None if everything and not row.prompt_weight else weights,
            where=row.where,
        )
        return chat_example(turns, tokenizer, options)
    prompt, completion = str(row.prompt), str(row.completion)
    if not completion.strip():
        return "empty_target"
    if unclosed(completion, options):
        return "unclosed_reasoning"
    weight = row.prompt_weight or float(everything)
    return joined(prompt, [(completion, 1.0)], tokenizer, weight)


def unclosed(completion: str, options: ChatOptions) -> bool:
    """Whether reasoning is opened more often than it is closed."""
    opening, closing = options.reasoning_open.strip(), options.reasoning_close.strip()
    return bool(opening and closing) and completion.count(opening) > completion.count(closing)


def joined(
    prompt: str, parts: Sequence[tuple[str, float]], tokenizer: Tokenizer, prompt_weight: float
) -> Example | str:
    """Prompt and weighted parts of a completion as one sequence.

    They are tokenised together if the prompt's tokens then stand at the beginning, as the sampler
    will give them; otherwise apart.
    """
    start = begin(tokenizer)
    before = without_second_bos(tokenizer.encode(prompt), tokenizer)
    completion = "".join(text for text, _ in parts)
    ids, spans = tokenizer.encode_with_spans(prompt + completion)
    if ids and start and ids[0] == start[0]:
        ids, spans = ids[1:], spans[1:]
    if ids[: len(before)] != before:
        after, spans = tokenizer.encode_inside(completion)
        spans = [(len(prompt) + a, len(prompt) + b) for a, b in spans]
        ids = before + after
        spans = [(0, 0)] * len(before) + spans
    weights = [prompt_weight] * len(before)
    places = part_spans(len(prompt), parts)
    # A token may begin with white space that belongs to the prompt; it is still the completion's.
    spans = [(max(a, len(prompt)), max(b, len(prompt))) for a, b in spans[len(before) :]]
    weights += [weight_at(span, places) for span in spans]
    ids, weights = start + ids, [prompt_weight] * len(start) + weights
    end = finish(ids[len(start) + len(before) :], tokenizer)
    return example(ids + end, weights + [parts[-1][1]] * len(end))


def part_spans(start: int, parts: Sequence[tuple[str, float]]) -> list[Span]:
    spans = []
    for text, weight in parts:
        spans.append(Span(start, start + len(text), weight))
        start += len(text)
    return spans


def weight_at(token: tuple[int, int], spans: Sequence[Span]) -> float:
    """The weight of the span that holds a token's first character; 0 outside all."""
    for span in spans:
        if span.start <= token[0] < span.end:
            return span.weight
    return spans[-1].weight if spans and token[0] == spans[-1].end == token[1] else 0.0


def reasoning_example(
    row: ReasoningRow, tokenizer: Tokenizer, options: ChatOptions
) -> Example | str:
    """Reasoning between its tags, then the answer, each with its own weight.

    Raises:
      ValueError: the chat template drops the reasoning.
    """
    if not row.answer.strip():
        return "empty_target"
    reasoning = options.reasoning_open + row.reasoning + options.reasoning_close
    parts = [(reasoning, options.reasoning_weight), (row.answer, options.answer_weight)]
    if isinstance(row.prompt, str):
        return joined(row.prompt, parts, tokenizer, float(options.train_on == "all"))
    content = [{"type": "text", "text": text, "weight": weight} for text, weight in parts]
    turns = [*row.prompt, {"role": "assistant", "content": content}]
    weights = [0.0] * len(row.prompt) + [1.0]
    chat = ChatRow(turns, row.tools, row.template_kwargs, weights, where=row.where)
    return chat_example(chat, tokenizer, options, rest=float(options.train_on == "all"))


# Conversations -------------------------------------------------------------------------------


def chat_example(
    row: ChatRow, tokenizer: Tokenizer, options: ChatOptions, rest: float = 0.0
) -> Example | str:
    """A conversation through the chat template; `rest` is the weight of what no message claims."""
    weights = message_weights(row, options)
    trained = [message for message, weight in zip(row.messages, weights, strict=True) if weight]
    if any(m["role"] == "assistant" and unclosed(plain_text(m), options) for m in trained):
        return "unclosed_reasoning"
    render = Render(
        flat(row.messages), row.tools, template_kwargs(row, options), tokenizer, row.where
    )
    text, marked = render.whole()
    if lost := left_out(render, text):
        return lost
    if options.train_on == "all" and row.weights is None:
        ids = tokenizer.encode(text)
        end = finish_turns(ids, tokenizer)
        return example(ids + end, [1.0] * (len(ids) + len(end)))
    if not any(weights):
        return "fully_masked" if row.weights is not None else "empty_target"
    if not any(map(says_something, trained)):
        return "empty_target"
    spans: list[Span] = []
    turns = turn_spans(render, text, marked, weights)
    check_reasoning(row, text, turns[-1], options)
    for index, turn in enumerate(turns):
        if turn is not None:
            content = row.messages[index].get("content")
            spans += content_spans(render, text, index, content, weights[index], turn)
    return spans_example(text, spans, tokenizer, rest)


def left_out(render: "Render", text: str) -> str | None:
    """Why to drop a conversation whose tools or tool calls leave no trace in its text."""
    if render.tools and dataclasses.replace(render, tools=None).text(render.messages) == text:
        return "tools_not_rendered"
    calls = [
        (index, place)
        for index, message in enumerate(render.messages)
        for place in range(len(message.get("tool_calls") or ()))
    ]
    if any(without_call(render, *call) == text for call in calls):
        return "tool_calls_not_rendered"
    return None


def without_call(render: "Render", index: int, place: int) -> str | None:
    """The text of a conversation without one of its tool calls."""
    calls = render.messages[index]["tool_calls"]
    fewer = {**render.messages[index], "tool_calls": [*calls[:place], *calls[place + 1 :]]}
    return render.text([*render.messages[:index], fewer, *render.messages[index + 1 :]])


def check_reasoning(
    row: ChatRow, text: str, turn: tuple[int, int] | None, options: ChatOptions
) -> None:
    """Refuses a template that drops the reasoning of the last turn, which would not be trained."""
    closing = options.reasoning_close.strip()
    if turn is None or not closing or closing not in plain_text(row.messages[-1]):
        return
    if closing not in text[slice(*turn)]:
        raise ValueError(
            f"{row.where}: the chat template leaves out the reasoning of the last message (all up "
            f"to {closing}), so it would not be trained; use a template that keeps it"
        )


def message_weights(row: ChatRow, options: ChatOptions) -> list[float]:
    """One weight a message: the row's own, or 1 on the assistant's (all of them, or the last)."""
    if row.weights is not None:
        return list(row.weights)
    return written(row.messages, options)


def written(messages: Messages, options: ChatOptions) -> list[float]:
    """1 on the assistant's messages (all of them, or the last), 0 on others."""
    weights = [1.0 if message["role"] == "assistant" else 0.0 for message in messages]
    if options.train_on == "last" and any(weights):
        last = len(weights) - 1 - weights[::-1].index(1.0)
        weights = [1.0 if i == last else 0.0 for i in range(len(weights))]
    return weights


@dataclasses.dataclass(frozen=True)
class Render:
    """One conversation and its template."""

    messages: Messages
    tools: Any
    kwargs: Mapping[str, Any]
    tokenizer: Tokenizer
    where: str

    def whole(self) -> tuple[str, list[tuple[int, int]]]:
        try:
            return self.tokenizer.render_with_spans(self.messages, self.tools, **self.kwargs)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def text(self, messages: Messages, prompt: bool = False) -> str | None:
        """The text of other messages, or None where the template refuses them."""
        try:
            return self.tokenizer.render(
                messages, self.tools, add_generation_prompt=prompt, **self.kwargs
            )
        except ValueError:
            return None


def turn_spans(
    render: Render, text: str, marked: list[tuple[int, int]], weights: Sequence[float]
) -> list[tuple[int, int] | None]:
    """Where in the text each message with a weight stands; None for those without.

    Raises:
      ValueError: the template has no markers, and changes what it rendered before; or its markers
        are not of one turn each.
    """
    known = marked_turns(render, marked) if marked else {}
    spans: list[tuple[int, int] | None] = [None] * len(weights)
    for index, weight in enumerate(weights):
        if weight == 0:
            continue
        if marked and index not in known and render.messages[index]["role"] == "assistant":
            raise ValueError(
                f"{render.where}: message {index} (assistant) stands between no {{% generation %}} "
                "markers, and others do; mark it in the chat template, or give it the weight 0"
            )
        found = (
            known.get(index) or by_prefix(render, text, index) or by_content(render, text, index)
        )
        if found is None:
            raise ValueError(
                f"{render.where}: message {index} ({render.messages[index]['role']}) cannot be "
                "found in what the chat template makes of the conversation: the template has no "
                "{% generation %} markers for it and rewrites what came before. Add the markers "
                "around the assistant's words in the template, or give prompt/completion rows"
            )
        spans[index] = trimmed(text, with_end(text, found, render.tokenizer), render.tokenizer)
    return spans


def marked_turns(render: Render, marked: list[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """The markers around each assistant's turn: those that hold other words put in its place.

    Raises:
      ValueError: markers that hold no turn, several, or a part of one.
    """
    assistants = [i for i, m in enumerate(render.messages) if m["role"] == "assistant"]
    names = {i: f"{PLACEHOLDER}{i}x" for i in assistants}
    other = [
        renamed(message, names[i]) if i in names else message
        for i, message in enumerate(render.messages)
    ]
    text, marks = dataclasses.replace(render, messages=other).whole()
    owners = [[i for i in assistants if names[i] in text[slice(*mark)]] for mark in marks]
    if len(marks) == len(marked):
        # A turn without words is told by its place among the others.
        if len(marked) == len(assistants) and all(
            own == [i] or (not own and names[i] not in text)
            for own, i in zip(owners, assistants, strict=True)
        ):
            return dict(zip(assistants, marked, strict=True))
        if all(len(own) == 1 for own in owners) and len({i for (i,) in owners}) == len(owners):
            return {i: mark for (i,), mark in zip(owners, marked, strict=True)}
    raise ValueError(
        f"{render.where}: the chat template puts {len(marked)} pairs of {{% generation %}} markers "
        f"into a conversation of {len(assistants)} assistant turns, and they are not one pair "
        "around each turn; change its markers, or take them out"
    )


def renamed(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A message with a name for its words or, without any, for the function it calls."""
    if message.get("content"):
        return {**message, "content": name}
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {
        **message,
        "tool_calls": [{**call, "function": {**call["function"], "name": name}} for call in calls],
    }


def by_prefix(render: Render, text: str, index: int) -> tuple[int, int] | None:
    """The turn as what the rendering through it adds to the prompt for it."""
    if render.messages[index]["role"] != "assistant":
        return None
    before = render.text(render.messages[:index], prompt=True)
    through = render.text(render.messages[: index + 1])
    if before is None or through is None:
        return None
    if not (through.startswith(before) and text.startswith(through)):
        return None
    return (len(before), len(through)) if len(through) > len(before) else None


def by_content(render: Render, text: str, index: int) -> tuple[int, int] | None:
    """The words of a turn, as what changes in the text when other words take their place."""
    message = render.messages[index]
    content, calls = message.get("content") or "", message.get("tool_calls")
    words = {k: v for k, v in message.items() if k != "tool_calls"} | {"content": PLACEHOLDER}
    other = [*render.messages[:index], words, *render.messages[index + 1 :]]
    changed = render.text(other)
    if changed is None or changed.count(PLACEHOLDER) != 1:
        return None
    start = changed.index(PLACEHOLDER)
    after = changed[start + len(PLACEHOLDER) :]
    if text[:start] != changed[:start] or not text.endswith(after):
        return None
    end = len(text) - len(after)
    if end < start or not (calls or text[start:end].strip() in content):
        return None
    return start, end


def with_end(text: str, span: tuple[int, int], tokenizer: Tokenizer) -> tuple[int, int]:
    """The span, and the end-of-turn token if this comes next; white space may stand between."""
    start, end = span
    ids = tokenizer.encode(text[start:end].rstrip())
    if ids and ids[-1] in tokenizer.eos_ids:
        return span
    after = text[end:].lstrip()
    ids, places = tokenizer.encode_with_spans(after[:200])
    if ids and ids[0] in tokenizer.eos_ids:
        end = len(text) - len(after) + places[0][1]
    return start, end


def trimmed(text: str, span: tuple[int, int], tokenizer: Tokenizer) -> tuple[int, int]:
    """The span without white space after its end-of-turn token, if it has one."""
    start, end = span
    bare = text[start:end].rstrip()
    ids = tokenizer.encode(bare)
    ends = bool(ids) and ids[-1] in tokenizer.eos_ids
    return (start, start + len(bare)) if ends else span


def content_spans(
    render: Render, text: str, index: int, content: Any, weight: float, turn: tuple[int, int]
) -> list[Span]:
    """The turn with its weight, or its parts with theirs; what is in no part has its neighbour's.

    Raises:
      ValueError: the template changed the parts, or they cannot be found.
    """
    if content is None or isinstance(content, str):
        return [Span(*turn, weight)]
    words = "".join(part["text"] for part in content)
    start, end = by_content(render, text, index) or only_place(text, words, turn)
    shown = text[start:end]
    if shown.strip() != words.strip() or shown not in words:
        raise ValueError(
            f"{render.where}: the chat template changes or repeats message {index}, whose parts "
            f"have weights of their own, so they cannot be told apart in it: {words[:40]!r}"
        )
    edges = [start - words.index(shown)]
    for part in content:
        edges.append(edges[-1] + len(part["text"]))
    edges = [turn[0], *(min(max(edge, start), end) for edge in edges[1:-1]), turn[1]]
    return [
        Span(a, b, weight * part.get("weight", 1.0))
        for part, (a, b) in zip(content, itertools.pairwise(edges), strict=True)
        if a < b
    ]


def only_place(text: str, words: str, turn: tuple[int, int]) -> tuple[int, int]:
    """Where words stand in a turn, if they do so once; nowhere else."""
    words = words.strip()
    start = text.find(words, *turn)
    once = start >= 0 and text.find(words, start + 1, turn[1]) < 0
    return (start, start + len(words)) if once else (turn[0], turn[0])


def spans_example(
    text: str, spans: Sequence[Span], tokenizer: Tokenizer, rest: float = 0.0
) -> Example:
    """Tokens of a text in which some spans have weights, and what is in none has `rest`.

    The text is tokenised as a whole; if a token straddles the beginning of a span, the sampler
    could not have stopped there, so the text is tokenised in pieces that begin where spans do.
    """
    ids, places = tokenizer.encode_with_spans(text)
    starts = sorted({span.start for span in spans})
    following = (bisect.bisect_right(starts, a) for a, _ in places)
    if any(starts[i] < b for i, (_, b) in zip(following, places, strict=True) if i < len(starts)):
        ids, places = in_pieces(text, starts, tokenizer)
    weights = weights_within(places, sorted(spans), rest)
    end = finish_turns(ids, tokenizer) if spans and spans[-1].end == len(text) else []
    return example(ids + end, weights + [spans[-1].weight] * len(end))


def in_pieces(
    text: str, starts: Sequence[int], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    ids: list[int] = []
    places: list[tuple[int, int]] = []
    for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
        encode = tokenizer.encode_inside if start else tokenizer.encode_with_spans
        some, found = encode(text[start:end])
        ids += some
        places += [(start + a, start + b) for a, b in found]
    return ids, places


def weights_within(
    places: Sequence[tuple[int, int]], spans: Sequence[Span], rest: float
) -> list[float]:
    """For each token the weight of the span in which it begins; `rest` outside all.

    The spans are apart and in order.
    """
    starts = [span.start for span in spans]
    owners = (bisect.bisect_right(starts, a) - 1 for a, _ in places)
    return [
        spans[i].weight if i >= 0 and a < spans[i].end else rest
        for i, (a, _) in zip(owners, places, strict=True)
    ]


def finish_turns(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """EOS, if a conversation's last words end neither in one nor in one and white space."""
    text = tokenizer.decode(ids[-8:])
    tail = tokenizer.encode(re.sub(r"\s+$", "", text))
    return finish(tail, tokenizer)
