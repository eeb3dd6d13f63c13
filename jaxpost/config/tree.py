"""YAML text to a tree of entries that remember where they were written.

The YAML is that of the 1.2 core schema, because its 1.1 ancestor (PyYAML's own) reads `1e-6` as
text, `no` as false and `12:30` as 750. Nothing is converted here: an entry keeps its text, and the
type of the key that it fills decides what it means.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

Kind = Literal["null", "bool", "int", "float", "str", "list", "map"]

NULL = re.compile(r"(~|null|Null|NULL|None|)$")  # None: a slip of Python's that is never a name
FLOAT = re.compile(
    r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.?(inf|Inf|INF)$"
)
PLAIN_SCALARS = (  # tag, what it looks like, what it starts with
    ("null", NULL, [*"~nN", ""]),
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"([-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"), list("-+0123456789")),
    ("float", FLOAT, list("-+0123456789.iI")),
)


class Entry(NamedTuple):
    """A value as written.

    Attributes:
      kind: what YAML takes it for.
      value: its text; its entries, if a list; its entries by key, if a map.
      where: `file:line`, or the override it comes from.
      text: what was typed, for an override.
    """

    kind: Kind
    value: Any
    where: str
    text: str | None = None

    def __str__(self) -> str:
        if self.kind == "list":
            return "[" + ", ".join(map(str, self.value)) + "]"
        if self.kind == "map":
            return "{" + ", ".join(f"{key}: {value}" for key, value in self.value.items()) + "}"
        return (
            "null"
            if self.kind == "null"
            else repr(self.value)
            if self.kind == "str"
            else self.value
        )


class ConfigError(ValueError):
    """What is wrong with a configuration: one line or more for each problem."""

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self.problems = problems


class Loader(yaml.SafeLoader):
    """Only composes nodes; knows the scalars of YAML 1.2."""


class Dumper(yaml.SafeDumper):
    """Quotes whatever this loader, or one of YAML 1.1, would take for something else than text."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Text; within double quotes where other styles would fold a line break in it."""
        style = None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


Dumper.add_representer(str, Dumper.represent_str)
Loader.yaml_implicit_resolvers = {}
for tag, pattern, first in PLAIN_SCALARS:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", pattern, first)
    Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", pattern, first)


def read_file(path: str | Path) -> Entry:
    """The map in a YAML file. An empty file is an empty map."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None
    entry = parse(text, lambda line: f"{path}:{line}")
    if entry.kind == "null":
        return Entry("map", {}, str(path))
    if entry.kind != "map":
        raise ConfigError(f"{entry.where}: expected `key: value` lines, got {entry}")
    return entry._replace(where=str(path))


def parse(text: str, place: Callable[[int], str]) -> Entry:
    """YAML text to an entry; `place` names a line, counted from 1.

    Raises ConfigError for bad syntax and for a key that is written twice.
    """
    try:
        node = yaml.compose(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{place(mark.line + 1 if mark else 1)}: not valid YAML: {error.problem} (text that "
            f"starts with one of * & @ % ! ` {{ [ or holds ': ' or ' #' needs quotes)"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{place(1)}: not valid YAML: {error}") from None
    return Entry("null", "", place(1)) if node is None else entry_of(node, place)


def entry_of(node: yaml.Node, place: Callable[[int], str]) -> Entry:
    """A YAML node as an entry."""
    where = place(node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return Entry("list", [entry_of(item, place) for item in node.value], where)
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            here = place(key.start_mark.line + 1)
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{here}: a key must be a word, not a list or map")
            if key.value in entries:
                first = entries[key.value].where
                raise ConfigError(f"{here}: the key {key.value} is already set at {first}")
            entries[key.value] = entry_of(value, place)._replace(where=here)
        return Entry("map", entries, where)
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind not in ("null", "bool", "int", "float", "str"):
        raise ConfigError(f"{where}: the YAML tag {node.tag} means nothing here")
    return Entry(kind, node.value, where)


def override(root: Entry, setting: str) -> Entry:
    """The tree with `dotted.key=value` set; the value is read as YAML, or else as plain text."""
    key, equals, text = setting.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{setting!r} is not an override; write key=value, such as steps=100")
    where = f"override {setting}"
    try:
        value = parse(text, lambda line: where)._replace(text=text)
    except ConfigError as error:
        if re.match(r"\s*(\[|\{[^{%])", text):  # meant as a list or map
            whole = "in a shell, the whole of it stands in quotes: 'model.lora={rank: 8}'"
            raise ConfigError(*error.problems, whole) from None
        value = Entry("str", text, where, text)
    return put(root, key.split("."), value)


def put(entry: Entry, path: list[str], value: Entry) -> Entry:
    """A copy of `entry` with `value` at `path`; what is not a map on the way becomes one."""
    if not path:
        return value
    entries = dict(entry.value) if entry.kind == "map" else {}
    below = entries.get(path[0], Entry("map", {}, value.where))
    entries[path[0]] = put(below, path[1:], value)
    return Entry("map", entries, entry.where if entry.kind == "map" else value.where)
