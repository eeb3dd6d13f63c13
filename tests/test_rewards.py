"""Rewards: signatures, worker processes and what goes wrong in them, combination, formats."""

import asyncio
import contextlib
import functools
import json
import math
import os
import pathlib
import pickle
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxpost import config as configs
from jaxpost import rewards
from jaxpost.rewards import (
    canaries,
    code,
    combine,
    exact,
    formats,
    processes,
    resolve,
    sandbox,
    signatures,
    spans,
    worker,
    workers,
)
from jaxpost.rewards.score import Item, Score

FILE = pathlib.Path(__file__).absolute()
ROWS = [{"answer": "1"}]


def items(*completions, row=None):
    return [Item("p", text, row or {"answer": "1"}) for text in completions]


def length(completion, example):
    return float(len(completion))


async def length_awaited(completion, example):
    await asyncio.sleep(0.01 * (len(completion) % 3))
    return float(len(completion))


def lengths(completions, examples):
    assert len(completions) == len(examples)
    return [float(len(one)) for one in completions]


async def lengths_awaited(completions, examples):
    return [len(one) for one in completions]


def trl_plain(completions, **kwargs):
    return [float(len(one)) for one in completions]


def trl_columns(prompts, completions, answer, completion_ids, log_metric, trainer_state=None):
    log_metric("ids", sum(map(len, completion_ids)))
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(text == right) for text, right in zip(texts, answer, strict=True)]


def verl_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}


def of_item(item):
    return Score(float(item.truncated), {"tokens": len(item.completion_ids)}, "seen")


class MuteError(Exception):
    def __str__(self):
        raise ZeroDivisionError


def faulty(completion, example):
    match completion:
        case "hang":
            while True:
                time.sleep(1)
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "sys.exit":
            sys.exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("bad")
        case "none":
            return None
        case "nan":
            return math.nan
        case "inf":
            return np.float32("inf")
        case "large":
            return 1e39
        case "mute":
            raise MuteError
        case "text":
            return "1.0"
        case "down":
            raise rewards.InfrastructureError("the judge is down")
        case "print":
            print("x" * 100_000)
    return float(len(completion))


FAULTS = {
    "hang": "timeout", "spin": "timeout", "exit": "crash", "sys.exit": "error", "kill": "crash",
    "raise": "error", "none": "none", "nan": "not_finite", "inf": "not_finite", "text": "error",
    "down": "infrastructure", "large": "not_finite", "mute": "error",
}  # fmt: skip


def faulty_list(completions, examples):
    scores = [faulty(one, None) for one in completions]
    return scores[:-1] if "short" in completions else scores


def scored(function, asked, **settings):
    with rewards.Scorer(rewards.RewardConfig("", **settings), function) as scorer:
        return scorer.submit(asked).result()


@pytest.mark.parametrize(
    "function",
    [length, length_awaited, lengths, lengths_awaited, trl_plain, functools.partial(length),
     lambda completion, example: len(completion)],
)  # fmt: skip
def test_every_style_gives_the_same_scores_in_the_order_of_the_items(function):
    texts = ["x" * (number % 7) for number in range(50)]
    found = scored(function, items(*texts), batch=8)
    assert [one.value for one in found] == [float(len(text)) for text in texts]
    assert all(one.failure is None and one.reason == "" for one in found)


def test_trl_functions_get_columns_ids_and_messages():
    prompt = [{"role": "user", "content": "1?"}]
    asked = [
        Item(prompt, "1", {"answer": "1"}, [5, 6]),
        Item(prompt, "2", {"answer": "1"}, [7]),
    ]
    found = scored(trl_columns, asked)
    assert [one.value for one in found] == [1.0, 0.0]
    assert found[0].parts["ids"] == 3.0


def test_verl_functions_get_the_row_and_their_numbers_are_parts():
    row = {"data_source": "x", "reward_model": {"ground_truth": "1"}}
    right, wrong = scored(verl_score, items("1", "2", row=row))
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert right.parts == {"verl_score": 1.0, "acc": 1.0}


def verl_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    pairs = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [{"score": bonus + (said == right), "from": len(name)} for name, said, right, _ in pairs]


