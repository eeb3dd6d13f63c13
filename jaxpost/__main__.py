"""The command line: `jaxpost VERB ...`, or `python -m jaxpost VERB ...`.

Only the module of the verb that is asked for is imported, so that `--help` is quick.
"""

import importlib
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from jaxpost.commands import usage
from jaxpost.config import ConfigError, names

VERBS = {
    "train": "run a recipe: jaxpost train CONFIG [key=value ...]",
    "quickstart": "train a small model from nothing in minutes, on two CPU cores",
    "sample": "completions of a prompt, or a chat at the terminal",
    "eval": "loss, perplexity, token accuracy and exact match on a data file",
    "inspect": "one batch as the model sees it: tokens, masks, weights, what was dropped",
    "convert": "GGUF, adapters and checkpoints to a Hugging Face folder",
    "best": "best of n, pass@n and votes among a model's completions, by any scorer",
    "reject": "rejection sampling: the completions that pass, as rows to fine-tune on",
    "pairs": "sessions of an agent, or answers in steps, to preference pairs or labels of steps",
    "label": "labels of a solution's steps, from completions that a model begins after each",
}
DONE, ERROR, USAGE, RESUMABLE, INTERRUPTED = 0, 1, 2, 75, 130
HELP = """usage: jaxpost VERB ...

Post-training of language models in JAX.

verbs:
{verbs}

`jaxpost VERB --help` explains a verb, `jaxpost train CONFIG --help` every key of a configuration.
--traceback (or JAXPOST_TRACEBACK=1) shows where an error came from.

exit codes:
  {done:<4} done
  {error:<4} error
  {usage:<4} wrong usage or configuration
  {resumable:<4} stopped on request and resumable: run the same command again
  {interrupted:<4} interrupted

environment:
  JAXPOST_CACHE_DIR  where compiled programs are kept (default: ~/.cache/jaxpost); none: nowhere
  GLIBC_TUNABLES     where it is unset (Linux), huge pages are asked for: an update on a CPU then
                     takes about a tenth less time
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show = "--traceback" in arguments or os.environ.get("JAXPOST_TRACEBACK", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--traceback"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="", file=sys.stdout if arguments else sys.stderr)
        return DONE if arguments else fail("name a verb, as in jaxpost quickstart", USAGE)
    verb, *rest = arguments
    if verb == "--version":
        return version()
    if verb not in VERBS:
        near = names.did_you_mean(names.nearest(verb, VERBS))
        return fail(f"there is no verb {verb!r}{near or '; see jaxpost --help'}", USAGE)
    if verb in usage.PARSERS and {"-h", "--help"} & set(rest):
        print(usage.PARSERS[verb]().format_help(), end="")
        return DONE
    if argv is None:
        use_huge_pages()
    # XLA reads this when it loads: its notes on cached programs say nothing that one can act on.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(format="%(message)s")  # warnings, where no run takes them
    keep_interrupts()
    try:
        return importlib.import_module(f"jaxpost.commands.{verb}").main(rest)
    except ConfigError as error:
        return fail(str(error), USAGE, show)
    except SystemExit as leaving:  # argparse, after --help
        return leaving.code if isinstance(leaving.code, int) else ERROR
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED, show)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if show or not on_purpose(error):
            raise
        return fail(
            f"{error or type(error).__name__}\n(--traceback shows where this came from)", ERROR
        )


def use_huge_pages() -> None:
    """Starts this process over with glibc's memory in huge pages (Linux; before anything is done).

    On a CPU XLA takes its temporaries from the system at every step: a tenth of an update went into
    page faults. glibc reads its settings once, when a process starts. Your own GLIBC_TUNABLES stay.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        sys.stdout.flush()
        os.execv(sys.executable, sys.orig_argv)


def keep_interrupts() -> None:
    """Lets a Ctrl-C come again that Python could only report and forget.

    It does so where the exception is raised in a callback, and JAX has one that every garbage
    collection calls.
    """
    if sys.unraisablehook is not sys.__unraisablehook__:
        return

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            # A moment later, when that callback is over.
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def on_purpose(error: BaseException) -> bool:
    """Whether an error is a message to the user rather than a fault of the program.

    It is one if this package raised it itself (a `raise` statement of ours is where it started),
    or if the operating system refused something, which names the file.
    """
    if isinstance(error, OSError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(os.path.abspath(__file__)) + os.sep
    if not frames or not os.path.abspath(frames[-1].filename).startswith(here):
        return False
    expected = (ValueError, RuntimeError, ImportError, ArithmeticError)
    return isinstance(error, expected) and (frames[-1].line or "").startswith("raise")


def fail(message: str, code: int, show_traceback: bool = False) -> int:
    """Says what went wrong, and returns the exit code."""
    if show_traceback:
        traceback.print_exc()
    print(f"jaxpost: {message}", file=sys.stderr)
    return code


def help_text() -> str:
    """What `jaxpost --help` prints."""
    verbs = "\n".join(f"  {verb:<11} {said}" for verb, said in VERBS.items())
    return HELP.format(
        verbs=verbs,
        done=DONE,
        error=ERROR,
        usage=USAGE,
        resumable=RESUMABLE,
        interrupted=INTERRUPTED,
    )


def version() -> int:
    """Prints the version."""
    from importlib import metadata

    print(f"jaxpost {metadata.version('jaxpost')}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
