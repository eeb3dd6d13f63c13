"""An argument parser whose errors are configuration errors, with the nearest option to a slip."""

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from jaxpost.config import ConfigError, names
from jaxpost.options import Range

DTYPES = ("float32", "bfloat16", "float16")


class Parser(argparse.ArgumentParser):
    """`argparse`'s, for one verb."""

    def __init__(self, verb: str, description: str):
        super().__init__(
            prog=f"jaxpost {verb}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError, so that wrong usage leaves with the code of configuration errors."""
        unknown = re.match(r"unrecognized arguments: (-[\w-]+)", message)
        near = names.nearest(unknown[1], self._option_string_actions) if unknown else []
        raise ConfigError(f"{message}{names.did_you_mean(near) or f'; see {self.prog} --help'}")


def within(kind: type[int] | type[float], **ends: float) -> Callable[[str], Any]:
    """The type of an option that takes the numbers of a `Range`."""
    numbers = Range(**ends)

    def read(text: str) -> int | float:
        number = kind(text)
        wrong = numbers.refuses("it", number)
        if wrong:
            raise argparse.ArgumentTypeError(wrong)
        return number

    read.__name__ = kind.__name__  # what argparse calls it, where the text is no number
    return read


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of verbs that load a model."""
    parser.add_argument("--adapter", help="a PEFT adapter to put on MODEL")
    parser.add_argument("--step", default="latest", help="of a run: latest, best or a number")
    dtype_option(parser)


def dtype_option(parser: argparse.ArgumentParser) -> None:
    """The type of the parameters."""
    text = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]} (default: as stored)"
    parser.add_argument("--dtype", choices=DTYPES, metavar="TYPE", help=text)