def test_verl_functions_of_a_batch_get_lists():
    row = {"data_source": "abc", "reward_model": {"ground_truth": "1"}}
    found = scored(verl_batch, items("1", "2", "1", row=row), batch=2, options={"bonus": 1.0})
    assert [one.value for one in found] == [2.0, 1.0, 2.0]
    assert found[0].parts == {"verl_batch": 2.0, "from": 3.0}


def test_numbers_of_numpy_are_parts_of_a_dict_and_texts_are_not():
    said = {"score": np.float32(1), "a": np.float32(0.5), "b": np.int64(2), "c": np.bool_(True),
            "d": "3", "e": None, "f": [4], "g": np.ones(2)}  # fmt: skip
    assert signatures.score_of(said) == Score(1.0, {"a": 0.5, "b": 2.0, "c": 1.0})


def test_a_sum_too_large_for_float32_is_missing():
    def large(completion, example):
        return 3e38 if completion == "large" else 1.0

    few, many = scored(large, items("few", "large"), weight=2.0)
    assert (few.value, few.failure) == (2.0, None)
    assert math.isnan(many.value)
    assert (many.failure, many.reason) == ("not_finite", "the weighted sum is 6e+38")
    assert many.parts == {"large": 3e38}


def test_a_function_of_an_item_sees_whether_it_was_cut():
    (found,) = scored(of_item, [Item("p", "x", {}, [1, 2, 3], True)])
    assert found == rewards.Scored(1.0, {"tokens": 3.0, "of_item": 1.0}, "seen", None)


@pytest.mark.parametrize(
    ("function", "style"),
    [
        (lambda a, b: 0, "own"),
        (lambda completion, example, *, scale=1: 0, "own"),
        (lambda item: 0, "item"),
        (lambda completions, examples: [], "batched"),
        (lambda completions, **kwargs: [], "trl"),
        (lambda prompts, completions, answer: [], "trl"),
        (lambda solution_str, ground_truth, **kwargs: 0, "verl"),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: [], "verl_batch"),
    ],
)
def test_styles_are_told_by_their_names(function, style):
    assert signatures.read(function, {}).style == style


def test_strange_signatures_and_options_are_refused():
    with pytest.raises(ValueError, match=r"takes \(completion, example\)"):
        signatures.read(lambda a, b, c: 0, {})
    with pytest.raises(ValueError, match="no parameter scal; it has completion, example, scale"):
        signatures.read(lambda completion, example, scale=1: 0, {"scal": 2})


@pytest.mark.parametrize("function", [faulty, faulty_list])
def test_faults_mask_their_own_sample_and_no_other(function):
    texts = []
    for fault in FAULTS:
        texts += ["good", fault, "print"]
    found = scored(function, items(*texts), deadline=1.0, batch=6)
    for text, one in zip(texts, found, strict=True):
        assert one.failure == FAULTS.get(text), (text, one)
        assert math.isnan(one.value) if text in FAULTS else one.value == len(text)


def one_for_all(completions, **kwargs):
    return [1.0]


@pytest.mark.parametrize(("function", "count"), [(faulty_list, 2), (one_for_all, 1)])
def test_a_call_with_too_few_scores_has_none(function, count):
    found = scored(function, items("a", "short", "ccc", "good"), batch=3)
    assert [one.failure for one in found] == ["error", "error", "error", None]
    assert f"returned {count} rewards for 3 completions" in found[0].reason


def test_failures_say_what_happened():
    found = scored(faulty, items("raise", "mute", "exit", "kill", "hang"), deadline=0.5)
    raised, mute, left, killed, hung = (one.reason for one in found)
    assert mute.startswith("MuteError: its text raises ZeroDivisionError")
    assert raised.startswith("ValueError: bad")
    assert left.endswith("exit code 3")
    assert killed.endswith("SIGKILL")
    assert hung == "no answer in 0.5 s"


@pytest.mark.parametrize("function", ["faulty", "lengths"])
def test_one_worker_and_eight_score_alike(function):
    texts = [
        *(text for text in FAULTS if text not in ("hang", "spin")),
        *("x" * n for n in range(40)),
    ]
    path = f"{FILE}:{function}"
    found = []
    for count in (1, 8):
        with rewards.Scorer(rewards.RewardConfig(path, workers=count)) as scorer:
            found.append(scorer.submit(items(*texts)).result())
    assert repr(found[0]) == repr(found[1])


