"""Entries to values of a declared type, and a map of entries to a frozen dataclass.

Supported: int, float, bool, str, None, Any, Literal, unions of these, tuple, list, Sequence, dict,
Mapping and dataclasses, nested as one likes. An integer may be written `1e3`; a float may not be
NaN; text may be unquoted whatever it looks like; nothing else is converted.
"""

import collections.abc
import dataclasses
import math
import types
import typing
from typing import Any, Literal, Union

from jaxpost.config import names
from jaxpost.config.tree import ConfigError, Entry

SEQUENCES = (list, tuple, collections.abc.Sequence)
MAPPINGS = (dict, collections.abc.Mapping)


def fill(config_class: type, entry: Entry, base: Any = None, path: str = "", root=None) -> Any:
    """An instance of `config_class` from a map.

    Args:
      config_class: a dataclass.
      entry: a map; the keys it lacks come from `base`, or else from the class's defaults.
      base: an instance of `config_class`, or None.
      path: the dotted name of this part of the configuration.
      root: the class of the whole configuration, among whose names the nearest is sought.

    Raises:
      ConfigError: with every problem found, not only the first.
    """
    root, problems, values = root or config_class, [], {}
    fields = {field.name: field for field in dataclasses.fields(config_class) if field.init}
    for key in entry.value.keys() - fields.keys():
        problems.append(names.unknown(path + key, entry.value[key].where, root))
    hints = typing.get_type_hints(config_class)
    for name, field in fields.items():
        default = getattr(base, name) if base is not None else default_of(field)
        try:
            if name in entry.value:
                given = entry.value[name]
                values[name] = read(given, hints[name], default, path + name, root)
                check_range(field, path + name, values[name], given.where)
            elif default is not dataclasses.MISSING:
                values[name] = default
            else:
                values[name] = absent(hints[name], field, entry, path + name, root)
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(*problems)
    try:
        return config_class(**values)
    except ConfigError:
        raise
    except ValueError as error:  # from the dataclass's own __post_init__
        part = path.rstrip(".")
        named = str(error) if not part or part in str(error) else f"{part}: {error}"
        raise ConfigError(f"{entry.where}: {named}") from error


def check_range(field: dataclasses.Field, path: str, value: Any, where: str) -> None:
    """Refuses a number outside the range that `jaxpost.options.option` declares for its key."""
    within = field.metadata.get("range")
    wrong = within and within.refuses(path, value)
    if wrong:
        raise ConfigError(f"{where}: {wrong}")


def default_of(field: dataclasses.Field) -> Any:
    """A field's default, or MISSING."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def absent(hint: Any, field: dataclasses.Field, parent: Entry, path: str, root: type) -> Any:
    """A required key that was not given: a part made of its own defaults, or an error."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return fill(hint, Entry("map", {}, parent.where), None, path + ".", root)
    explained = field.metadata.get("help", "")
    raise ConfigError(
        f"{parent.where}: the required key {path} ({describe(hint)}) is missing"
        + (f": {explained}" if explained else "")
    )


