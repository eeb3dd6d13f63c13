"""Runs `solution.py` of the working directory as a main program, always read as UTF-8."""

import sys


def main() -> None:
    with open("solution.py", encoding="utf-8") as file:
        source = file.read()
    names = sys.modules["__main__"].__dict__
    names.clear()
    names.update({"__name__": "__main__", "__builtins__": __builtins__, "__file__": "solution.py"})
    sys.argv = ["solution.py"]
    exec(compile(source, "solution.py", "exec"), names)
