"""Every reasoning-gym task through its own scorer: right answers are 1, junk is (nearly) 0."""

import functools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym import factory

from jaxpost import rewards
from jaxpost.rewards import gym, sandbox

needs_sandbox = pytest.mark.skipif(
    all(trial.failure for trial in sandbox.probe()), reason="no sandbox works on this machine"
)

TASKS = sorted(set(factory.DATASETS) - {"composite"})  # that one is a mixture of the others
JUNK = (
    *("", "qq qq", "none of these", "[]", "{}", "null", '""', "?", "-7.25e3", "1e400", "inf"),
    *("nan", "[NaN, NaN]", "9**9**9**9", "().__class__", "__import__('os')._exit(7)", "(" * 300),
    *("9" * 1500, "8 " * 900, "F+99999999", "U99999999", "1e99999999", "{'a': 1}", "[[[]]]"),
)
# What scorers give to a text that holds the answer, or looks like it; `gym.exact` gives it 0.
PARTIAL = {
    "figlet_font": 0.2,
    "gcd": 0.15,
    "letter_counting": 0.15,
    "maze": 0.15,
    "mini_sudoku": 0.1125,
    "spell_backward": 0.12,
}
# Tasks without one right answer: where the entry keeps a possible one, or one made here.
POSSIBLE = {
    "graph_color": lambda entry: json.dumps(entry["metadata"]["possible_answer"]),
    "propositional_logic": lambda entry: entry["metadata"]["example_answer"],
    "rubiks_cube": lambda entry: entry["metadata"]["example_correct_answer"],
}
HAND_MADE = {
    "boxnet": (
        {"initial_state": {"0.5_0.5": ["box_red"], "0.5_1.5": ["target_red"]}},
        '[{"Agent[0.5, 0.5]": "move(box_red, square[0.5, 1.5])"},'
        ' {"Agent[0.5, 1.5]": "move(box_red, target_red)"}]',
    ),
    "rush_hour": ({"board_config": "ooooooooooooAAoooooooooooooooooooooo"}, "A+4"),
}


@functools.cache
def entry(task: str) -> dict[str, Any]:
    return reasoning_gym.create_dataset(task, size=1, seed=11)[0]


def row(task: str) -> dict[str, str]:
    """As configs/make_reasoning_gym.py writes it."""
    return {"dataset": task, "settings": "{}", "entry": json.dumps(entry(task))}


def made(task: str, answer: str | None, **metadata: Any) -> dict[str, Any]:
    return {"entry": {"answer": answer, "metadata": {"source_dataset": task, **metadata}}}


def values(texts: Sequence[str], example: Mapping[str, Any]) -> list[float | None]:
    return [gym.verify(text, example).value for text in texts]


@pytest.mark.parametrize("task", [task for task in TASKS if task not in HAND_MADE])
def test_its_own_answer_is_right(task):
    own = POSSIBLE[task](entry(task)) if task in POSSIBLE else entry(task)["answer"]
    for text in (own, f"I think.\n<answer>\n{own}\n</answer>"):
        assert gym.verify(text, row(task)).value == 1, text
    assert gym.exact(own, row(task)).value == 1


@pytest.mark.parametrize("task", sorted(HAND_MADE))
def test_a_possible_answer_is_right(task):
    metadata, answer = HAND_MADE[task]
    assert values([answer], made(task, None, **metadata)) == [1]


@pytest.mark.parametrize("task", TASKS)
def test_junk_is_worth_nothing(task):
    """Nothing in it is run, and nothing takes long."""
    start = time.perf_counter()
    scores = [gym.verify(f"<answer>{text}</answer>", row(task)) for text in JUNK]
    found = {text: score.value for text, score in zip(JUNK, scores, strict=True)}
    assert None not in found.values()
    assert max(found.values()) <= PARTIAL.get(task, 0.1), found
    assert not any(score.parts["correct"] for score in scores)
    assert time.perf_counter() - start < 20


def test_scorers_that_take_wrong_answers_are_corrected():
    puzzle = made("puzzle24", "4*(7 - 1)*1", numbers=[4, 7, 1, 1])
    assert values(["4*(7-1)*1", "(7 - 1)*4/1", "6*4*1*1", "4*(7-1)"], puzzle) == [1, 1, 0, 0]
    coin = made("coin_flip", "0.171875")
    assert values(["0.171875", "11/64", "0", "0.17", "1e-9", "1/0"], coin) == [1, 1, 0, 0, 0, 0]
    assert values(["False", "false", "True", "maybe"], made("game_of_life_halting", "False")) == [
        *(1, 1, 0, 0)
    ]
    nothing = made("polynomial_equations", "")
    assert values(["", '""', "no idea", "0"], nothing) == [1, 1, 0, 0]
    sorting = made("number_sorting", "['1', '2']", direction="ascending")
    assert values(["['1', '2']", "[1, 2]", "[NaN, NaN]"], sorting) == [1, 1, 0]


def test_an_entry_whose_scorer_fails_is_masked():
    broken = gym.verify("4", made("countdown", "2*2"))
    assert broken.value == pytest.approx(0.01)  # countdown's own default hides the fault
    assert gym.verify("2 x 3", made("prime_factorization", "two x three")).value is None
    assert gym.verify("2 x 3", made("prime_factorization", "2 × 3")).reason == "unparsable"


def test_rows_that_are_wrong_say_so():
    with pytest.raises(KeyError, match="make_reasoning_gym"):
        gym.verify("1", {"answer": "1"})
    with pytest.raises(ValueError, match="not registered"):
        gym.verify("1", {**row("gcd"), "dataset": "none_such"})


def test_the_maker_writes_what_the_verifier_reads(tmp_path):
    maker = str(pathlib.Path(__file__).parent.parent / "configs" / "make_reasoning_gym.py")
    for task, settings in (("chain_sum", ["max_terms=3"]), ("rush_hour", [])):
        argv = [sys.executable, maker, task, str(tmp_path), "--train", "3", "--held-out", "2"]
        subprocess.run([*argv, "--set", *settings], check=True, capture_output=True)
        lines = [(tmp_path / f"{part}.jsonl").read_text() for part in ("train", "held_out")]
        rows = [json.loads(line) for line in "".join(lines).splitlines()]
        assert {row["dataset"] for row in rows} == {task}
        for example in rows:
            if "completion" in example:
                assert values([example["completion"][0]["content"]], example) == [1]
        assert all(("completion" in example) == (task == "chain_sum") for example in rows)


@needs_sandbox
def test_workers_judge_it_in_their_sandbox():
    texts = (entry("gcd")["answer"], "nothing", "9**9**9**9")
    items = [rewards.Item("", text, row("gcd")) for text in texts]
    with rewards.Scorer(rewards.RewardConfig("jaxpost.rewards.gym:verify", workers=1)) as scorer:
        scored = scorer.submit(items).result()
    assert [one.value for one in scored] == [1, 0, 0]
    assert [one.failure for one in scored] == [None] * 3
