"""`jaxpost sample MODEL`: completions, streamed as they come, or a chat at the terminal."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpost import rollout
from jaxpost.commands import arguments, compile_cache, models
from jaxpost.config import ConfigError
from jaxpost.data import chat, formats
from jaxpost.typing import Array

DESCRIPTION = """Writes a model's completion of each prompt as it comes, or talks with you.

MODEL is a Hugging Face folder or hub id, a run's folder, or a checkpoint. Prompts come from
--prompt, or else from standard input (as one prompt); at a terminal, without --prompt, a chat
begins. They go through the model's chat template, where it has one, as the user's turn.

In a chat, /reset forgets the conversation, /quit (or Ctrl-D) ends it, and Ctrl-C ends a reply."""

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
    compile_cache.use_compile_cache()
    opened = models.open_model(
        options.model, step=options.step, dtype=options.dtype, adapter=options.adapter
    )
    how = chat.ChatOptions() if opened.config is None else opened.config.chat
    talk, key = Talk(opened, options, how), jax.random.key(options.seed)
    templated = opened.tokenizer.chat_template is not None
    if not templated and (options.chat or options.system is not None):
        raise ConfigError(f"{options.model} has no chat template; it can only continue a --prompt")
    if options.chat or (options.prompt is None and templated and sys.stdin.isatty()):
        return converse(talk, key)
    prompts = [sys.stdin.read()] if options.prompt is None else options.prompt
    for number, prompt in enumerate(prompts):
        plain = options.raw or not templated
        asked = prompt if plain else [*opening(options.system), user(prompt)]
        write(talk.reply(asked, jax.random.fold_in(key, number)))
    return 0


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = arguments.Parser("sample", DESCRIPTION)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--chat", action="store_true", help="talk at the terminal")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as plain text")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest reply (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0 is greedy (default: 0.7)")
    parser.add_argument("--top-k", type=int, help="draw from the k most probable tokens")
    parser.add_argument("--top-p", type=float, help="draw from the most probable of this mass")
    parser.add_argument("--min-p", type=float, help="least probability, as a share of the highest")
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends a reply; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    arguments.add_model_options(parser)
    options = parser.parse_args(argv)
    if options.chat and (options.prompt is not None or options.raw):
        parser.error("--chat reads what you type; leave --prompt and --raw out")
    if options.raw and options.system is not None:
        parser.error("--raw uses no chat template, so it has no place for --system")
    if options.max_tokens < 1:
        parser.error(f"--max-tokens {options.max_tokens}: give at least 1")
    return options


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
    return 0


def ask() -> str | None:
    """The next line typed, or None at the end."""
    try:
        said = input("> " if sys.stdin.isatty() else "").strip()
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
