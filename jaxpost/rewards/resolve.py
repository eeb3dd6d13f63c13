"""Import paths, `package.module:name` or `file.py:name`, to what they name."""

import difflib
import importlib
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any


def resolve(path: str) -> Any:
    """The object; `name` may be dotted (`module:Class.method`).

    Raises:
      ValueError: with what is wrong with the path, and the nearest name that the module has.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{path!r} is not an import path; write module:name or file.py:name")
    found: Any = from_file(path, place) if is_file(place) else from_module(path, place)
    for word in name.split("."):
        if word not in dir(found):
            near = difflib.get_close_matches(word, dir(found), 3, 0.5)
            meant = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"{path}: {place} has no {word}{meant}")
        found = getattr(found, word)
    return found


def is_file(place: str) -> bool:
    return place.endswith(".py")


def absolute(path: str) -> str:
    """The same path, right from any working folder. Raises ValueError if it cannot be right."""
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{path!r} is not an import path; write module:name or file.py:name")
    if not is_file(place):
        return path
    file = pathlib.Path(place).expanduser().absolute()
    if not file.is_file():
        raise ValueError(f"{path}: no such file: {file}")
    return f"{file}:{name}"


def from_module(path: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(missing + "."):
            raise ValueError(f"{path}: there is no module {missing}") from error
        raise ValueError(f"{path}: {module} needs {missing}, which is not installed") from error


def from_file(path: str, place: str) -> ModuleType:
    """The module that a file makes; its folder is not put on the path."""
    file = pathlib.Path(place).expanduser().absolute()
    name = f"{file.stem}@{file}"  # no module of another file, and of no package
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ValueError(f"{path}: no such file: {file}")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path}: {file} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