def forked(completion, example):
    os.fork()
    return float(completion)


def forged(completion, example):
    data = json.dumps({"scores": [{"value": 9.0}], "call": "0" * 16}).encode()
    for descriptor in range(3, 20):
        with contextlib.suppress(OSError):
            os.write(descriptor, len(data).to_bytes(8, "big") + data)
    return float(completion)


@pytest.mark.parametrize("function", [forked, forged])
def test_an_answer_too_many_never_shifts_the_rewards(function):
    with rewards.Scorer(rewards.RewardConfig("", workers=1), function) as scorer:
        found = [scorer.submit(items(*"01234")).result() for _ in range(2)]
    for scores in found:
        masked = [number for number, one in enumerate(scores) if one.failure == "crash"]
        assert masked == ([] if function is forked else [*range(5)])
        right = [float(number) for number in range(5) if number not in masked]
        assert [one.value for one in scores if one.failure is None] == right


def test_submit_returns_before_the_rewards_are_there():
    def slow(completion, example):
        time.sleep(0.5)
        return 1.0

    with rewards.Scorer(slow) as scorer:
        start = time.monotonic()
        first, second = scorer.submit(items("a", "b")), scorer.submit(items("c"))
        assert time.monotonic() - start < 0.3
        assert not first.done()
        assert [one.value for one in second.result()] == [1.0]
        assert [one.value for one in first.result()] == [1.0, 1.0]
    assert scorer.submit([]).result() == []


def children():
    found = pathlib.Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(one) for file in found for one in file.read_text().split()}


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_process_and_no_descriptor():
    def stubborn(completion, example):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass

    before, opened = children(), descriptors()
    for _ in range(3):
        scorer = rewards.Scorer(rewards.RewardConfig("", workers=3), stubborn)
        pending = scorer.submit(items(*"abcdef"))
        time.sleep(0.1)
        start = time.monotonic()
        scorer.close()
        scorer.close()
        assert time.monotonic() - start < 5
        with pytest.raises(RuntimeError, match="closed before"):
            pending.result()
    assert children() == before
    assert descriptors() == opened


def test_a_hundred_crashes_leave_no_zombie():
    before = children()
    with rewards.Scorer(rewards.RewardConfig("", workers=2), faulty) as scorer:
        found = scorer.submit(items(*["exit"] * 20)).result()
        assert {one.failure for one in found} == {"crash"}
        assert len(children() - before) <= 2
    assert children() == before


