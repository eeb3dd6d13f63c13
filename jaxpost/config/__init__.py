"""Configuration: a YAML file names its recipe and fills that recipe's frozen dataclass, strictly.

    config = load("configs/sft_smollm2.yaml", ["optimizer.learning_rate=1e-6"], {"sft": sft.Config})

Parts: `tree` (YAML to entries with their lines), `fill` (entries to typed values), `names` (the
nearest key to a slip), `explain` (help for every key).
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxpost.config import fill, names, tree
from jaxpost.config.explain import explain, header, keys, show, to_plain
from jaxpost.config.tree import ConfigError

__all__ = [
    "ConfigError",
    "explain",
    "from_dict",
    "header",
    "keys",
    "load",
    "override",
    "recipe_of",
    "show",
    "to_dict",
    "to_yaml",
]


def load(path: str | Path, overrides: Sequence[str], recipes: Mapping[str, type]) -> Any:
    """The configuration in a YAML file, with `dotted.key=value` overrides put over it.

    Args:
      path: the file. Its key `recipe` says which class the others fill.
      overrides: the later ones win.
      recipes: the configuration class of each recipe by name.

    Raises:
      ConfigError: with file, line, key, what was given and what was expected, for every problem.
    """
    root = read(path, overrides)
    recipe = recipe_in(root, recipes)
    entries = {key: entry for key, entry in root.value.items() if key != "recipe"}
    return fill.fill(recipes[recipe], root._replace(value=entries))


def override(config: Any, overrides: Sequence[str]) -> Any:
    """A configuration with `dotted.key=value` overrides put over it.

    Raises:
      ConfigError: as `load`.
    """
    root = tree.Entry("map", {}, "overrides")
    for setting in overrides:
        root = tree.override(root, setting)
    return fill.fill(type(config), root, config)


def recipe_of(path: str | Path, overrides: Sequence[str], recipes: Collection[str]) -> str:
    """The recipe that a file names, without filling it (so that only its module need be loaded)."""
    return recipe_in(read(path, overrides), recipes)


def read(path: str | Path, overrides: Sequence[str]) -> tree.Entry:
    """The tree of a file under its overrides."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: {missing(Path(path))}")
    root = tree.read_file(path)
    for setting in overrides:
        root = tree.override(root, setting)
    return root


def recipe_in(root: tree.Entry, recipes: Collection[str]) -> str:
    """The value of `recipe`, which must be one of `recipes`."""
    known = ", ".join(sorted(recipes))
    if "recipe" not in root.value:
        raise ConfigError(f"{root.where}: the required key recipe is missing; it is one of {known}")
    entry = root.value["recipe"]
    if entry.kind != "str" or entry.value not in recipes:
        near = names.did_you_mean(names.nearest(str(entry.value), recipes))
        raise ConfigError(f"{entry.where}: recipe: expected one of {known}, got {entry}{near}")
    return entry.value


def missing(path: Path) -> str:
    """Why a file cannot be read, and the files that may have been meant."""
    if path.is_dir():
        inside = path / "config.yaml"
        return f"is a folder{names.did_you_mean([str(inside)] if inside.exists() else [])}"
    if not path.parent.is_dir():
        return f"no such file: there is no folder {path.parent}"
    files = {file.name: file for file in sorted(path.parent.iterdir()) if file.suffix == ".yaml"}
    stems = {file.stem: file for file in files.values()}
    near = [stems[path.stem]] if path.stem in stems else []
    near += [files[name] for name in difflib.get_close_matches(path.name, files, 3, 0.7)]
    offered = list(dict.fromkeys(map(str, near)))[:3]
    return f"no such file{names.did_you_mean(offered)}"


def to_dict(config: Any, recipe: str | None = None) -> dict[str, Any]:
    """A configuration as plain dicts, lists and scalars, under the name of its recipe.

    `recipe` is the name it loads under: without it the last part of the module that defines the
    class, which is what a recipe is called.
    """
    recipe = recipe or type(config).__module__.rpartition(".")[2]
    return {"recipe": recipe, **to_plain(config)}


def from_dict(config_class: type, values: Mapping[str, Any]) -> Any:
    """The inverse of `to_dict`, as strict as `load`."""
    values = {key: value for key, value in to_plain(values).items() if key != "recipe"}
    text = yaml.dump(values, Dumper=tree.Dumper, sort_keys=False)
    return fill.fill(config_class, tree.parse(text, lambda line: "dict"))


def to_yaml(config: Any, recipe: str | None = None) -> str:
    """`to_dict` as a file that `load` reads back to an equal configuration."""
    return yaml.dump(
        to_dict(config, recipe),
        Dumper=tree.Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
