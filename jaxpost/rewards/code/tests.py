"""The tests of a data row, in whichever of the usual forms they are written."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxpost.rewards import gold

COLUMNS = ("tests", "test_cases", "input_output", "test_list")
ANSWERS = ("ground_truth", "reward_model", "reward_spec", "extra_info", "answer")


class Streams(NamedTuple):
    """What a program reads, and what it should print."""

    pairs: Sequence[tuple[str, str]]


class Calls(NamedTuple):
    """Arguments of a function, and what it should return: values that JSON holds.

    `boxed`: every output of the row is a list of one, as APPS writes a single value, so that the
    value alone will do as well.
    """

    name: str
    pairs: Sequence[tuple[list[Any], Any]]
    boxed: bool = False


class Asserts(NamedTuple):
    """Statements that fail when the solution is wrong; `prelude` is run before them."""

    prelude: str
    statements: Sequence[str]
    entry: str


Tests = Streams | Calls | Asserts


def read(example: Mapping[str, Any]) -> Tests:
    """The tests of a row. Raises ValueError with what is wrong with them.

    Columns, the first that is there: `test` beside `entry_point` (HumanEval), `tests`,
    `test_cases`, `input_output`, `test_list` (MBPP, after its `test_setup_code` or
    `test_imports`), else the right answer as `gold.gold` finds it. In them, or in JSON of them:
    {"inputs", "outputs"} (APPS, verl; with "fn_name" they are calls), a list of {"input",
    "output"} (LiveCodeBench; calls by `fn_name` in the row or its `metadata`), {"assert_case"},
    or a list of asserts or text of them (open-instruct, KodCode).
    """
    entry = str(example.get("entry_point") or example.get("fn_name") or "")
    if isinstance(example.get("test"), str) and entry:
        return asserts(example, [example["test"]], entry)
    return of_value(example, parsed(found(example)), entry)


def found(example: Mapping[str, Any]) -> Any:
    for name in COLUMNS:
        if example.get(name) is not None:
            return example[name]
    try:
        return gold.gold({name: example.get(name) for name in ANSWERS})
    except KeyError:
        raise ValueError(
            f"no tests among {sorted(map(str, example))}; they are sought in `test` with "
            f"`entry_point`, {', '.join(COLUMNS)} and the columns of a right answer"
        ) from None


def parsed(value: Any) -> Any:
    """JSON of tests as tests; a text that is no JSON is a test itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def of_value(example: Mapping[str, Any], value: Any, entry: str) -> Tests:
    if isinstance(value, str) and value.strip():
        return asserts(example, [value], entry)
    if isinstance(value, Mapping):
        if "assert_case" in value and not value.get("inputs"):
            return of_value(example, parsed(value["assert_case"]), entry)
        if "inputs" in value and "outputs" in value:
            pairs = list(zip(value["inputs"], value["outputs"], strict=True))
            return paired(pairs, str(value.get("fn_name") or ""))
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"tests are of no known form: {str(value)[:80]!r}")
    if all(isinstance(one, str) for one in value):
        return asserts(example, list(value), entry)
    if all(isinstance(one, Mapping) and {"input", "output"} <= {*one} for one in value):
        kinds = {one.get("testtype", one.get("type", "")) for one in value}
        calls = "stdin" not in kinds and (kinds & {"functional", "function_call", "call"} or entry)
        name = entry or function_of(example)
        if calls and not name:
            raise ValueError("tests are calls, but neither `fn_name` nor `metadata` names whose")
        return paired([(one["input"], one["output"]) for one in value], name if calls else "")
    raise ValueError(f"tests are of no known form: {str(value[0])[:80]!r}")


def function_of(example: Mapping[str, Any]) -> str:
    metadata = parsed(example.get("metadata"))
    name = metadata.get("func_name", metadata.get("fn_name")) if isinstance(metadata, dict) else ""
    return str(name or "")


def asserts(example: Mapping[str, Any], statements: list[str], entry: str) -> Asserts:
    """HumanEval's prompt is code that its tests use, so it goes before them."""
    prompt = example.get("prompt")
    setup = [example.get("test_setup_code"), example.get("test_imports")]
    setup += [prompt if entry and isinstance(prompt, str) and compiles(prompt) else None]
    lines = [part if isinstance(part, str) else "\n".join(part) for part in setup if part]
    return Asserts("\n".join(lines), statements, entry)


def compiles(source: str) -> bool:
    try:
        compile(source, "prompt", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def paired(pairs: list[tuple[Any, Any]], name: str) -> Tests:
    if not pairs:
        raise ValueError("there are no tests")
    if name:
        read = [call(*pair) for pair in pairs]
        return Calls(name, read, all(type(out) is list and len(out) == 1 for _, out in read))
    return Streams([(joined(given), joined(wanted)) for given, wanted in pairs])


def joined(text: Any) -> str:
    """Some rows keep the lines of an input or an output as a list."""
    if isinstance(text, list | tuple):
        return "\n".join(map(str, text))
    return str(text)


def call(given: Any, wanted: Any) -> tuple[list[Any], Any]:
    """As LiveCodeBench writes them, text of a JSON value a line; as APPS does, values."""
    if isinstance(given, str):
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        return given, json.loads(wanted) if isinstance(wanted, str) else wanted
    args = list(given) if isinstance(given, list | tuple) else [given]
    return args, wanted
