"""Best of n, votes and rejection sampling: the numbers, what is drawn, and what is written."""

import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from jaxpost import __main__ as cli
from jaxpost import hub, optimizers, rewards, rollout, selection
from jaxpost.commands import best, models, reject
from jaxpost.commands.candidates import judging
from jaxpost.data import formats, preference_rows, prompts, questions, rows, sources, tokenizers
from jaxpost.hub import notes
from jaxpost.recipes import judge, setup, sft
from jaxpost.rewards import answers, resolve

# Numbers ---------------------------------------------------------------------------------------


def test_best_of_two_of_four_by_hand():
    """Of 6 pairs the best of all is the best in 3, the second in 2, the third in 1."""
    np.testing.assert_allclose(selection.chances(4, 2), [3 / 6, 2 / 6, 1 / 6, 0])
    scores, values = np.array([0.9, 0.1, 0.5, 0.5]), np.array([0.0, 1.0, 1.0, 0.0])
    assert selection.best_of(scores, values, 2) == pytest.approx(3 / 6 * 0 + 3 / 6 * 0.5)
    assert selection.best_of(scores, values, 1) == pytest.approx(np.mean(values))
    assert selection.best_of(np.array([np.nan, 0.0, -1.0]), np.array([1.0, 0.0, 0.0]), 2) == 0.0
    assert selection.pass_at(np.array([True, False, False, False]), 2) == 0.5


def test_votes_by_hand():
    """Pairs of A, A, B: A in one, a tie in two. Math-Shepherd's scores: A 1.085403, B 0.549834."""
    said, values = np.array([0, 0, 1]), np.array([1.0, 1.0, 0.0])
    assert selection.majority(said, values, 2) == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert selection.majority(said, values, 3) == 1.0
    said, scores = np.array([0, 1, 0]), np.array([0.731059, 0.549834, 0.354344])
    whole = selection.subsets(3, 3, 10, (0,))
    assert selection.weighted(said, scores, np.array([1.0, 0.0, 1.0]), whole) == 1.0
    assert (
        selection.weighted(said, np.array([0.2, 0.5, 0.3]), np.array([1.0, 0.0, 1.0]), whole) == 0.5
    )
    assert selection.weighted(np.array([-1, -1]), scores[:2], values[:2], np.array([[0, 1]])) == 0.0
    with pytest.raises(ValueError, match=r"a vote weighs -0\.5"):
        selection.weighted(said, -scores.round(1) + 0.2, values, whole)


def by_counting(scores, values, said, n) -> np.ndarray:
    """best_of, pass_at, majority, weighted over every subset of n, equals by their mean."""
    means = {a: np.mean(values[said == a]) for a in set(said.tolist()) - {-1}}
    found = []
    for chosen in map(list, itertools.combinations(range(len(scores)), n)):
        top = [i for i in chosen if scores[i] == max(scores[chosen])]
        row = [np.mean(values[top]), np.max(values[chosen])]
        for weights in (np.ones_like(scores), scores):
            sums = {
                a: sum(weights[i] for i in chosen if said[i] == a) for a in said[chosen].tolist()
            }
            sums.pop(-1, None)
            won = [means[a] for a, total in sums.items() if total == max(sums.values())]
            row.append(np.mean(won) if won else 0.0)
        found.append(row)
    return np.mean(found, axis=0)


