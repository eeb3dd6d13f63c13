"""How a configuration key is declared: a default, a sentence of help, a unit where it has one."""

import dataclasses
from typing import Any


def option(default: Any = dataclasses.MISSING, help: str = "", unit: str = "") -> Any:
    """A dataclass field that `jaxpost train CONFIG --help` can explain.

    Without `default` the key is required. Nested dataclasses are given as an instance (they are
    frozen, so sharing one is safe).
    """
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit})
