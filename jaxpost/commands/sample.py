"""`jaxpost sample MODEL`: completions, streamed as they come, or a chat at the terminal."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpost import rollout
from jaxpost.commands import compile_cache, models, usage
from jaxpost.config import ConfigError
from jaxpost.data import chat, formats
from jaxpost.typing import Array

Conversation = list[dict[str, Any]]


class Talk(NamedTuple):
    """A model, and how it is sampled."""

    opened: models.Opened
    options: argparse.Namespace
    how: chat.ChatOptions

    def reply(self, prompt: str | Conversation, key: Array) -> Iterator[str]:
        """The completion of a text or conversation, in pieces."""
        opened, options = self.opened, self.options
        row = formats.CompletionRow(prompt, "")
        asked = chat.question(row, opened.tokenizer, self.how)
        assert asked is not None
        length, most = len(asked.prompt), opened.model.config.max_positions
        if length >= most:
            raise ConfigError(f"the prompt has {length} tokens, and the model takes {most} in all")
        return rollout.stream(
            opened.model,
            opened.params,
            opened.tokenizer,
            asked.prompt,
            key,
            max_new_tokens=min(options.max_tokens, most - length),
            stop_strings=options.stop,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
        )


def main(argv: Sequence[str]) -> int:
    """Samples, or talks."""
    options = read(argv)
    if options.prompt is None and not options.chat and not sys.stdin.isatty():
        options.prompt = [read_prompt()]
    compile_cache.use_compile_cache()
    opened = models.open_model(
        options.model, step=options.step, dtype=options.dtype, adapter=options.adapter
    )
    talk, key = Talk(opened, options, opened.chat), jax.random.key(options.seed)
    templated = opened.tokenizer.chat_template is not None
    if not templated and (options.chat or options.system is not None):
        raise ConfigError(f"{options.model} has no chat template; it can only continue a --prompt")
    if options.chat or (options.prompt is None and templated and sys.stdin.isatty()):
        return converse(talk, key)
    for number, prompt in enumerate(options.prompt or [read_prompt()]):
        plain = options.raw or not templated
        asked = prompt if plain else [*opening(options.system), user(prompt)]
        write(talk.reply(asked, jax.random.fold_in(key, number)))
    return 0


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = usage.sample()
    options = parser.parse_args(argv)
    if options.chat and (options.prompt is not None or options.raw):
        parser.error("--chat reads what you type; leave --prompt and --raw out")
    if options.raw and options.system is not None:
        parser.error("--raw uses no chat template, so it has no place for --system")
    return options


def read_prompt() -> str:
    """Standard input as one prompt."""
    prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("there is no prompt: standard input is empty; give --prompt TEXT")
    return prompt


def converse(talk: Talk, key: Array) -> int:
    """A conversation at the terminal, until its end."""
    messages = opening(talk.options.system)
    turn = 0
    while (said := ask()) is not None:
        if said == "/reset":
            messages = opening(talk.options.system)
        elif said.startswith("/"):
            print("/reset forgets the conversation, /quit ends it", file=sys.stderr)
        elif said:
            tried = [*messages, user(said)]
            try:
                reply = talk.reply(tried, jax.random.fold_in(key, turn))
            except ConfigError as error:
                print(f"{error}; /reset begins anew", file=sys.stderr)
                continue
            answer = write(reply, interruptible=True)
            messages = [*tried, {"role": "assistant", "content": answer}]
            turn += 1
    if not turn and not sys.stdin.isatty():
        raise ConfigError("nothing was said: --chat reads turns from standard input, one a line")
    return 0


def ask() -> str | None:
    """The next line typed, or None at the end."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
        if not sys.stdin.isatty():
            print(f"> {said}")  # as it would stand at a terminal
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if said in ("/quit", "/exit") else said


def opening(system: str | None) -> Conversation:
    """The messages that a conversation begins with."""
    return [] if system is None else [{"role": "system", "content": system}]


def user(said: str) -> Mapping[str, Any]:
    """A turn of the user's."""
    return {"role": "user", "content": said}


def write(pieces: Iterator[str], *, interruptible: bool = False) -> str:
    """Prints a reply as it comes, and returns it; Ctrl-C may end it early."""
    reply = ""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            reply += piece
    except KeyboardInterrupt:
        if not interruptible:
            raise
    print(flush=True)
    return reply
