"""Mathematics as a reward: pairs with a declared verdict, the answer's place, hostile texts."""

import pathlib
import threading
import time

import pytest

from jaxpost import rewards
from jaxpost.rewards import gold, literals, math
from jaxpost.rewards.math import extract, form
from jaxpost.rewards.math import text as texts

PAIRS = pathlib.Path(__file__).parent / "golden" / "math_pairs.txt"
VERDICTS = {"T": 1.0, "F": 0.0}


def pairs():
    for line in PAIRS.read_text().splitlines():
        if line and not line.startswith("#"):
            right, rest = line.split(" ; ", 1)
            yield right, *rest.rsplit(" ; ", 1)


@pytest.mark.parametrize(("right", "said", "verdict"), list(pairs()))
def test_pairs_have_their_verdict(right, said, verdict):
    score = math.verify(f"So it is $\\boxed{{{said}}}$.", {"answer": right})
    assert score.value == VERDICTS[verdict], score


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"First \boxed{3}, then \boxed{7}.", "7"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5.", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        ("<think>\\boxed{3}</think> so \\boxed{4}", "4"),
        ("<think>\\boxed{3}</think> nothing more\nto be said", None),
        ("<think>it is \\boxed{3}", None),
        ("\\boxed{3} <answer>4</answer>", "4"),
        ("<answer>so \\boxed{4}</answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer>", "4"),
        ("<answer></answer>", None),
        ("It adds up.\n#### 1,234", "1,234"),
        ("It adds up. The answer is 12.", "12"),
        ("The final answer is: **12**", "12**"),
        ("12", "12"),
        ("Line one\nline two 12", None),
        (r"\boxed{}", None),
        (r"\boxed{3", None),
        ("", None),
    ],
)
def test_the_answer_stands_in_one_place(completion, answer):
    assert extract.answer(completion) == answer


def test_an_answer_given_as_twelve_in_bold_is_twelve():
    said = "Adding the two sums.\nThe final answer is: **12**"
    assert math.verify(said, {"answer": "12"}).value == 1.0


@pytest.mark.parametrize(
    "example",
    [
        {"answer": "7"},
        {"answer": 7},
        {"answer": None, "solution": r"By Vieta, \boxed{7}."},
        {"answer": "She has 3+4=<<3+4=7>>7 left.\n#### 7"},
        {"ground_truth": ["7", "8"]},
        {"reward_model": {"style": "rule", "ground_truth": "7"}, "data_source": "x"},
        {"reward_spec": {"method": "rule", "ground_truth": "7"}},
        {"extra_info": {"answer": "7"}},
        {"target": "7"},
        {"label": "7"},
    ],
)
def test_the_right_answer_is_found_in_any_column(example):
    assert math.verify(r"\boxed{7}", example).value == 1.0


def test_a_row_without_a_right_answer_says_where_it_was_sought():
    with pytest.raises(
        KeyError, match=r"no right answer among \['question'\].*answer, ground_truth"
    ):
        gold.gold({"question": "2+2"})


@pytest.mark.parametrize(
    "right", ["", r"\frac{1}{", r"\boxed{}", "9^{9^{9^9}}", "(" * 80, "x" * 3000]
)
def test_a_right_answer_that_cannot_be_read_judges_nobody(right):
    for said in ("5", right):
        score = math.verify(f"\\boxed{{{said}}}", {"answer": right})
        assert score.value is None
        assert score.reason == "right answer unreadable"


def test_options_change_what_is_right():
    assert math.verify(r"\boxed{2+2}", {"answer": "4"}, evaluated=False).value == 1.0
    assert math.verify(r"\boxed{2+3}", {"answer": "4"}, evaluated=False).value == 0.0
    assert math.verify(r"\boxed{0.333}", {"answer": "1/3"}, tolerance=0.01).value == 1.0
    assert math.verify(r"\boxed{0.33}", {"answer": "1/3"}, tolerance=0.001).value == 0.0


def test_every_right_answer_of_the_pairs_equals_itself():
    for right, _, _ in pairs():
        assert math.verify(f"\\boxed{{{right}}}", {"answer": right}).value == 1.0, right


def test_reasons_are_told():
    def told(said, right="5"):
        return math.verify(said, {"answer": right}).reason

    assert told(r"\boxed{5}") == "right"
    assert told(r"\boxed{6}") == "wrong"
    assert told("I do not\nknow") == "no answer"
    assert told(r"\boxed{\int_0^1 10x\,dx}") == "not evaluated"
    assert told(r"\boxed{9^{9^{9^9}}}") == "power tower"


