"""The canonical rows that every known shape of training data becomes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.batch import Example

Message = Mapping[str, Any]
Meta = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Dropped:
    """A row left out of training, and why: `too_long`, `empty_target`, `fully_masked`, …"""

    reason: str
    where: str = ""


REASONS = {
    "empty_messages": "a conversation without messages",
    "empty_prompt": "no prompt",
    "empty_target": "nothing to train on: no assistant's turn with words, or an empty completion",
    "empty_text": "no text",
    "empty_tokens": "no token",
    "ends_differ": "sides of which only some would be cut (data.too_long is keep_start)",
    "fully_masked": "every token in reach has the weight 0 or is masked",
    "identical": "completions that are the same, token by token",
    "malformed": "a row that cannot be read (data.malformed is drop)",
    "misordered": "the chosen completion has the lower score",
    "no_label": "steps of which none has a label",
    "prompts_differ": "completions that are not of the same prompt, as the model would read it",
    "several_turns": "a dialogue in plain text that goes on after the turn that is compared",
    "tie": "completions with the same score",
    "too_long": "longer than data.max_length (data.too_long says what to do with these)",
    "too_many": "more completions than data.most_ranked",
    "too_short": "one token, which has no target",
    "tool_calls_not_rendered": "the chat template leaves out the calls of tools",
    "tools_not_rendered": "the chat template leaves out the tools",
    "unclosed_reasoning": "reasoning that is opened and not closed",
}


class Note(NamedTuple):
    """Something to tell about a row, as `Dropped` tells why it was left out."""

    reason: str
    where: str


class Noted(NamedTuple):
    """The tokens of a row, with what there is to tell about it."""

    example: Example
    notes: tuple[Note, ...]


@dataclasses.dataclass(frozen=True)
class TextRow:
    """Plain text, trained from its second token to its end of text."""

    text: str
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class ChatRow:
    """A conversation.

    `weights` holds one float a message, or None to let the trained roles decide: 0 means that the
    message is read and not trained.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: Sequence[float] | None = None
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class CompletionRow:
    """A prompt that is read and a completion that is trained; both strings or both messages."""

    prompt: str | Sequence[Message]
    completion: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prompt_weight: float = 0.0
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class ReasoningRow:
    """A prompt, the reasoning that leads to the answer, and the answer (chain-of-thought data)."""

    prompt: str | Sequence[Message]
    reasoning: str
    answer: str
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class TokensRow:
    """A sequence that is already tokenised.

    `mask[i]` says whether token i is trained when it is the target, `weights[i]` its importance;
    None stands for "every token" and for 1.
    """

    tokens: Sequence[int]
    mask: Sequence[bool] | None = None
    weights: Sequence[float] | None = None
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """A prompt to be completed by the policy; `meta` holds the columns that a reward reads."""

    prompt: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


class Ids(NamedTuple):
    """A prompt or a completion that is tokenised already."""

    tokens: Sequence[int]


Words = str | Sequence[Message] | Ids


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """Completions of one prompt, the best first.

    Attributes:
      prompt: None where the completions are whole texts, whose common beginning is the prompt.
      completions: two or more.
      scores: of each, where there are some; higher is better.
      margin: of a pair, where it was given.
      begun: the beginning of the assistant's turn, which is read; what is compared is a step after
        it, and has no end-of-turn token. None: whole turns are compared.
    """

    prompt: Words | None
    completions: Sequence[Words]
    scores: Sequence[float] | None = None
    margin: float | None = None
    begun: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class LabelledRow:
    """A prompt and a completion that is desirable, or not."""

    prompt: Words
    completion: Words
    label: bool
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


@dataclasses.dataclass(frozen=True)
class StepsRow:
    """A prompt, the steps of an answer, and how right each is, from 0 to 1; None: not known."""

    prompt: str | Sequence[Message]
    steps: Sequence[str]
    labels: Sequence[float | None]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    meta: Meta = dataclasses.field(default_factory=dict)
    where: str = ""


Row = TextRow | ChatRow | CompletionRow | ReasoningRow | TokensRow
