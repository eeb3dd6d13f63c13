"""An argument parser whose errors are configuration errors, with the nearest option to a slip."""

import argparse
import re
from typing import NoReturn

from jaxpost.config import ConfigError, names


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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of verbs that load a model."""
    parser.add_argument("--adapter", help="a PEFT adapter to put on MODEL")
    parser.add_argument("--step", default="latest", help="of a run: latest, best or a number")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as stored)")