SCRIPT = """
import sys, time
from jaxpost import rewards

def hang(completion, example):
    while True:
        pass

with rewards.Scorer(rewards.RewardConfig("", deadline=60.0), hang) as scorer:
    pending = scorer.submit([rewards.Item("", "", {})] * 4)
    running = [one for pool in scorer.pools for one in pool.processes.values()]
    print("up", *(one.process.pid for one in running), flush=True)
    pending.result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_trainer(number):
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout:
        pids = [int(word) for word in trainer.stdout.readline().split()[1:]]
        assert pids
        time.sleep(0.3)
        trainer.send_signal(number)
        trainer.wait(20)
    end = time.monotonic() + 10
    while any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]


def test_workers_load_no_jax_and_see_no_secret(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    monkeypatch.setenv("JUDGE_KEY", "key")

    def seen(completion, example):
        loaded = {name.partition(".")[0] for name in sys.modules}
        names = ("jax" in loaded, "SECRET_TOKEN" in os.environ, "JUDGE_KEY" in os.environ)
        return Score(0.0, dict(zip("abc", map(float, names), strict=True)))

    (found,) = scored(seen, items("x"), environment=("JUDGE_KEY",))
    assert {name: found.parts[name] for name in "abc"} == {"a": 0.0, "b": 0.0, "c": 1.0}


def spoil(completion, example):
    """Judges, and then makes all later answers right."""
    found = exact.verify(completion, example)
    exact.judged = lambda said, rights: Score(1.0)
    return found


@pytest.mark.parametrize(("fork", "second"), [(True, 0.0), (False, 1.0)])
def test_in_a_fork_no_completion_meets_what_another_did(fork, second):
    source = worker.Source(f"{FILE}:spoil", b"", {})
    job = worker.Job([*sys.path], os.getpid(), 0, fork, [source])
    env = processes.plain_environment(())
    process = processes.Process(processes.Start(processes.command(), env, job, False))
    try:
        process.ask(pickle.dumps(job), 60)
        call = pickle.dumps(worker.Call(0, items("wrong"), 10.0))
        found = [workers.read(process.ask(call, 20), 1) for _ in range(2)]
        assert [one.value for (one,) in found] == [0.0, second]
    finally:
        process.kill()


def test_confined_verifiers_judge_alike_in_any_number():
    texts = [f"<answer>{number % 3}</answer>" for number in range(30)]
    found = []
    for count in (1, 8):
        config = rewards.RewardConfig("jaxpost.rewards.exact:verify", workers=count)
        with rewards.Scorer(config) as scorer:
            found.append(scorer.submit(items(*texts)).result())
    assert found[0] == found[1]
    assert [one.value for one in found[0]] == [float(number % 3 == 1) for number in range(30)]


def test_own_verifiers_are_confined_and_others_are_not():
    part = rewards.Part("jaxpost.rewards.math:verify")
    assert scorer_home("auto", part) == (True, True)
    assert scorer_home("process", part) == (False, False)
    assert scorer_home("auto", rewards.Part("jaxpost.rewards.code:verify")) == (False, False)
    assert scorer_home("auto", rewards.Part("mine:verify")) == (False, False)
    assert scorer_home("sandbox", rewards.Part("mine:verify")) == (True, False)


def scorer_home(isolation, part):
    from jaxpost.rewards import scorer

    return scorer.home(isolation, part, None)


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("nothing", "write module:name"),
        ("", "write module:name"),
        ("no.such.module:verify", "there is no module no"),
        ("jaxpost.rewards.exact:verfy", "did you mean verify"),
        ("missing.py:verify", "no such file"),
        (f"{FILE}:lenths", "did you mean lengths"),
        ("json:JSONDecodeError", "takes"),
        (f"{FILE}:ROWS", "not a function"),
    ],
)
def test_a_wrong_path_is_told_at_once(path, wrong):
    with pytest.raises(rewards.RewardError, match=wrong):
        rewards.Scorer(rewards.RewardConfig(path, isolation="process"))


def test_paths_name_modules_files_and_inner_names(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class A:\n    @staticmethod\n    def f(a, b):\n        return 1\n"
    )
    assert resolve.resolve(f"{tmp_path}/mine.py:A.f")(0, 0) == 1
    assert resolve.resolve("json:loads") is json.loads
    (tmp_path / "broken.py").write_text("import nothing_like_it\n")
    with pytest.raises(ModuleNotFoundError):
        resolve.resolve(f"{tmp_path}/broken.py:f")


def test_parts_are_weighted_logged_and_masked_together():
    config = rewards.RewardConfig(
        f"{FILE}:faulty",
        weight=2.0,
        parts=(
            rewards.Part(f"{FILE}:lengths", weight=0.5, name="short"),
            rewards.Part(f"{FILE}:faulty", weight=0.0, name="watched"),
        ),
    )
    with rewards.Scorer(config) as scorer:
        good, bad = scorer.submit(items("xx", "none")).result()
    assert good == rewards.Scored(5.0, {"faulty": 2.0, "short": 2.0, "watched": 2.0}, "", None)
    assert math.isnan(bad.value)
    assert (bad.failure, bad.parts) == ("none", {"short": 4.0})


def test_two_parts_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two rewards are called verify"):
        rewards.RewardConfig("a:verify", name="verify", parts=(rewards.Part("b:f", name="verify"),))


def test_the_configuration_reads_from_yaml():
    values = {
        "function": "jaxpost.rewards.math:verify",
        "options": {"tolerance": 0.01},
        "parts": [{"function": "jaxpost.rewards.formats:tags", "weight": 0.1}],
        "deadline": 3,
    }
    config = configs.from_dict(rewards.RewardConfig, values)
    assert config.parts[0].weight == 0.1
    assert [part.options for part in config.all_parts()] == [{"tolerance": 0.01}, None]
    with pytest.raises(configs.ConfigError, match="deadline"):
        configs.from_dict(rewards.RewardConfig, {**values, "deadline": 0})


@pytest.mark.parametrize(
    "answer",
    [
        {}, {"scores": []}, {"scores": [1.0]}, {"scores": [{"value": "x"}]}, {"scores": [{}]},
        {"scores": [{"value": math.nan}]}, {"scores": [{"failure": "mine"}]},
        {"scores": [{"value": 1.0}] * 2}, {"scores": [{"value": 1.0, "parts": 3}]},
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_not_believed(answer):
    with pytest.raises(processes.EndedError):
        workers.read(answer, 1)


# canaries

needs_sandbox = pytest.mark.skipif(
    all(trial.failure for trial in sandbox.probe()), reason="no sandbox works on this machine"
)
BROKEN = {
    "whatever is returned is right": (
        "code:verify",
        ("code/judge.py", "right = compare.returned(said, wanted)", "right = True"),
        ["a wrong function earns 1 (pass), and is worth 0", "it equals everything earns 1 (pass)"],
    ),
    "code 0 is enough": (
        "code:verify",
        ("code/judge.py", '"memory" if said.startswith("MemoryError") else "runtime-error"',
         '"runtime-error" if outcome.returncode else "pass"'),
        ["a program that exits with code 0 earns 1 (pass), and is worth 0"],
    ),
    "there is no box": (
        "code:verify",
        ("code/judge.py", '"inside.guest"], limits=limits, level=level',
         '"inside.guest"], limits=limits, level="none"'),
        ["a program that leaves the sandbox earns 1 (pass), and is worth 0"],
    ),
    "nothing passes": (
        "code:verify",
        ("code/verifier.py", 'float(first == "pass")', "0.0"),
        ["a right function earns 0 (pass), and is worth 1", "a right program earns 0 (pass)"],
    ),
    "it cannot run": (
        "math:verify",
        ("math/__init__.py", "    policy = ", "    raise OSError(3)\n    policy = "),
        ["a right number earns no reward (error: OSError: 3", "no answer earns no reward"],
    ),
    "the first box counts": (
        "math:verify",
        ("math/extract.py", "finditer(text))[-1]", "finditer(text))[0]"),
        ["the right number, then a wrong one earns 1 (right), and is worth 0"],
    ),
    "every answer is right": (
        "exact:verify",
        ("exact.py", 'Score(0.0, reason="wrong")', 'Score(1.0, reason="wrong")'),
        ["a wrong answer earns 1 (wrong), and is worth 0"],
    ),
}  # fmt: skip
START = """
import sys, jaxpost
from jaxpost import rewards
assert jaxpost.__file__.startswith(sys.argv[1]), jaxpost.__file__
try:
    rewards.Scorer(rewards.RewardConfig("jaxpost.rewards." + sys.argv[2])).close()