def read(entry: Entry, hint: Any, default: Any, path: str, root: type) -> Any:
    """An entry as a value of type `hint`; raises ConfigError if it is none."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return read_union(entry, hint, default, path, root)
    if origin is Literal:
        return read_literal(entry, hint, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if entry.kind != "map":
            raise mismatch(entry, hint, path)
        return fill(hint, entry, default if isinstance(default, hint) else None, path + ".", root)
    if (origin or hint) in SEQUENCES:
        return read_sequence(entry, hint, path, root)
    if (origin or hint) in MAPPINGS:
        if entry.kind != "map":
            raise mismatch(entry, hint, path)
        value_hint = args[1] if args else Any
        return {
            key: read(value, value_hint, dataclasses.MISSING, f"{path}.{key}", root)
            for key, value in entry.value.items()
        }
    return plain(entry) if hint is Any else read_scalar(entry, hint, path)


def read_union(entry: Entry, hint: Any, default: Any, path: str, root: type) -> Any:
    """The member that YAML itself would choose, else the first that takes the entry."""
    members = [member for member in typing.get_args(hint) if entry.kind in kinds(member)]
    exact = {"null": type(None), "bool": bool, "int": int, "float": float, "str": str}
    members.sort(key=lambda member: member is not exact.get(entry.kind))
    for member in members:
        try:
            return read(entry, member, default, path, root)
        except ConfigError:
            if len(members) == 1:  # its own message says more than the union's
                raise
    raise mismatch(entry, hint, path)


def kinds(hint: Any) -> tuple[str, ...]:
    """The kinds of entry that can hold a value of type `hint`."""
    origin = typing.get_origin(hint) or hint
    if origin in SEQUENCES:
        return ("list",)
    if origin in MAPPINGS or dataclasses.is_dataclass(origin):
        return ("map",)
    if origin is Literal:
        return ("bool", "int", "float", "str")
    scalars = {
        type(None): ("null",),
        bool: ("bool",),
        int: ("int", "float"),
        float: ("int", "float"),
        str: ("bool", "int", "float", "str"),
    }
    return scalars.get(origin, ("null", "bool", "int", "float", "str", "list", "map"))


def read_sequence(entry: Entry, hint: Any, path: str, root: type) -> Any:
    """A list, or a tuple of fixed or any length."""
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if entry.kind != "list":
        raise mismatch(entry, hint, path)
    hints = [args[0] if args else Any] * len(entry.value)
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(entry.value):
            raise mismatch(entry, hint, path)
        hints = args
    values = [
        read(item, item_hint, dataclasses.MISSING, f"{path}[{index}]", root)
        for index, (item, item_hint) in enumerate(zip(entry.value, hints, strict=True))
    ]
    return values if origin is list else tuple(values)


def read_literal(entry: Entry, hint: Any, path: str) -> Any:
    """One of the choices, or an error with the nearest."""
    for choice in typing.get_args(hint):
        try:
            value = read_scalar(entry, type(choice), path)
        except ConfigError:
            continue
        if value == choice:
            return choice
    error = mismatch(entry, hint, path)
    near = names.nearest(str(entry.value), [str(choice) for choice in typing.get_args(hint)])
    raise ConfigError(error.problems[0] + names.did_you_mean(near))


def read_scalar(entry: Entry, hint: Any, path: str) -> Any:
    """A number, a flag, a text or null."""
    kind, text = entry.kind, entry.value
    if hint is str and entry.text is not None and kind in ("list", "map"):
        return entry.text  # `prompt=Hello: you` on the command line needs no quotes
    if kind not in kinds(hint):
        raise mismatch(entry, hint, path)
    if hint is type(None):
        return None
    if hint is str:
        return text
    if hint is bool:
        return text.lower() == "true"
    if hint not in (int, float):
        raise TypeError(f"{path}: a configuration key cannot have the type {hint}")
    value = number(text)
    if hint is float:
        return float(value)
    if isinstance(value, float) and not value.is_integer():
        raise mismatch(entry, hint, path)
    return int(value)


def number(text: str) -> int | float:
    """A number as YAML writes it: `12`, `1_000`, `0x1f`, `1e-6`, `.inf`."""
    text = text.replace("_", "").lower()
    if "inf" in text:
        return -math.inf if text.startswith("-") else math.inf
    for prefix, digits in (("0x", 16), ("0o", 8)):
        if text.startswith(prefix):
            return int(text, digits)
    return float(text) if set(text) & set(".e") else int(text)


def plain(entry: Entry) -> Any:
    """An entry as YAML would read it, for keys of any type."""
    if entry.kind == "list":
        return [plain(item) for item in entry.value]
    if entry.kind == "map":
        return {key: plain(value) for key, value in entry.value.items()}
    hint = {"null": type(None), "bool": bool, "int": int, "float": float, "str": str}[entry.kind]
    return read_scalar(entry, hint, "")


def mismatch(entry: Entry, hint: Any, path: str) -> ConfigError:
    """The error for an entry of the wrong type, with a hint for the usual slips."""
    hint_kinds = kinds(hint)
    slip = ""
    if bool in (hint, *typing.get_args(hint)) and entry.kind in ("str", "int"):
        slip = " (write true or false)"
    elif entry.kind == "str" and "float" in hint_kinds:
        quoted = Entry("str", entry.value, "")
        slip = " (remove the quotes)" if looks_like_number(quoted.value) else ""
    elif "list" in hint_kinds and entry.kind not in ("list", "map", "null"):
        slip = f" (write [{entry.value}])"
    elif entry.kind == "null":
        slip = " (leave the key out to keep its default)"
    return ConfigError(f"{entry.where}: {path}: expected {describe(hint)}, got {entry}{slip}")


def looks_like_number(text: str) -> bool:
    """Whether quoted text would be a number without its quotes."""
    try:
        number(text)
    except ValueError:
        return False
    return True


def describe(hint: Any) -> str:
    """A type in words: `float`, `int or null`, `list of text`, `one of adamw, lion`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(member) for member in args)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args)
    if (origin or hint) in SEQUENCES:
        if (origin or hint) is tuple and args and args[-1] is not Ellipsis:
            return "[" + ", ".join(describe(member) for member in args) + "]"
        return f"list of {describe(args[0])}" if args else "list"
    if (origin or hint) in MAPPINGS:
        return f"map of names to {describe(args[1])}" if args else "map"
    if dataclasses.is_dataclass(hint):
        return "a map of keys"
    words = {type(None): "null", str: "text", Any: "anything", bool: "true or false"}
    return words.get(hint) or getattr(hint, "__name__", str(hint))
