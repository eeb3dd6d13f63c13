"""A program that answers calls: it runs the source it is sent, then its functions when asked.

Requests: {"id", "run": source}, {"id", "call": [target, args, kwargs]}, {"id", "get": [handle,
name]}; a target is a name or a handle. Answers: {"id", "value"} or {"id", "error", "message"}.
"""

import sys
import types
import typing
from typing import Any

from . import channel, plain


def main() -> None:
    pipe = channel.Channel()
    solution = Solution()
    while (request := pipe.receive()) is not None:
        answer = {"id": request["id"]}
        try:
            answer["value"] = plain.encode(solution.do(request), solution.keep)
        except BaseException as error:
            answer |= {"error": type(error).__name__, "message": said(error)}
        pipe.send(answer)


def said(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


class Solution:
    def __init__(self) -> None:
        """The names of `typing` are there: tasks put them into the signatures that they ask for."""
        self.module = types.ModuleType("solution")
        self.module.__dict__.update({name: getattr(typing, name) for name in typing.__all__})
        sys.modules["solution"] = self.module
        self.kept: list[Any] = []

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept) - 1

    def find(self, handle: int) -> Any:
        return self.kept[handle]

    def do(self, request: dict[str, Any]) -> Any:
        if "run" in request:
            exec(compile(request["run"], "solution.py", "exec"), self.module.__dict__)
            return None
        if "get" in request:
            handle, name = request["get"]
            return getattr(self.kept[handle], name)
        target, *rest = request["call"]
        args, kwargs = (plain.decode(one, self.find) for one in rest)
        return self.target(target)(*args, **kwargs)

    def target(self, target: str | int) -> Any:
        """A name of the program, or a method of its class `Solution`."""
        if isinstance(target, int):
            return self.kept[target]
        names = self.module.__dict__
        if target not in names and "Solution" in names:
            return getattr(names["Solution"](), target)
        if target not in names:
            raise NameError(f"name '{target}' is not defined")
        return names[target]