except rewards.RewardError as error:
    print(error)
"""


def started(folder, function):
    """What a start says with the package in `folder`: nothing where all is well."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(folder), function],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_sandbox
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_verifier_is_refused_at_the_start(name, tmp_path):
    """A copy of the package with one line changed."""
    function, (file, before, after), wrong = BROKEN[name]
    package = pathlib.Path(rewards.__file__).parent.parent
    shutil.copytree(package, tmp_path / "jaxpost", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "jaxpost" / "rewards" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    said = started(tmp_path, function)
    assert said.startswith(f"jaxpost.rewards.{function} misjudges what it is tried with")
    for one in wrong:
        assert one in said


@needs_sandbox
@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("code:verify", None), ("code:verify", {"seconds": 5.0, "isolation": "none"}),
        ("math:verify", None), ("exact:verify", None), ("exact:normalized", None),
        ("exact:numeric", {"tolerance": 0.1}), ("theorems:verify", None),
    ],
)  # fmt: skip
def test_a_sound_verifier_judges_every_canary_rightly(function, options):
    part = rewards.Part(f"jaxpost.rewards.{function}", options)
    config = rewards.RewardConfig(part.function, options=options, deadline=60.0)
    known = canaries.of(part)
    with rewards.Scorer(config) as scorer:
        found = scorer.submit([Item("", one.completion, one.example) for one in known]).result()
    assert [one.value for one in found] == [one.value for one in known]


def test_a_canary_would_earn_its_reward_outside_of_the_sandbox():
    found = code.verify(canaries.ESCAPES, canaries.CALLS, isolation="none")
    assert (found.value, found.reason) == (1.0, "pass")