def test_every_estimate_is_the_mean_over_all_subsets():
    """So it is unbiased for n fresh completions; scores in eighths, whose sums are exact."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        scores, values = rng.integers(0, 4, 7) / 8, rng.integers(0, 2, 7).astype(float)
        said = rng.integers(-1, 3, 7)
        for n in range(1, 8):
            every = selection.subsets(7, n, 100, (0,))
            found = [
                selection.best_of(scores, values, n),
                selection.pass_at(values, n),
                selection.majority(said, values, n),
                selection.weighted(said, scores, values, every),
            ]
            np.testing.assert_allclose(found, by_counting(scores, values, said, n), atol=1e-12)


def test_the_truth_as_scorer_reaches_what_is_there():
    """Best of n by the truth is pass@n, at n = 8 of 8 and at every other."""
    rng = np.random.default_rng(1)
    for right in rng.integers(0, 2, (20, 8)).astype(float):
        for n in range(1, 9):
            reached = selection.best_of(right, right, n)
            assert reached == pytest.approx(selection.pass_at(right, n), abs=1e-12)
    assert selection.sizes(8) == [1, 2, 4, 8]
    assert selection.sizes(6) == [1, 2, 4, 6]
    assert selection.sizes(1) == [1]


def test_random_subsets_are_near_all_of_them():
    """1000 of C(16, 8) = 12870 subsets, whose votes are right half the time: within 0.05."""
    rng = np.random.default_rng(2)
    said, scores = rng.integers(0, 4, 16), rng.random(16)
    values = (said == 0).astype(float)
    few = selection.subsets(16, 8, 1000, (0, 1))
    every = selection.subsets(16, 8, 20000, (0, 1))
    assert (few.shape, every.shape) == ((1000, 8), (12870, 8))
    assert all(len(set(row)) == 8 for row in few.tolist())
    gap = selection.weighted(said, scores, values, few) - selection.weighted(
        said, scores, values, every
    )
    assert abs(gap) < 0.05


def test_large_groups_do_not_overflow():
    said, values = np.arange(1024) % 3, (np.arange(1024) % 3 == 0).astype(float)
    assert 0 <= selection.majority(said[:300], values[:300], 150) <= 1
    assert selection.pass_at(values, 512) == 1.0
    assert math.isfinite(selection.best_of(np.arange(1024.0), values, 512))


# Answers ---------------------------------------------------------------------------------------


def test_answers_that_are_the_same():
    """In mathematics by algebra; x+1 is 1+x, 1/2 is 0.5 and 50 %, and 3 is another."""
    texts = [
        r"so \boxed{x+1}", r"\boxed{1+x}", "I cannot say.\nNo.", r"\boxed{\frac{2}{4}}",
        "The answer is 0.5.", r"\boxed{50\%}", "<think>\\boxed{3}</think> \\boxed{3}",
    ]  # fmt: skip
    said = [answers.math(text) for text in texts]
    assert said == ["x+1", "1+x", None, "1/2", "1/2", "50\\%", "3"]
    with answers.judge_of_pairs(rewards.RewardConfig("", workers=1, isolation="process")) as same:
        assert answers.merged([said, ["7", None], []], same) == [
            [0, 0, -1, 1, 1, 1, 2],
            [0, -1],
            [],
        ]


def test_the_answers_of_known_verifiers_are_found_by_themselves():
    for path, find in answers.OF_VERIFIERS.items():
        assert best.known_finder(rewards.RewardConfig(path)) is resolve.resolve(find)
    assert best.known_finder(rewards.RewardConfig("mine.py:reward")) is None
    assert best.known_finder(rewards.RewardConfig(model="folder")) is None


def test_many_answers_are_compared_no_more_than_is_bearable():
    said = [f"x+{n}" for n in range(40)] + ["x+7"]
    often = answers.frequent(said)
    assert (len(often), often[:2], "x+7" in often, "x+39" in often) == (
        16,
        ["x+0", "x+1"],
        True,
        False,
    )


@pytest.mark.parametrize(
    ("find", "found"),
    [
        (answers.plain, ["The Cat.", "cat", None, "1,000"]),
        (answers.normalized, ["cat", "cat", None, "1000"]),
        (answers.number, [None, None, None, "1000"]),
    ],
)
def test_other_answers_are_the_same_as_text(find, found):
    texts = ["The Cat.", "<answer> cat </answer>", "<think>cat</think>", "<answer>1,000</answer>"]
    assert [find(text) for text in texts] == found


# Commands --------------------------------------------------------------------------------------

JUDGES = '''
import json, pathlib

LOG = pathlib.Path(__file__).with_name("judged.jsonl")


def low(completion, example):
    """Right where the first byte is below 100; some rows cannot be judged."""
    with LOG.open("a") as file:
        file.write(json.dumps(completion) + "\\\\n")
    return None if example["number"] == 3 else float(ord((completion or "~")[0]) < 100)


def parity(completion, example):
    return sum(map(ord, completion)) % 5 / 4


def signed(completion, example):
    return parity(completion, example) - 0.5


def letter(completion, example):
    return float(completion == "ab"[example["number"] % 2])


def first(completion):
    return completion[:1] or None


def broken(completion):
    return 1
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory, compiled):
    """A model that knows nothing, prompts, and judges."""
    path = tmp_path_factory.mktemp("best")
    files = tokenizers.byte_tokenizer()
    size = tokenizers.load_tokenizer_from_files(files).vocab_size
    fresh = {"vocab_size": size, **TINY}
    hub.save_model(path / "tiny", *hub.init_model(fresh, jax.random.key(0), files=files))
    write(path / "asked.jsonl", [{"prompt": f"{n} is", "number": n} for n in range(5)])
    (path / "judges.py").write_text(JUDGES.replace("\\\\n", "\\n"))
    return path


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAXPOST_CACHE_DIR", "none")
    Path("judged.jsonl").unlink(missing_ok=True)
    return folder


def write(path, found) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in found))


def lines(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def drawn(path) -> list[list[str]]:
    return [row["completions"] for row in sorted(lines(path), key=lambda row: row["row"])]


SAMPLING = ["--completions", "4", "--max-tokens", "4"]
BEST = ["best", "tiny", "asked.jsonl", *SAMPLING, "--reward", "judges.py:low"]
SCORED = [*BEST, "--scorer", "judges.py:parity", "--answer", "judges.py:first", "--json"]


def test_best_is_what_one_counts_by_hand(here, capsys):
    assert cli.main([*SCORED, "--samples", "kept.jsonl"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "missing for 4 of 20 completions: reward: none 4\n" in said.err
    by_n = {1: [], 2: [], 4: []}
    for row in lines("kept.jsonl"):
        if row["row"] == 3:
            assert row["rewards"] == [None] * 4
            continue
        texts = row["completions"]
        right = np.array([float(ord((text or "~")[0]) < 100) for text in texts])
        scores = np.array([sum(map(ord, text)) % 5 / 4 for text in texts])
        assert (row["rewards"], row["scores"]) == (right.tolist(), scores.tolist())
        starts = [text[:1] for text in texts]
        number = [-1 if not start else starts.index(start) for start in starts]
        for n, several in by_n.items():
            several.append(by_counting(scores, right, np.array(number), n))
    names = ("best", "pass", "majority", "weighted")
    for n, several in by_n.items():
        for name, value in zip(names, np.mean(several, axis=0), strict=True):
            assert found[f"best/{name}@{n}"] == pytest.approx(value, abs=1e-9)
        assert found[f"best/reward@{n}"] == pytest.approx(found[f"best/best@{n}"])
    assert 0 < found["best/pass@1"] < found["best/pass@4"]
    assert found["best/score@4"] > found["best/score@1"]


def test_a_completion_depends_on_its_seed_row_and_number_alone(here):
    """Not on how many are drawn at once, nor on how many there are; and it is `sample`'s."""
    more = [*BEST, "--completions", "6"]
    assert cli.main([*BEST, "--samples", "together.jsonl"]) == 0
    assert cli.main([*BEST, "--batch-size", "2", "--samples", "apart.jsonl"]) == 0
    assert cli.main([*more, "--rows", "2", "--samples", "more.jsonl"]) == 0
    assert cli.main([*BEST, "seed=1", "--samples", "other.jsonl"]) == 0
    together = drawn("together.jsonl")
    assert drawn("apart.jsonl") == together
    assert [texts[:4] for texts in drawn("more.jsonl")] == together[:2]
    assert drawn("other.jsonl") != together
    opened = models.open_model("tiny")
    prompt = [opened.tokenizer.bos_id, *opened.tokenizer.encode("2 is")]
    found = rollout.sample(
        opened.model,
        opened.params,
        [prompt],
        jax.random.key(0),
        sample_ids=[1024 * 2 + 3],
        max_new_tokens=4,
        stop_ids=opened.tokenizer.eos_ids,
    )
    ids = found.tokens[0, : found.lengths[0]].tolist()
    ids = rollout.text.without_stop_id(ids, opened.tokenizer.eos_ids)
    assert opened.tokenizer.decode(ids) == together[2][3]


