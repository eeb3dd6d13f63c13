"""Runs tests that call a solution which is in another box.

The first record is {"prelude", "tests", "entry", "names"}; names that the tests use and do not
define, and `entry`, stand for the solution's. It writes {"ask": request} and reads the answer, and
writes {"result": [test, "pass" | reason, message]} one a test, or {"broken": why}.
"""

import ast
import builtins
import sys
import types
from typing import Any

from . import channel, plain


def main() -> None:
    pipe = channel.Channel()
    paper = pipe.receive()
    if paper is None:
        return
    examiner = Examiner(pipe)
    try:
        names, tests = examiner.prepare(paper)
    except BaseException as error:
        pipe.send({"broken": f"{type(error).__name__}: {error}"[:300]})
        return
    for number, test in enumerate(tests):
        pipe.send({"result": [number, *examiner.outcome(test, names)]})
    pipe.send({"done": len(tests)})


class Examiner:
    def __init__(self, pipe: channel.Channel) -> None:
        self.pipe = pipe
        self.raised: BaseException | None = None

    def prepare(self, paper: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The names that tests see, and each test as a statement.

        Tests that only define `check` are called with the entry point, those that only define
        functions `test_...` one by one.
        """
        module = types.ModuleType("solution")
        module.__dict__["__getattr__"] = lambda name: Remote(self, name)
        sys.modules["solution"] = module
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(paper["prelude"], "prelude.py", "exec"), names)
        for name in missing(paper["tests"], names):
            names[name] = Remote(self, name)
        if paper["entry"]:
            names[paper["entry"]] = names["candidate"] = Remote(self, paper["entry"])
        if len(paper["tests"]) > 1 or acts(paper["tests"][0]):
            return names, paper["tests"]
        exec(compile(paper["tests"][0], "tests.py", "exec"), names)
        if "check" in names:
            return names, ["check(candidate)"]
        found = [f"{name}()" for name in names if name.startswith("test_")]
        if not found:
            raise ValueError("the tests define neither `check` nor any `test_...`")
        return names, found

    def outcome(self, test: str, names: dict[str, Any]) -> tuple[str, str]:
        try:
            exec(compile(test, "tests.py", "exec"), names)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"[:300]
            if error is self.raised:
                return ("memory" if isinstance(error, MemoryError) else "runtime-error"), said
            return "wrong", said
        return "pass", ""

    def ask(self, request: dict[str, Any]) -> Any:
        self.pipe.send({"ask": request})
        answer = self.pipe.receive()
        if answer is None:
            raise EOFError("the solution's box has ended")
        if "error" not in answer:
            return plain.decode(answer["value"], lambda handle: Remote(self, handle))
        kind = vars(builtins).get(answer["error"], RuntimeError)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = RuntimeError
        try:
            self.raised = kind(answer["message"])
        except TypeError:  # such as UnicodeDecodeError, which is not made from a message
            self.raised = RuntimeError(answer["message"])
        raise self.raised


class Remote:
    """A name or a value of the solution's box: it can be called, passed, and asked for members."""

    def __init__(self, examiner: Examiner, target: str | int) -> None:
        self.__dict__.update(_examiner=examiner, _target=target)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sent = [plain.encode(one, remote_handle) for one in (list(args), kwargs)]
        return self._examiner.ask({"call": [self._target, *sent]})

    def __getattr__(self, name: str) -> Any:
        if isinstance(self._target, str):
            if name == "__name__":
                return self._target
            raise AttributeError(f"{self._target}.{name} does not leave the solution's box")
        return self._examiner.ask({"get": [self._target, name]})


def remote_handle(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value._target, int):
        return value._target
    raise TypeError(f"a {type(value).__name__} cannot be passed into the solution's box")


def acts(source: str) -> bool:
    """Whether a test does more than define and assign."""
    quiet = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
    body = ast.parse(source).body
    return any(
        not isinstance(node, quiet)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def missing(tests: list[str], names: dict[str, Any]) -> set[str]:
    """Names that the tests read and neither they, the prelude nor Python define."""
    read: set[str] = set()
    known = {*names, *vars(builtins)}
    for node in (node for test in tests for node in ast.walk(ast.parse(test))):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else known).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.arg):
            known.add(node.arg)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            known.add(node.name)
    return read - known