def test_functions_that_are_not_ours_have_no_canaries():
    assert canaries.of(rewards.Part("mine:verify")) == ()
    assert canaries.of(rewards.Part("jaxpost.rewards.formats:tags")) == ()


# combination: the worked numbers

VERIFIER, HUMAN = np.array([[1, 0, 1, 0.0]]), np.array([[0.2, 0.9, 0.8, 0.1]])
PARTS, WEIGHTS = {"verifier": VERIFIER, "human": HUMAN}, {"verifier": 1.0, "human": 0.3}


def test_verifier_and_human_add_up():
    total = combine.verifier_and_human(VERIFIER, HUMAN, 0.3)
    np.testing.assert_allclose(total, [[1.06, 0.27, 1.24, 0.03]], atol=1e-12)
    np.testing.assert_allclose(combine.weighted(PARTS, WEIGHTS), total, atol=1e-12)


def test_a_human_reward_that_could_overturn_the_verifier_is_refused():
    with pytest.raises(ValueError, match=r"spans 1\.5 \(weight 0\.5\).*1 apart"):
        combine.verifier_and_human([1, 0], [0.0, 3.0], 0.5)
    combine.verifier_and_human([1, 0], [0.0, 1.9], 0.5)
    with pytest.raises(ValueError, match=r"0\.2 apart"):
        combine.verifier_and_human([1, 0], [0, 1], 0.5, levels=(0, 0.2, 1))
    squashed = combine.to_unit([-50.0, 0.0, 3.0, 800.0])
    np.testing.assert_allclose(squashed, [0, 0.5, 1 / (1 + np.exp(-3)), 1], atol=1e-12)


def test_sum_then_normalize_and_normalize_then_sum_differ():
    first = combine.sum_then_normalize(PARTS, WEIGHTS)
    second = combine.normalize_then_sum(PARTS, WEIGHTS)
    np.testing.assert_allclose(first, [[0.694681, -0.643851, 0.999663, -1.050494]], atol=1e-5)
    np.testing.assert_allclose(second, [[0.645570, -0.572086, 1.086477, -1.159962]], atol=1e-5)


def test_a_small_part_is_brought_to_full_size_where_all_are_wrong():
    parts = {"verifier": np.zeros((1, 4)), "human": HUMAN}
    first = combine.sum_then_normalize(parts, WEIGHTS)
    np.testing.assert_allclose(first, [[-0.734841, 0.979788, 0.734841, -0.979788]], atol=1e-5)
    total = combine.weighted(parts, WEIGHTS)
    np.testing.assert_allclose(total - total.mean(), [[-0.09, 0.12, 0.09, -0.12]], atol=1e-12)


def test_missing_rewards_are_in_no_mean_and_equal_ones_are_zero():
    found = combine.normalized([[1.0, np.nan, 0.0], [0.3, 0.3, 0.3]], 1, 0.0)
    np.testing.assert_allclose(found[0], [np.sqrt(0.5), np.nan, -np.sqrt(0.5)])
    assert (found[1] == 0).all()


def test_hero():
    found = combine.hero([[0, 0, 1, 1]], [[0.2, 0.8, 0.5, 0.1]], alpha=0.1, beta=0.1)
    np.testing.assert_allclose(found, [[-0.1, 0.1, 1.1, 0.9]], atol=1e-12)
    np.testing.assert_allclose(combine.hero([[1, 0, 0]], [[0.2, 0.4, 0.4]]), [[1, 0, 0]])
    assert float(combine.hero_weights(0.3, 0.1)) == pytest.approx(1.596588, abs=1e-6)


# formats and exact answers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1), ("<think>a</think>\n <answer>b</answer>\n", 1),
        ("<answer>b</answer><think>a</think>", 0), ("<think>a</think>", 0), ("", 0),
        ("<think>a</think> so <answer>b</answer>", 0), ("<think></think><answer>b</answer>", 0),
        ("<think>a<answer>b</answer></think>", 0), ("<think>a</think><answer>b</answer> end", 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0),
        ("<think>a<think>b</think></think><answer>b</answer>", 0),
    ],
)  # fmt: skip
def test_tags_stand_in_order(text, value):
    assert formats.tags(text, {}).value == value


N = 20_000