def test_a_stopped_command_goes_on(here, capsys):
    """Two rows and a half are there: the others are drawn and judged, and all is as it was."""
    command = [*SCORED, "--batch-size", "4", "--samples", "stopped.jsonl"]
    assert cli.main(command) == 0
    told, whole = capsys.readouterr().out, Path("stopped.jsonl").read_text()
    some = whole.splitlines(keepends=True)
    Path("stopped.jsonl").write_text("".join(some[:2]) + some[2][:50])
    Path("judged.jsonl").unlink()
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert (said.out, Path("stopped.jsonl").read_text()) == (told, whole)
    assert "stopped.jsonl: 2 of 5 prompts are there\n" in said.err
    assert len(Path("judged.jsonl").read_text().splitlines()) == 3 * 4
    Path("judged.jsonl").unlink()
    assert cli.main(command) == 0
    assert not Path("judged.jsonl").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--temperature", "2"], "temperature: 1.0 -> 2.0"),
        (["seed=3"], "seed: 0 -> 3"),
        (["--scorer", "judges.py:signed"], 'scorer.function: "judges.py:parity" -> "judges.py:sig'),
        (["--completions", "5"], "completions: 4 -> 5"),
    ],
)
def test_other_settings_are_refused(more, said, here, capsys):
    command = [*SCORED, "--rows", "1", "--samples", "settled.jsonl"]
    assert cli.main(command) == 0
    before = Path("settled.jsonl").read_text()
    assert cli.main([*command, *more]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert "give settled.jsonl in MODEL's place" in told
    assert Path("settled.jsonl").read_text() == before


def test_other_data_and_other_files_are_refused(here, capsys):
    command = [*SCORED, "--rows", "1", "--samples", "held.jsonl"]
    assert cli.main(command) == 0
    write("changed.jsonl", [{"prompt": "0 is", "number": 1}])
    assert cli.main([*command[:2], "changed.jsonl", *command[3:]]) == 1
    assert (
        "held.jsonl:1: row 0 of DATA was another (changed.jsonl:1 now)" in capsys.readouterr().err
    )
    assert cli.main([*command[:-1], "asked.jsonl"]) == 1
    assert "asked.jsonl:1 is no row of judged completions" in capsys.readouterr().err
    Path("notes.jsonl").write_text("a line of mine without an end")
    assert cli.main([*command[:-1], "notes.jsonl"]) == 1
    assert "notes.jsonl:1 is no row of judged completions" in capsys.readouterr().err
    assert Path("notes.jsonl").read_text() == "a line of mine without an end"


def test_completions_of_another_tool(here, capsys):
    """Judged as if they were drawn; rows find theirs by the prompt, and what finds none is told."""
    write(
        "given.jsonl",
        [
            {"prompt": [{"role": "user", "content": "1 is"}], "responses": ["a", "\x7f"]},
            {
                "prompt": "0 is",
                "responses": [{"text": "Z"}, [{"role": "assistant", "content": "b"}]],
            },
            {"prompt": "9 is", "responses": ["c"]},
        ],
    )
    command = ["best", "given.jsonl", "asked.jsonl", "--reward", "judges.py:low", "--json"]
    assert cli.main(command) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "best/pass@1": 0.75, "best/pass@2": 1.0, "best/best@1": 0.75, "best/best@2": 1.0,
        "best/reward@1": 0.75, "best/reward@2": 1.0,
    }  # fmt: skip
    assert "3 prompts of asked.jsonl have no completions\n" in said.err
    assert "1 rows of given.jsonl are of no prompt that is asked\n" in said.err
    assert "no votes: give --answer" in said.err
    assert "no --scorer: the reward itself chooses" in said.err


