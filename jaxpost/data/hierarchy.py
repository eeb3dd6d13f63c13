"""Pairs of three kinds: whole trajectories, suffixes of them, groups of actions (HPL)."""

import dataclasses

from jaxpost.data import preference_rows, sources
from jaxpost.data.preference_config import PairConfig, ReadingConfig
from jaxpost.data.preference_stream import phases_of
from jaxpost.data.sources import Paths
from jaxpost.options import check_ranges, option

KINDS = ("trajectory", "suffix", "group")


@dataclasses.dataclass(frozen=True)
class Level:
    """Files of pairs of one kind, and how much of an update they are."""

    train: Paths = option(help="as `data.train` of recipe dpo")
    eval: Paths | None = option(None, "held-out files, as `train`; null: none")
    pairs: int = option(8, "pairs of an update", "pairs", least=1)
    weight: float = option(1.0, "weight of their mean loss in the update's", above=0)

    def __post_init__(self):
        check_ranges(self)
        for name in ("train", "eval"):
            sources.check_paths(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Levels:
    """The kinds of pair; at least one is given."""

    trajectory: Level | None = option(None, "pairs of whole sessions; null: none")
    suffix: Level | None = option(None, "pairs of all that follows a step; null: none")
    group: Level | None = option(None, "pairs of groups of actions; null: none")


@dataclasses.dataclass(frozen=True)
class HierarchyConfig(ReadingConfig, Levels):
    """Files of pairs of up to three kinds, all read in the same way."""

    def __post_init__(self):
        super().__post_init__()
        if not self.levels:
            raise ValueError(f"data has no pairs: set one of {', '.join(KINDS)}")

    @property
    def levels(self) -> dict[str, Level]:
        """Those that are given, by kind."""
        found = {"trajectory": self.trajectory, "suffix": self.suffix, "group": self.group}
        return {kind: level for kind, level in found.items() if level is not None}

    def pairs(self, kind: str) -> PairConfig:
        """The files of one kind, as a recipe on pairs has them."""
        level = self.levels[kind]
        reading = {f.name: getattr(self, f.name) for f in dataclasses.fields(ReadingConfig)}
        return PairConfig(train=level.train, eval=level.eval, **reading)

    @property
    def train(self) -> tuple[str, ...]:
        """Every path to train on."""
        return tuple(path for level in self.levels.values() for path in paths_of(level.train))

    @property
    def eval(self) -> tuple[str, ...]:
        """Every path to measure on."""
        return tuple(path for level in self.levels.values() for path in paths_of(level.eval))


def paths_of(given: Paths | None) -> list[str]:
    """The paths that a key names."""
    return [given] if isinstance(given, str) else list(given or ())


def first_phase(config: PairConfig) -> int:
    """The first phase of the curriculum that `config.train` has a row of.

    Raises:
      FileNotFoundError, ValueError: as the files and their rows do.
    """
    files = config.files()
    kinds = (*preference_rows.PAIRS, *preference_rows.RANKINGS)
    found, _ = sources.open_sources(config.train, files, kinds)
    return min(phase for source in found for phase in phases_of(source))