@pytest.mark.parametrize(
    ("judge", "text", "found"),
    [
        (formats.tags, f"<think>{'a' * N}</think><answer>{'b' * N}</answer>z", 0),
        (formats.tags, f"<think>{' ' * N}</think><answer>{'b' * N}</answer>", 0),
        (formats.tags, f"<think>{'a' * N}</think>{' ' * N}<answer>b</answer>", 1),
        (formats.boxed, r"\boxed{ " * N, 0), (formats.boxed, r"\boxed" + " " * N, 1),
        (exact.verify, "```a\n" * N, 0), (exact.verify, "<answer>" * N, 0),
        (exact.numeric, "1,111" * N, 0), (exact.normalized, "a " * N, 0),
    ],
)  # fmt: skip
def test_a_long_completion_is_judged_in_linear_time(judge, text, found):
    """What is late is masked, and so unpunished."""
    start = time.process_time()
    assert (
        judge(text, {"answer": "right"} if judge is not exact.numeric else ROWS[0]).value == found
    )
    assert time.process_time() - start < 2


def test_fences_are_read_in_linear_time():
    start = time.process_time()
    assert spans.code("```a\n" * N) == ("```a\n" * N).strip()
    assert spans.code("```a\n" * N + "```") == "```a\n" * (N - 1)
    assert time.process_time() - start < 2


def test_the_last_closed_fence_is_the_code():
    assert spans.code("```py\nx\n```\nand\n```\ny\n``` \nso\n```z\n") == "y\n"
    assert spans.code("```py\nx\n```py\n```") == "x\n```py\n"
    assert spans.code("```") == "```"
    assert spans.code("a ```b``` c\n```x`\n```") == "a ```b``` c\n```x`\n```"


def test_tags_that_the_prompt_opened():
    assert formats.tags("a</think><answer>b</answer>", {}, opened=True).value == 1
    assert formats.tags("<think>a</think><answer>b</answer>", {}, opened=True).value == 0


def test_the_soft_overlong_penalty():
    found = [
        formats.overlong(Item("", "", {}, range(length)), longest=10, buffer=4).value
        for length in (6, 7, 9, 10, 11)
    ]
    assert found == [0, -0.25, -0.75, -1, -1]


def test_other_forms():
    assert formats.boxed(r"so \boxed{3}", {}).value == 1
    assert formats.boxed(r"so \boxed{3} or \boxed{4}", {}).reason == "several boxes"
    assert formats.boxed(r"so \boxed{ }", {}).reason == "empty box"
    assert formats.boxed(r"<think>\boxed{3}</think> \boxed{4}", {}).value == 1
    assert formats.pattern("a\nb", {}, regex="a.b").value == 1
    assert formats.pattern("xa\nb", {}, regex="a.b").value == 0
    assert formats.pattern("xa\nb", {}, regex="a.b", whole=False).value == 1
    assert formats.finished(Item("", "", {}, (), True)).value == 0
    assert formats.repetition("a b c d e", {}, words=2).value == 0
    assert formats.repetition("a b a b a b a b a", {}, words=2).value == -0.75
    assert formats.repetition("a", {}).value == 0


@pytest.mark.parametrize(
    ("judge", "said", "right", "value"),
    [
        (exact.verify, " yes ", "yes", 1), (exact.verify, "Yes", "yes", 0),
        (exact.verify, "<think>yes</think><answer>no</answer>", "no", 1),
        (exact.verify, "", "", None), (exact.verify, "", "x", 0),
        (exact.verify, "b", ["a", "b"], 1),
        (exact.normalized, "The Eiffel-Tower!", "eiffeltower", 1),
        (exact.normalized, "a cat", "the dog", 0), (exact.normalized, "!", "?", None),
        (exact.numeric, "It is 1,200.", "1200", 1), (exact.numeric, "3 and 4", "3", 0),
        (exact.numeric, "none", "3", 0), (exact.numeric, "-0.50", "-1/2", 1),
        (exact.numeric, "3", "three", None), (exact.numeric, "7-5 = 2", "2", 1),
    ],
)  # fmt: skip
def test_exact_answers(judge, said, right, value):
    assert judge(said, {"answer": right}).value == value


def test_numbers_within_a_tolerance():
    assert exact.numeric("3.14", {"answer": "3.14159"}, tolerance=0.001).value == 1
    assert exact.numeric("3.1", {"answer": "3.14159"}, tolerance=0.001).value == 0
