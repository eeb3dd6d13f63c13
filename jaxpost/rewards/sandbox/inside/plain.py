"""Plain values as JSON: what may cross the wall of a box.

Only the exact built-in types cross, so that no method of a program's own (`__eq__`, `__hash__`,
`__repr__`) is ever called outside; all else stays inside and crosses as a number, its handle. Of
NumPy's arrays and scalars the values cross.
"""

from collections.abc import Callable
from typing import Any

SMALL = 1 << 63
ARRAYS = [
    "ndarray",
    "bool",
    "bool_",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float32",
    "float64",
]


class Opaque:
    """A value that stayed in its box. It equals nothing."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return self.handle


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """`keep` stores a value that does not cross and returns its handle."""

    def each(values: Any) -> list[Any]:
        return [encode(one, keep) for one in values]

    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -SMALL <= value < SMALL else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is list:
        return each(value)
    if kind in (tuple, set, frozenset):
        return {kind.__name__: each(value)}
    if kind is dict:
        return {"dict": [each(pair) for pair in value.items()]}
    if kind.__module__ == "numpy" and kind.__name__ in ARRAYS:
        return encode(value.tolist(), keep)
    return {"handle": keep(value)}


def decode(data: Any, find: Callable[[int], Any]) -> Any:
    """The value again; `find` gives what stands for a handle. Raises ValueError on all else."""
    if data is None or type(data) in (bool, str, int):
        return data
    if type(data) is list:
        return [decode(one, find) for one in data]
    if type(data) is not dict or len(data) != 1:
        raise ValueError("not a plain value")
    kind, inner = next(iter(data.items()))
    if kind in ("int", "float", "bytes") and type(inner) is str:
        return {"int": read_int, "float": float.fromhex, "bytes": bytes.fromhex}[kind](inner)
    if kind == "handle" and type(inner) is int:
        return find(inner)
    if type(inner) is not list:
        raise ValueError(f"not a plain {kind}")
    return decode_several(kind, inner, find)


def read_int(text: str) -> int:
    return int(text, 16)


def decode_several(kind: str, inner: list[Any], find: Callable[[int], Any]) -> Any:
    try:
        if kind == "complex":
            real, imaginary = inner
            return complex(float.fromhex(real), float.fromhex(imaginary))
        values = [decode(one, find) for one in inner]
        if kind == "dict":
            return {key: value for key, value in values}
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](values)
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a plain {kind}") from error
