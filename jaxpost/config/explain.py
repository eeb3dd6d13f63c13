"""What every key of a configuration means: its type, default, unit and help, as text."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich import text

from jaxpost.config import fill, names
from jaxpost.config.tree import Dumper

MISSING = dataclasses.MISSING


class Key(NamedTuple):
    """One key: dotted name, type and range in words, default and value (or MISSING), unit, help."""

    name: str
    type: str
    default: Any
    value: Any
    unit: str
    help: str


def keys(config_class: type, config: Any = None, prefix: str = "", default=None) -> Iterator[Key]:
    """Every key of a class, its parts last; with the values of `config` if given."""
    hints = typing.get_type_hints(config_class)
    fields = dataclasses.fields(config_class)
    for field in sorted(fields, key=lambda field: names.part_of(hints[field.name]) is not None):
        own = fill.default_of(field) if default is None else getattr(default, field.name)
        value = MISSING if config is None else getattr(config, field.name)
        name, part = prefix + field.name, names.part_of(hints[field.name])
        is_part = part is hints[field.name]
        yield Key(
            name,
            "" if is_part else described(hints[field.name], field),
            MISSING if is_part else own,
            MISSING if is_part else value,
            field.metadata.get("unit", ""),
            field.metadata.get("help", ""),
        )
        if part is not None:
            inner = value if isinstance(value, part) else None
            yield from keys(part, inner, name + ".", own if isinstance(own, part) else None)


def described(hint: Any, field: dataclasses.Field) -> str:
    """A type in words, and the numbers of it that are taken: `float or null, at least 0`."""
    within = field.metadata.get("range")
    return fill.describe(hint) + (f", {within}" if within else "")


def explain(config_class: type, config: Any = None) -> text.Text:
    """All keys, one a paragraph: name, type, default, and the value that `config` gives it.

    A key is required where no default is shown. `str(...)` of the result is the plain text.
    """
    page = text.Text()
    for key in keys(config_class, config):
        if not key.type:
            page.append(f"\n{key.name}", "bold")
            page.append(f"  {key.help}\n")
            continue
        page.append(key.name, "bold cyan")
        page.append(f"  {key.type}", "dim")
        if key.value is not MISSING and key.value != key.default:
            page.append(f"  = {show(key.value)}", "bold green")
        elif key.default is MISSING:
            page.append("  required", "yellow")
        if key.default is not MISSING:
            page.append(f"  (default {show(key.default)})")
        page.append(f"  [{key.unit}]\n" if key.unit else "\n")
        page.append(f"    {key.help}\n" if key.help else "")
    return page


def show(value: Any) -> str:
    """A value as one would write it in the file, on one line."""
    written = yaml.dump(
        to_plain(value),
        Dumper=Dumper,
        default_flow_style=True,
        width=10**6,
        allow_unicode=True,
        sort_keys=False,
    )
    return written.removesuffix("\n").removesuffix("...").removesuffix("\n")


def to_plain(value: Any) -> Any:
    """Dataclasses and mappings to dicts, tuples to lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.init]
        return {field.name: to_plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def header(path: str | Path) -> list[str]:
    """The comment lines at the head of a configuration file, without their `#`."""
    lines = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return lines
