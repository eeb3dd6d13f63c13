"""How a configuration key is declared: a default, help, a unit, and the numbers that it takes."""

import dataclasses
import math
from typing import Any


def largest(number: int | float) -> int | float:
    """What 32 bits hold of numbers like this one (of floats: about)."""
    return 2**31 - 1 if isinstance(number, int) else 3.4e38


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a key takes. NaN, infinity and what 32 bits do not hold are in none."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def __contains__(self, number: int | float) -> bool:
        fits = number <= largest(number)
        return fits and self.least <= number <= self.most and self.above < number < self.below

    def __str__(self) -> str:
        ends = {
            "at least": self.least,
            "above": self.above,
            "below": self.below,
            "at most": self.most,
        }
        return " and ".join(f"{word} {end}" for word, end in ends.items() if math.isfinite(end))

    def refuses(self, key: str, number: Any) -> str | None:
        """What is wrong with a key's number, if anything is; null and text are not looked at."""
        if isinstance(number, bool) or not isinstance(number, int | float) or number in self:
            return None
        most = largest(number)
        limit = f", and no more than {most}" if number > most else ""
        return f"{key} is {number}; it must be {self}{limit}"


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    unit: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Any:
    """A dataclass field that `jaxpost train CONFIG --help` can explain.

    Without `default` the key is required. Nested dataclasses are given as an instance (they are
    frozen, so sharing one is safe). Numbers outside `least` (or `above`) to `most` (or `below`) are
    refused: by line, when a file is read, and by the class itself where it calls `check_ranges`.
    """
    ends = {"least": least, "above": above, "below": below, "most": most}
    given = {name: end for name, end in ends.items() if end is not None}
    metadata = {"help": help, "unit": unit, "range": Range(**given) if given else None}
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(config: Any, part: str = "") -> None:
    """Raises ValueError for the first number of a dataclass outside the range of its key.

    `part` stands before the key's name: `optimizer.`.
    """
    for field in dataclasses.fields(config):
        within = field.metadata.get("range")
        wrong = within and within.refuses(part + field.name, getattr(config, field.name))
        if wrong:
            raise ValueError(wrong)
