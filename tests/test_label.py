"""Labels of steps from completions begun after them, by a model that continues what it reads.

It was taught to count to 5, and sometimes to leave the row of numbers at 8, after which comes 9 and
the end. A solution is right that ends with 5.
"""

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY

from jaxpost import __main__ as cli
from jaxpost import optimizers
from jaxpost.commands import label, labelling
from jaxpost.commands.candidates.judging import Asked
from jaxpost.data import preferences, prompts, rows, sources, tokenizers
from jaxpost.recipes import setup, sft

BYTES = tokenizers.load_tokenizer_from_files(tokenizers.byte_tokenizer())
REWARD = """
def ends(completion, example):
    if "?" in completion:
        return None
    assert not {"steps", "completion", "unfinished"} & example.keys()
    return float(completion.strip().endswith(example["answer"]))
"""


def write(path, lines) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    return str(path)


def read(path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model's folder, the reward's file, and solutions; two in three of them are right."""
    folder = tmp_path_factory.mktemp("counting")
    (folder / "reward.py").write_text(textwrap.dedent(REWARD))
    taught = [*["1\n2\n3\n4\n5"] * 2, "1\n2\n8\n9"]
    taught = [{"prompt": "c:", "completion": text} for text in taught]
    config = sft.Config(
        run=str(folder / "run"),
        model=setup.ModelConfig(fresh=TINY, tokenizer="bytes", remat="none"),
        data=sources.DataConfig(train=write(folder / "taught.jsonl", taught), max_length=32),
        optimizer=optimizers.OptimizerConfig(learning_rate=1e-2, schedule="constant"),
        batch_size=4,
        steps=60,
    )
    assert sft.train(config) == 0
    said = [
        {"completion": "1\n2\n3\n4\n5"},
        {"completion": "1\n2\n8\n9"},
        {"steps": ["1", "2", "3"], "unfinished": True},
        {"completion": "1\n\n2\n?"},
        {"completion": " \n "},
    ]
    write(folder / "data.jsonl", [{"prompt": "c:", "answer": "5", **each} for each in said])
    return folder


def command(folder, out, *more) -> list[str]:
    return [
        *("label", str(folder / "run" / "model"), str(folder / "data.jsonl"), str(out)),
        *("--reward", f"{folder}/reward.py:ends", "--completions", "4", "--max-tokens", "12"),
        *("--temperature", "0.5", "--batch-size", "8", *more),
    ]


@pytest.fixture(scope="module")
def labelled(folder):
    out = folder / "labels.jsonl"
    assert cli.main(command(folder, out)) == 0
    return out


def test_steps_are_as_right_as_what_comes_of_them(labelled):
    """Counting on leads to 5; after 8 comes 9; the last step is what the solution is worth."""
    found = read(labelled)
    assert [row["steps"] for row in found] == [
        ["1", "2", "3", "4", "5"],
        ["1", "2", "8", "9"],
        ["1", "2"],
        ["1", "2", "?"],
    ]
    assert [row["correct"] for row in found] == [True, False, None, None]
    assert found[0]["labels"] == [1.0] * 5
    assert found[1]["labels"] == [1.0, 1.0, 0.0, 0.0]
    assert found[2]["labels"] == [1.0, 1.0]
    assert found[3]["labels"] == [1.0, 1.0, None]  # what cannot be judged is not wrong
    assert found[3]["unjudged"] == {"none": 1}
    for row in found:
        lengths = [len(each) if each is not None else None for each in row["rollouts"]]
        last = [] if row["row"] == 2 else [None]
        assert lengths == [4] * (len(lengths) - len(last)) + last


def test_what_is_left_out_and_what_could_not_be_judged_is_told(folder, tmp_path, capsys):
    out = tmp_path / "labels.jsonl"
    assert cli.main(command(folder, out, "--rows", "5")) == 0
    told = capsys.readouterr().out
    assert "14 steps, of which 11 are right and 2 wrong" in told
    assert "1 steps without a label: 0 after which there is no room" in told
    assert "1 of 47 completions could not be judged: none 1" in told
    assert "left out: 1 rows without a step" in told
    assert "data.jsonl:5" in told


def test_draws_depend_on_row_step_and_number_alone(labelled, folder, tmp_path):
    """Fewer rows, other batches, and more completions; at a temperature where outcomes differ."""
    hot = ("--temperature", "1.5", "--soft")
    wide, narrow, more = (tmp_path / f"{name}.jsonl" for name in ("wide", "narrow", "more"))
    assert cli.main(command(folder, wide, *hot)) == 0
    assert cli.main(command(folder, narrow, *hot, "--rows", "2", "--batch-size", "4")) == 0
    assert cli.main(command(folder, more, *hot, "--rows", "1", "--completions", "6")) == 0
    first = read(wide)
    assert [row["rollouts"] for row in read(narrow)] == [row["rollouts"] for row in first[:2]]
    assert [each and each[:4] for each in read(more)[0]["rollouts"]] == first[0]["rollouts"]
    shares = [label for row in first for label in row["labels"] if label is not None]
    assert any(0 < share < 1 for share in shares)
    for row in first:
        for label_of, each in zip(row["labels"], row["rollouts"], strict=True):
            assert each is None or label_of == sum(each) / len(each)


def test_a_command_that_was_stopped_goes_on(labelled, folder, tmp_path, capsys):
    """A line and a half are there; what was written stays, and the end is the same."""
    whole = labelled.read_bytes()
    first, second, *_ = whole.splitlines(keepends=True)
    out = tmp_path / "labels.jsonl"
    out.write_bytes(first + second[: len(second) // 2])
    assert cli.main(command(folder, out)) == 0
    assert "1 of 4 prompts are there" in capsys.readouterr().err
    assert out.read_bytes() == whole
    assert cli.main(command(folder, out)) == 0
    assert out.read_bytes() == whole


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--soft"], "soft: false -> true"),
        (["--temperature", "0.6"], "temperature: 0.5 -> 0.6"),
        (["--completions", "5"], "completions: 4 -> 5"),
        (["seed=1"], "seed: 0 -> 1"),
        (["scorer.function=a:b"], "none is chosen"),
    ],
)
def test_other_settings_are_refused(more, told, labelled, folder, capsys):
    before = labelled.read_bytes()
    assert cli.main(command(folder, labelled, *more)) != 0
    assert told in capsys.readouterr().err
    assert labelled.read_bytes() == before


def test_what_cannot_be_read_is_refused_by_its_line(labelled, folder, tmp_path, capsys):
    """A bad row, a bad name, a file of something else."""
    base = {"prompt": "c:", "answer": "5"}
    for row, said in (
        ({"steps": ["1", 2]}, "bad.jsonl:1: column steps: expected a list of texts"),
        ({}, "bad.jsonl:1: a solution is the column steps"),
        ({"completion": "1", "unfinished": "yes"}, "bad.jsonl:1: column unfinished"),
        ({"completion": "\n"}, "no solution has a step"),
    ):
        data = write(tmp_path / "bad.jsonl", [{**base, **row}])
        arguments = command(folder, tmp_path / "out.jsonl")
        arguments[2] = data
        assert cli.main(arguments) == cli.USAGE
        assert said in capsys.readouterr().err
    for out, said in (
        (tmp_path / "out.csv", "call it out.jsonl"),
        (tmp_path / "no" / "out.jsonl", "there is no folder"),
        (folder / "data.jsonl", "is what is read"),
        (folder / "taught.jsonl", "is no row of labelled steps"),
    ):
        assert cli.main(command(folder, out)) != 0
        assert said in capsys.readouterr().err


def test_both_readers_take_the_rows(labelled, folder, tmp_path):
    """`jaxpost pairs labels` makes the same labels of it, and the recipe judges those that are."""
    again = tmp_path / "again.jsonl"
    assert cli.main(["pairs", "labels", str(labelled), str(again)]) == 0
    for old, new in zip(read(labelled), read(again), strict=True):
        assert new["labels"] == [label for label in old["labels"] if label is not None]
        assert new["completions"] == old["steps"][: len(new["labels"])]
    config = preferences.StepConfig(train=str(labelled), max_length=32)
    batch, _ = next(preferences.steps(config, BYTES, preferences.Batching(4, once=True)))
    assert batch.labels[batch.step_mask].tolist() == [
        label for row in read(labelled) for label in row["labels"] if label is not None
    ]


# Parts ------------------------------------------------------------------------------------------


def asked(**columns) -> Asked:
    row = rows.PromptRow("c:", meta=columns, where="here")
    return Asked(row, prompts.Prompt(np.array([1]), "c:", columns, 0, "here"))


def solution(**columns) -> labelling.Solution:
    found = labelling.solution_of(asked(**columns), "\n")
    assert isinstance(found, labelling.Solution)
    return found


def test_solutions_are_continued_as_they_were_written():
    """Blank lines stay in what the model reads, and are no steps."""
    text = solution(completion="\na\n\n b\nc\n")
    assert text.steps == ["a", " b", "c"]
    assert text.begun == ["\na\n", "\na\n\n b\n", "\na\n\n b\nc\n"]
    assert text.said == "\na\n\n b\nc\n"
    listed = solution(steps=["a", "b\nb"], unfinished=True)
    assert (listed.steps, listed.begun, listed.finished) == (["a"], ["a\n"], False)
    message = solution(completion=[{"content": "a\nb"}])
    assert message.steps == ["a", "b"]
    nothing = labelling.solution_of(asked(completion="a", unfinished=True), "\n")
    assert nothing == rows.Dropped("no_step", "here")


def test_labels_of_eight_completions():
    """3 of 8 are right: hard 1, soft 0.375; none judged: null; the last is the solution's."""
    outcomes = [[True] * 3 + [False] * 5, [], None]
    one = labelling.Labelled(solution(completion="a\nb\nc"), outcomes, True, {"none": 8}, 0, 0)

    class Options:
        soft, escape = False, None

    assert label.row_of(one, "\n", Options())["labels"] == [1.0, None, 1.0]
    Options.soft = True
    assert label.row_of(one, "\n", Options())["labels"] == [0.375, None, 1.0]
    unknown = one._replace(correct=None)
    assert label.row_of(unknown, "\n", Options())["labels"] == [0.375, None, None]


def test_numbers_of_draws_differ():
    triples = [(row, step, k) for row in range(20) for step in range(20) for k in range(20)]
    found = {labelling.sample_id(*triple) for triple in triples}
    assert len(found) > len(triples) - 5
    assert all(0 <= number < 2**31 for number in found)