def test_what_is_kept_can_be_chosen_from_anew(here, capsys):
    assert cli.main([*SCORED, "--samples", "anew.jsonl"]) == 0
    first = json.loads(capsys.readouterr().out)
    again = ["best", "anew.jsonl", "asked.jsonl", "--reward", "judges.py:low", "--json"]
    more = ["--answer", "judges.py:first"]
    assert cli.main([*again, *more, "--scorer", "judges.py:parity"]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(first)
    assert cli.main([*again, *more, "--scorer", "judges.py:signed"]) == 0
    said = capsys.readouterr()
    assert "no weighted votes: a score is -0.5" in said.err
    assert not [name for name in json.loads(said.out) if "weighted" in name]
    assert cli.main([*again, *more, "--scorer", "judges.py:signed", "--vote", "sigmoid"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best/best@4"] == first["best/best@4"]
    assert "best/weighted@4" in found


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["tiny", "asked.jsonl"], 2, "give --reward: module:name, file.py:name, or the folder"),
        (
            ["tiny", "asked.jsonl", "--reward", "judges.py:lo"],
            2,
            "judges.py has no lo; did you mean low",
        ),
        (["tiny", "asked.jsonl", "--reward", "judges.py"], 2, "'judges.py' is not an import path"),
        (["tiny", "asked.jsonl", "--reward", "none"], 1, "none"),
        (["tiny", "none.jsonl", "--reward", "judges.py:low"], 2, "DATA: none.jsonl: no such file"),
        (["given2.jsonl", "asked.jsonl", *SAMPLING], 2, "--completions is for drawing, and given2"),
        (
            ["given2.jsonl", "asked.jsonl", "--step", "best"],
            2,
            "--step is of a run, and given2.jsonl",
        ),
        (
            ["given2.jsonl", "asked.jsonl", "rollout.top_k=2"],
            2,
            "rollout is for drawing, and given2",
        ),
        (["given2.jsonl", "asked.jsonl"], 2, "given2.jsonl:1: its prompt is none of asked.jsonl"),
        (["wrong.jsonl", "asked.jsonl"], 2, "wrong.jsonl:1: column completions: expected a list"),
        (["tiny", "asked.jsonl", "rollout.spare=2"], 2, "rollout.spare is for training; leave it"),
        (["tiny", "asked.jsonl", "--vote", "score"], 2, "--vote and --subsets are of votes, which"),
        (
            ["tiny", "asked.jsonl", "--answer", "judges.py:two"],
            2,
            "--answer: judges.py:two: judges.py",
        ),
        (["tiny", "asked.jsonl", "--completions", "2000"], 2, "--completions: it is 2000"),
        (["tiny", "asked.jsonl", "scorer.steps=min"], 2, "scorer"),
        (
            ["own.jsonl", "own.jsonl", "--answer", "judges.py:broken"],
            1,
            "returned 1; it returns text",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments, code, said, here, capsys):
    write("given2.jsonl", [{"prompt": "7 is", "completions": ["a"]}])
    write("wrong.jsonl", [{"prompt": "0 is", "completions": {}}])
    write("own.jsonl", [{"prompt": "0 is", "completions": ["a"], "number": 1}])
    reward = (
        []
        if "--reward" in arguments or said.startswith("give --r")
        else ["--reward", "judges.py:low"]
    )
    tokens = ["--max-tokens", "4"] if arguments[0] == "tiny" else []
    assert cli.main(["best", *arguments, *tokens, *reward]) == code
    assert said in capsys.readouterr().err


# Models that score -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scoring(folder):
    """A reward model, a process reward model and a generative verifier."""
    files = tokenizers.byte_tokenizer()
    size = tokenizers.load_tokenizer_from_files(files).vocab_size
    model, params = hub.init_model({"vocab_size": size, **TINY}, jax.random.key(5), files=files)
    head = {"weight": jax.random.normal(jax.random.key(6), (TINY["hidden_size"],))}
    hub.save_reward_model(folder / "rm", model, params, head)
    hub.save_process_reward_model(folder / "prm", model, params, head | {"bias": jnp.zeros(())})
    asked = questions.Question("{prompt} {completion}", as_chat=False)
    note = asked.note(tokenizers.load_tokenizer_from_files(files))
    hub.save_model(folder / "gv", notes.with_note(model, **note), params)
    return folder


STEPS = ["one\ntwo\nthree", "one\nfour", "five", "six\nseven"]


@pytest.mark.parametrize("scorer", ["rm", "prm", "gv"])
def test_a_model_of_rewards_chooses(scorer, scoring, here, capsys):
    """The best of 4 is the one with the highest score; of process rewards as `steps` says."""
    write("own4.jsonl", [{"prompt": "0 is", "completions": STEPS, "number": 0}])
    command = ["best", "own4.jsonl", "own4.jsonl", "--reward", "judges.py:parity", "--json"]
    chosen = {}
    for how in ("min", "product") if scorer == "prm" else (None,):
        steps = [] if how is None else [f"scorer.steps={how}"]
        given = [*command, "--scorer", scorer, "--answer", "judges.py:first", *steps]
        assert cli.main(given) == 0
        found = json.loads(capsys.readouterr().out)
        config = rewards.RewardConfig(model=scorer, **({} if how is None else {"steps": how}))
        items = [rewards.Item("0 is", text, {}) for text in STEPS]
        with judge.opened(config) as opened:
            scores = np.array([one.value for one in opened.submit(items).result()])
        top = STEPS[int(np.argmax(scores))]
        assert found["best/reward@4"] == pytest.approx(sum(map(ord, top)) % 5 / 4)
        assert found["best/score@4"] == pytest.approx(np.max(scores), rel=1e-5)
        assert found["best/score@1"] == pytest.approx(np.mean(scores), rel=1e-5)
        weights = 0.5 + 0.5 * np.tanh(0.5 * scores) if scorer == "rm" else scores
        votes = np.bincount([0, 0, 1, 2], weights)  # o, o, f, s; of the two only one is right
        assert found["best/weighted@4"] == (0.5 if np.argmax(votes) == 0 else 0.0)
        chosen[how] = found["best/score@1"]
    assert len(set(chosen.values())) == len(chosen)


# Rejection sampling ----------------------------------------------------------------------------


def candidates(texts, values, scores=None, cut=(), prompt="2+2=") -> judging.Candidates:
    row = rows.PromptRow(prompt, where="x:1")
    asked = judging.Asked(row, prompts.Prompt(np.zeros(0, np.int32), prompt, {}, 0, "x:1"))
    found = np.array(values, float)
    return judging.Candidates(
        asked,
        texts,
        [number in cut for number in range(len(texts))],
        found,
        found if scores is None else np.array(scores, float),
        ["" if value == value else "reward: none" for value in found],
    )


def test_what_passes_and_why_the_rest_does_not():
    texts = ["4", "5", "four", "4 ", "", "4!", "four", "?"]
    one = candidates(texts, [1, 0, 1, 1, 1, 1, 1, math.nan], cut={5})
    found = reject.sorted_out(one, 1.0, None)
    assert (found.kept, found.failed) == ([0, 2], [1])
    assert sorted(found.reasons) == [
        "below",
        "cut_off",
        "duplicate",
        "duplicate",
        "empty",
        "no_reward",
    ]
    found = reject.sorted_out(one, 1.0, 1)
    assert found.kept == [0]
    assert found.reasons.count("over_cap") == 1
    scored = candidates(texts, [1, 0, 1, 1, 1, 1, 1, 0], [0.1, 0.9, 0.3, 0.2, 0, 0, 0.3, 0.5], {5})
    assert reject.sorted_out(scored, 1.0, None).kept == [2, 3]  # "4 " before "4"
    assert reject.sorted_out(scored, None, 2).kept == [1, 7]


def test_pairs_are_of_the_best_that_passes_and_the_worst_that_does_not():
    one = candidates(["a", "b", "c", "d"], [1, 0, 1, 0], [0.6, 0.5, 0.9, 0.2])
    found = reject.pair_of(one, reject.sorted_out(one, 1.0, None), 1.0, 0.0)
    assert found == {
        "prompt": "2+2=", "chosen": "c", "rejected": "d", "score_chosen": 0.9, "score_rejected": 0.2
    }  # fmt: skip
    assert reject.pair_of(one, reject.sorted_out(one, 1.0, None), 1.0, 0.7) == "within_margin"
    assert reject.pair_of(one, reject.sorted_out(one, None, 1), None, 0.0) == found
    wrong = candidates(["a", "b"], [0, 0])
    assert reject.pair_of(wrong, reject.sorted_out(wrong, 1.0, None), 1.0, 0.0) == "no_chosen"
    assert reject.pair_of(wrong, reject.sorted_out(wrong, None, 1), None, 0.0) == "within_margin"
    right = candidates(["a", "a "], [1, 1])
    assert reject.pair_of(right, reject.sorted_out(right, 1.0, None), 1.0, 0.0) == "no_rejected"


def test_reject_writes_rows_that_recipes_read(here, capsys):
    """Text stays text and messages stay messages, with the tools that the prompt had."""
    turn = [{"role": "user", "content": "1+1"}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    write(
        "sums.jsonl",
        [
            {"prompt": "0 is", "number": 0, "completions": ["a", "b", "a", "c"]},
            {"prompt": turn, "number": 1, "tools": tools, "completions": ["b", "z"]},
            {"prompt": "5 is", "number": 5, "completions": ["z"], "cut": [False]},
        ],
    )
    command = ["reject", "sums.jsonl", "sums.jsonl", "rft.jsonl", "--reward", "judges.py:letter"]
    more = ["--least", "1", "--pairs", "rft_pairs.jsonl"]
    assert cli.main([*command, *more]) == 0
    said = capsys.readouterr().out
    assert "left out of 7 completions: 5\n  4 below: its reward is under --least\n" in said
    assert "  1 duplicate: the same text as another of its prompt\n" in said
    assert "1 of 3 prompts have no completion that is kept\n" in said
    assert "wrote 2 rows of 2 prompts to rft.jsonl\n" in said
    assert "prompts without a pair: 1\n  1 no_chosen: no completion passes\n" in said
    assert lines("rft.jsonl") == [
        {"prompt": "0 is", "completion": "a", "reward": 1.0, "copies": 2},
        {
            "prompt": turn,
            "tools": tools,
            "completion": [{"role": "assistant", "content": "b"}],
            "reward": 1.0,
            "copies": 1,
        },
    ]
    source = sources.open_source("rft.jsonl", sources.DataConfig(train="rft.jsonl"))
    assert [type(source[0]), type(source[1])] == [formats.CompletionRow] * 2
    assert (source[0].prompt, source[0].completion) == ("0 is", "a")
    assert source[1].tools == tools
    source = sources.open_source(
        "rft_pairs.jsonl", sources.DataConfig(train="rft_pairs.jsonl"), preference_rows.PAIRS
    )
    assert [source[0].completions, source[0].scores] == [["a", "b"], [1.0, 0.0]]
    assert source[1].completions[1] == [{"role": "assistant", "content": "z"}]
    assert cli.main([*command, *more]) == 2
    assert "rft.jsonl exists; choose another name, or give --overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ([], 2, "say what passes: --least REWARD, or --keep K"),
        (["--keep", "1", "--margin", "1"], 2, "--margin is of --pairs"),
        (["--keep", "1", "--pairs", "left.jsonl"], 2, "OUT, --pairs and --samples are different"),
        (["--least", "2"], 1, "nothing is left, and left.jsonl is not written; lower what is"),
        (["--keep", "1", "--pairs", "no/pairs.jsonl"], 2, "no/pairs.jsonl: there is no folder no;"),
        (["--keep", "1", "--pairs", "pairs.txt"], 2, "call it pairs.jsonl"),
    ],
)
def test_reject_says_what_is_wrong(more, code, said, here, capsys):
    write("left_from.jsonl", [{"prompt": "0 is", "number": 0, "completions": ["a", "b"]}])
    command = ["reject", "left_from.jsonl", "left_from.jsonl", "left.jsonl"]
    assert cli.main([*command, "--reward", "judges.py:letter", *more]) == code
    assert said in capsys.readouterr().err
    assert not Path("left.jsonl").exists()


def config_of(run, start, train, rate) -> sft.Config:
    return sft.Config(
        run=str(run),
        model=start,
        data=sources.DataConfig(train=str(train), max_length=64),
        optimizer=optimizers.OptimizerConfig(learning_rate=rate, schedule="constant"),
        steps=60,
        batch_size=4,
    )


@pytest.mark.slow
def test_fine_tuning_on_what_passes_raises_held_out_accuracy(here, capsys):
    """From at most 40 % of samples right (one of four letters at random) to at least 85 %.

    The letter is told by the last digit; two-digit numbers that end alike are in both parts.
    """
    asked = [{"prompt": f"{n:02}:", "number": n} for n in range(100)]
    write("train.jsonl", [row for row in asked if row["number"] // 10 % 2 == 0])
    write("held_out.jsonl", [row for row in asked if row["number"] // 10 % 2 == 1])
    write("any.jsonl", [{**row, "completion": said} for row in asked for said in "abcd"])
    fresh = setup.ModelConfig(fresh=TINY, tokenizer="bytes")
    assert sft.train(config_of(here / "start", fresh, here / "any.jsonl", 1e-2)) == 0
    drawing = ["--reward", "judges.py:letter", "--max-tokens", "2", "--completions", "16"]

    def accuracy(model) -> float:
        capsys.readouterr()
        assert cli.main(["best", model, "held_out.jsonl", *drawing, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["best/pass@1"]

    assert (
        cli.main(["reject", "start/model", "train.jsonl", "passed.jsonl", *drawing, "--least", "1"])
        == 0
    )
    right = lines("passed.jsonl")
    assert 45 <= len(right) <= 50
    assert all(row["completion"] == "ab"[int(row["prompt"][1]) % 2] for row in right)
    start = setup.ModelConfig(path="start/model")
    assert sft.train(config_of(here / "tuned", start, here / "passed.jsonl", 1e-2)) == 0
    before, after = accuracy("start/model"), accuracy("tuned")
    print(f"held-out samples that are right: {before:.1%} -> {after:.1%}")
    assert before <= 0.4
    assert after >= 0.85