HOSTILE = [
    "9^{9^{9^{9}}}", "10^{10^{8}}", "100000000!", "((100!)!)!", r"\sum_{n=1}^{10^8} n",
    r"\prod_{n=1}^{10^6} n", "(x+y+z+w)^{400}", r"\int_0^1 \sin(\cos(\tan x)) e^{x^x} dx",
    r"\binom{10^7}{5\cdot 10^6}", r"\binom{10000000}{5000000}",
    r"\frac{1}{" * 300 + "1" + "}" * 300, "(" * 500 + "1" + ")" * 500,
    r"\{" + ",".join(map(str, range(3000))) + r"\}", ",".join("1" * 8000), "7" * 50000,
    "{" * 20000, "$" * 50000, "\0", "9**9**9**9", "(9^9)^{9^9}", "(((9^9)^9)^9)^9",
    "e^{e^{e^{e^{e}}}}", "-" * 1000 + "1", "1/" * 1000 + "1", r"\frac{1}{0}", "0^{-1}",
    r"\sin" * 300 + "x", "x" * 1900, "(a+b+c+d+e)^{99}", r"(\sin x+\cos x)^{20}",
    "a=" * 500 + "1", r"\pm" * 200 + "1", "1" + r"\pm 1" * 30, r"\cup" * 300,
    "1e999999999", "0." + "3" * 1990, "x^{999}-y^{999}",
]  # fmt: skip


@pytest.mark.parametrize("right", ["5", r"x^2+\sqrt{3}"])
def test_hostile_answers_are_wrong_in_time(right):
    config = rewards.RewardConfig("jaxpost.rewards.math:verify", deadline=10.0)
    items = [rewards.Item("", f"\\boxed{{{said}}}", {"answer": right}) for said in HOSTILE]
    start = time.monotonic()
    with rewards.Scorer(config) as scorer:
        scored = scorer.submit([*items, rewards.Item("", f"\\boxed{{{right}}}", items[0].example)])
        *found, last = scored.result()
    assert time.monotonic() - start < 120
    assert last.value == 1.0
    bad = [one for one in zip(HOSTILE, found, strict=True) if one[1].value != 0.0]
    assert not [one for one in bad if one[1].failure != "timeout"], bad


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("answer" + "\n" * 20_000, "wrong"), ("answer" + " " * 20_000, "wrong"),
        ("answer: a" + " " * 19_000 + "b", "too long"), ("answer " * 20_000, "too long"),
        (r"\boxed{" * 20_000, "no answer"), (rf"\boxed{{{'x^2+' * 40}}}", "wrong"),
        (rf"\boxed{{{'x^2+' * 41}}}", "too complex"), (r"\boxed{" + "^ " * 900, "no answer"),
        (rf"\boxed{{{'^ ' * 900}}}", "too complex"), (rf"\boxed{{{'1!+' * 40}x}}", "wrong"),
    ],
)  # fmt: skip
def test_no_pattern_takes_longer_than_the_text_is_long(text, reason):
    start = time.process_time()
    found = math.verify(text, {"answer": "5"})
    assert (found.value, found.reason) == (0.0, reason)
    assert time.process_time() - start < 5


def test_without_the_main_thread_it_refuses_rather_than_hang():
    raised = []

    def judge():
        try:
            math.verify(r"\boxed{5}", {"answer": "5"})
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert "rewards.Scorer" in raised[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1,234.5", "-2469/2"), ("3 1/2", "7/2"), (r"3\frac{1}{2}", "7/2"), ("1/0", None),
        (r"1.5\times10^{2}", "150"), ("10^{-2}", "1/100"), ("10^{999999}", None), ("2+2", None),
        (r"0.1\overline{6}", "1/6"), ("1,23", None), (".", None), ("", None), ("--1", None),
    ],
)  # fmt: skip
def test_literals_are_exact(text, value):
    found = literals.literal(text)
    assert (None if found is None else str(found)) == value


def test_structure_is_read():
    assert form.read("(1,2)").kind == "tuple"
    assert form.read("1,2").kind == "list"
    assert form.read("1,234").kind == "one"
    assert form.read("(x+1)(x-1)").body == "(x+1)(x-1)"
    one = form.read(texts.tidy(r"x = 12\text{ square meters}"))
    assert (one.name, one.body, one.unit) == ("x", "12", "m^2")
