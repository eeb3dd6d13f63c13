"""What a verifier is asked about a solution, and the two answers that it may give."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpost.data import chat
from jaxpost.data.rows import Message, PromptRow
from jaxpost.data.tokenizers import Tokenizer

QUESTION = """Question:
{prompt}

Solution:
{completion}

Is the solution correct? Answer YES or NO.
"""
ANSWERS = ("YES", "NO")
KIND = "generative_verifier"
PLACES = re.compile(r"\{(prompt|completion)\}")


@dataclasses.dataclass(frozen=True)
class Question:
    """A text with {prompt} and {completion} in it, and the answers for right and wrong.

    Attributes:
      as_chat: whether it is a user's turn; None: where the tokenizer has a chat template.
      template_kwargs: further arguments of that template.

    Raises:
      ValueError: a place is missing in the text, or the answers are not two different ones.
    """

    text: str = QUESTION
    answers: tuple[str, ...] = ANSWERS
    as_chat: bool | None = None
    template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        missing = [n for n in ("{prompt}", "{completion}") if n not in self.text]
        if missing:
            raise ValueError(f"the question has no {' and no '.join(missing)} in it")
        if len(self.answers) != 2 or len({*self.answers}) != 2 or not all(self.answers):
            raise ValueError(
                f"the answers are {list(self.answers)}; give two different texts, for right and "
                "wrong"
            )

    def tokens(
        self, tokenizer: Tokenizer, prompt: str | Sequence[Message], said: str | Sequence[Message]
    ) -> list[int]:
        """The question about one solution, up to where its answer begins.

        Special tokens spelt in prompt or solution are left out: none may end the question.
        """
        parts = {"prompt": words(prompt), "completion": words(said)}
        parts = {name: without_special(text, tokenizer) for name, text in parts.items()}
        text: Any = PLACES.sub(lambda found: parts[found[1]], self.text)
        if self.is_chat(tokenizer):
            text = [{"role": "user", "content": text}]
        options = chat.ChatOptions(template_kwargs=self.template_kwargs)
        return chat.prompt_ids(PromptRow(text, where="a question"), tokenizer, options)

    def is_chat(self, tokenizer: Tokenizer) -> bool:
        """Whether the question is a user's turn."""
        return bool(tokenizer.chat_template) if self.as_chat is None else self.as_chat

    def answer_ids(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """The first tokens of the answers for right and wrong.

        Raises:
          ValueError: they are the same token.
        """
        right, wrong = (tokenizer.encode_inside(answer)[0][0] for answer in self.answers)
        if right == wrong:
            raise ValueError(
                f"the answers {' and '.join(self.answers)} begin with the same token, "
                f"{tokenizer.decode([right])!r}, which is all that a verdict is read from; choose "
                "others (data.answers)"
            )
        return right, wrong

    def note(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What a verifier's folder says of itself, for `from_note`."""
        return {
            "kind": KIND,
            "question": self.text,
            "answers": list(self.answers),
            "answer_ids": list(self.answer_ids(tokenizer)),
            "as_chat": self.is_chat(tokenizer),
            "template_kwargs": self.template_kwargs,
        }


DEFAULT = Question()


def from_note(note: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> Question:
    """The question that a verifier's folder notes.

    Raises:
      ValueError: it notes none, or the tokenizer has other tokens for its answers.
    """
    if note.get("kind") != KIND:
        raise ValueError(f"{where} is no generative verifier: its config.json does not say so")
    try:
        given = note["as_chat"], note["template_kwargs"]
        found = Question(note["question"], tuple(note["answers"]), *given)
        noted = tuple(note["answer_ids"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{where}/config.json: the note on its verifier lacks {error}") from error
    if found.answer_ids(tokenizer) != noted:
        raise ValueError(
            f"{where}: its verdicts are read from the tokens {list(noted)}, and its tokenizer "
            f"spells its answers with {list(found.answer_ids(tokenizer))}: one of them was changed"
        )
    return found


def without_special(text: str, tokenizer: Tokenizer) -> str:
    """A text that spells no special token, also not once others are gone from it."""
    while found := tokenizer.spelt_in(text):
        for word in found:
            text = text.replace(word, "")
    return text


def words(said: str | Sequence[Message]) -> str:
    """Text as it is; one message as its words, several with the role of each before them."""
    if isinstance(said, str):
        return said
    texts = [(message["role"], words_of(message)) for message in said]
    if len(texts) == 1:
        return texts[0][1]
    return "\n\n".join(f"{role}: {text}" for role, text in texts)


def words_of(message: Message) -> str:
    """What a message says, and the tools that it calls."""
    calls = [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (chat.plain_text(message), *calls) if part)
