"""What changed in the configuration since the last job, and whether it may."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxpost.runs import disk

# More steps are what a run is continued for; a recipe tells where its schedule hangs on them.
FREE_KEYS = (
    "checkpoint", "log", "eval", "steps", "run", "resume_anyway", "data.eval", "data.workers",
)  # fmt: skip
# What the shapes of the state and the data position hang on: no resume_anyway gets past these,
FIXED_KEYS = (
    "recipe", "seed", "batch_size", "data", "model.fresh", "model.tokenizer", "model.dtype",
    "model.lora.rank", "model.lora.targets", "optimizer.name",
)  # fmt: skip
# nor past a change of these from none to some or back.
SWITCHES = ("ema_decay", "model.lora", "optimizer.max_grad_norm", "optimizer.weight_decay")


class Change(NamedTuple):
    """A dotted key whose value differs; `...` stands for an absent one."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("(absent)" if x is ... else json.dumps(x) for x in (self.old, self.new))
        return f"{self.key}: {old} -> {new}"

    @property
    def free(self) -> bool:
        """Whether it changes nothing in what is trained."""
        return _within(self.key, FREE_KEYS)

    @property
    def fixed(self) -> bool:
        """Whether what was saved cannot go on under it."""
        some = [value not in (..., None, 0) for value in (self.old, self.new)]
        return _within(self.key, FIXED_KEYS) or (self.key in SWITCHES and some[0] != some[1])


def config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What differs; as text `optimizer.learning_rate: 1e-05 -> 2e-05`."""
    return list(_changes(plain(old), plain(new)))


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[Change]:
    for key in sorted({*old, *new}):
        change = Change(prefix + key, old.get(key, ...), new.get(key, ...))
        if isinstance(change.old, dict) and isinstance(change.new, dict):
            yield from _changes(change.old, change.new, f"{change.key}.")
        elif change.old != change.new:
            yield change


def check(folder: Path, config: Mapping[str, Any], resume_anyway: bool) -> list[Change]:
    """Changes since the last job, if they are allowed; they do not matter before a checkpoint."""
    path = folder / "config.yaml"
    if not path.exists() or not _has_checkpoints(folder):
        return []
    try:
        old = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise TypeError("it holds no keys")
        changes = config_changes(old, config)
    except (ValueError, TypeError, yaml.YAMLError) as error:
        raise disk.RunError(
            f"{path} cannot be read ({error}); restore it, or remove it to go on without comparing "
            "configurations"
        ) from error
    refused = [change for change in changes if not change.free]
    if refused and not resume_anyway:
        raise disk.RunError(_refusal(folder, refused))
    return changes


def _refusal(folder: Path, refused: list[Change]) -> str:
    fixed = [change.key for change in refused if change.fixed]
    way = "Use that configuration, choose another run folder, or add resume_anyway=true"
    if fixed:
        way = (
            f"Put {', '.join(fixed)} back, or choose another run folder: what was saved cannot go "
            "on otherwise"
        )
        if len(fixed) < len(refused):
            way += " (the other changes would need resume_anyway=true)"
    lines = "\n  ".join(map(str, refused))
    return f"{folder} was trained with another configuration:\n  {lines}\n{way}"


def _has_checkpoints(folder: Path) -> bool:
    return any(not path.name.startswith("tmp.") for path in folder.glob("checkpoints/*"))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON would give it back: tuples become lists, keys strings."""
    try:
        return json.loads(json.dumps(config))
    except TypeError as error:
        raise TypeError(f"the configuration must hold plain values: {error}") from error


def _within(key: str, keys: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or part of one."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)
