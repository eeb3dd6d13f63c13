"""Pairs and labels below the whole answer: sessions of many turns, groups of actions, steps."""

import collections
import json

import pytest

from jaxpost import __main__ as cli
from jaxpost.data import formats, preference_rows
from jaxpost.data.rows import ComparedRow, Dropped, Note, StepsRow
from jaxpost.data.trajectories import NOTES, REASONS, groups, pairs, sessions, steps


def said(*texts):
    """A user's and an assistant's messages in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def session(texts, reward=0.0, **columns):
    reward = None if reward is None else reward if isinstance(reward, tuple) else (reward,)
    where = columns.pop("where", "/".join(texts[1::2]))
    return sessions.Session(said(*texts), reward, task="t", where=where, **columns)


def answer(texts, correct=None, **columns):
    where = columns.pop("where", "/".join(texts))
    return sessions.Answer("q", texts, correct, where=where, **columns)


def split(found):
    """Pairs, and the reasons of what was left out or noted."""
    found = list(found)
    told = [one for one in found if isinstance(one, Dropped | Note)]
    assert {one.reason for one in told} <= {*REASONS, *NOTES}
    made = [one for one in found if not isinstance(one, Dropped | Note)]
    return made, collections.Counter(one.reason for one in told)


def words(messages):
    return [message["content"] for message in messages]


def test_sessions_are_of_one_task_by_its_name_or_by_what_stands_before_the_first_turn():
    one, other, third = (sessions.Session(said(ask, "a"), (0.0,)) for ask in ("x", "y", "x"))
    named = [sessions.Session(said(ask, "a"), (0.0,), task=1) for ask in ("x", "y")]
    assert sessions.by_task([one, named[0], other, third, named[1]]) == [
        [one, third],
        named,
        [other],
    ]


def test_rewards_of_a_task_have_as_many_numbers():
    several = [session(["q", "a"], (1.0,)), session(["q", "b"], (1.0, 2.0))]
    with pytest.raises(
        ValueError, match="b: column reward: 2 numbers, and 1 at a, of the same task"
    ):
        sessions.by_task(several)


# Whole trajectories --------------------------------------------------------------------------


def test_the_best_of_a_task_meets_each_that_is_worse():
    best = session(["go", "a", "1", "b"], 1.0)
    found, told = split(
        pairs.trajectory_pairs(
            [
                session(["go", "c"], 0.2),
                best,
                session(["go", "a", "1", "d"], 0.5),
                session(["go", "e"], 1.0),
                session(["go", "a", "1", "f"], 0.0, branch=1),
            ]
        )
    )
    assert told == {"tie": 1, "branched": 1}
    assert all(pair.winner is best for pair in found)
    assert [words(pair.rejected) for pair in found] == [["c"], ["d"]]
    assert [words(pair.chosen) for pair in found] == [["a", "1", "b"], ["b"]]
    row = found[1].row()
    assert words(row["prompt"]) == ["go", "a", "1"]
    assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.5)
    assert (row["first_turn"], row["chosen_turns"], row["rejected_turns"]) == (1, 2, 2)


def test_whole_sessions_have_all_turns_on_both_sides():
    best = session(["go", "a", "go", "b"], 1.0)
    worse = session(["go", "a", "go", "d"], 0.0)
    (pair,), _ = split(pairs.trajectory_pairs([best, worse], whole=True))
    assert words(pair.row()["prompt"]) == ["go"]
    assert (words(pair.chosen), words(pair.rejected)) == (["a", "go", "b"], ["a", "go", "d"])
    other = session(["stay", "a"], 0.0)
    assert split(pairs.trajectory_pairs([best, other], whole=True)) == ([], {"prompts_differ": 1})


def test_only_the_worst_and_only_experts():
    several = [
        session(["go", text], reward) for text, reward in zip("abc", (0.9, 0.1, 0.5), strict=1)
    ]
    found, told = split(pairs.trajectory_pairs(several, worst=True))
    assert [words(pair.rejected) for pair in found] == [["b"]]
    assert told == {"not_worst": 1}
    assert split(pairs.trajectory_pairs(several, least=1.0)) == ([], {"no_expert": 3})
    assert split(pairs.trajectory_pairs(several[:1])) == ([], {"alone": 1})


def test_what_only_the_partner_says_otherwise_is_read_after_the_turn_before():
    one = session(["go", "a", "1", "b"], 1.0)
    other = session(["go", "a", "2", "c", "late"])
    (pair,), told = split(pairs.trajectory_pairs([one, other]))
    assert not told
    assert words(pair.winner.messages[: pair.split]) == ["go"]
    assert (words(pair.chosen), words(pair.rejected)) == (["a", "1", "b"], ["a", "2", "c"])


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["go", "a", "1", " b\n"], "identical"),
        (["go", "a", "2", "b"], "identical"),  # what the agent said is the same
        (["come", "a"], "prompts_differ"),
    ],
)
def test_sessions_that_cannot_be_compared(texts, reason):
    found = pairs.trajectory_pairs([session(["go", "a", "1", "b"], 1.0), session(texts)])
    assert split(found) == ([], {reason: 1})


def test_a_session_that_the_agent_begins_has_no_prompt():
    one, other = (
        sessions.Session(said("", text)[1:], (reward,)) for text, reward in (("a", 1.0), ("b", 0.0))
    )
    assert split(pairs.trajectory_pairs([one, other])) == ([], {"empty_prompt": 1})


def test_other_tools_are_another_prompt():
    one = session(["go", "a"], 1.0, extras={"tools": [{"name": "x"}]})
    assert split(pairs.trajectory_pairs([one, session(["go", "b"])])) == ([], {"prompts_differ": 1})


# Segments ------------------------------------------------------------------------------------


def test_segments_are_cut_to_the_same_number_of_turns():
    wrong = session(["go", "a", "1", "x", "2", "y", "3", "z"], 3.0, error_turn=1)
    right = session(["go", "a", "1", "b", "4", "c", "5"], 8.0)
    (pair,), told = split(pairs.segment_pairs([wrong, right]))
    assert told == {"cut_segment": 1}
    assert words(pair.chosen) == ["b", "4", "c"]
    assert words(pair.rejected) == ["x", "2", "y"]
    assert pair.row()["segment_turns"] == 2
    assert pair.row()["error_turn"] == pair.row()["first_turn"] == 1


def test_the_segment_ends_where_it_is_said_to():
    wrong = session(["go", "x", "1", "y"], error_turn=0)
    right = session(["go", "a", "1", "b"], 1.0, end_turn=0)
    (pair,), _ = split(pairs.segment_pairs([wrong, right]))
    assert (words(pair.chosen), words(pair.rejected)) == (["a"], ["x"])


def test_the_best_by_the_goal_and_then_by_the_relationship():
    wrong = session(["go", "x"], (7.0, 2.0), error_turn=0)
    several = [session(["go", text], (7.0, tie)) for text, tie in (("a", 2.5), ("b", 3.0))]
    (pair,), told = split(pairs.segment_pairs([wrong, *several]))
    assert words(pair.chosen) == ["b"]
    assert told == {"not_best": 1}
    assert "score_chosen" not in pair.row()  # equal goals are no tie


@pytest.mark.parametrize(
    ("right", "reason"),
    [
        (session(["go", "a", "1", "x", "2", "y"], 1.0), "identical"),
        (session(["go", "a", "1", "x", "8", "b"], 1.0), "partner_differs"),
        (session(["go", "a", "1"], 1.0), "no_turns"),
        (session(["go", "b", "1", "c"], 1.0), "history_differs"),
        (session(["go", "a", "1", "c"], 1.0, end_turn=0), "no_turns"),
        (session(["go", "a", "1", "c"], 0.5), "tie"),
        (session(["go", "a", "1", "c"], 0.1), "not_worse"),
    ],
)
def test_segments_that_are_no_pair(right, reason):
    wrong = session(["go", "a", "1", "x", "2", "y"], 0.5, error_turn=1)
    found, told = split(pairs.segment_pairs([wrong, right]))
    assert not found
    assert told[reason] == 1


# Suffixes and groups -------------------------------------------------------------------------


def test_suffixes_from_every_turn_of_the_expert():
    expert = session(["go", "a", "1", "b", "2", "c"], 1.0)
    rollouts = [
        session(["go", "x"], 0.0, branch=0),
        session(["go", "a", "1", "b", "2", "z", "3", "w"], 0.5, branch=2),
        session(["go", "other", "1", "y"], 0.0, branch=1),
        session(["go", "a", "1", "g"], 1.0, branch=1),
        session(["go", "a", "1", "h"], None, branch=1),
        session(["go", "whole"], 0.0),
    ]
    found, told = split(pairs.suffix_pairs([expert, *rollouts]))
    sides = [(words(pair.chosen), words(pair.rejected)) for pair in found]
    assert sides == [(["a", "1", "b", "2", "c"], ["x"]), (["c"], ["z", "3", "w"])]
    assert told == {"history_differs": 1, "tie": 1, "no_reward": 1, "not_expert": 1}
    _, told = split(pairs.suffix_pairs([expert, rollouts[0]]))
    assert told == {"no_branch": 2}


def test_cuts():
    assert groups.fixed_number(7, 3) == [0, 3, 5]
    assert groups.fixed_number(2, 3) == [0, 1]  # the empty group is passed over
    assert groups.fixed_size(7, 3) == [0, 3, 6]
    assert groups.by_entropy([9, 1, 1, 8, 1, 1, 7, 1, 1, 1], 80) == [0, 3]
    assert groups.by_entropy([1, 1, 1]) == [0]


@pytest.mark.parametrize(
    ("length", "delta", "place", "phase"),
    [
        (2, 0.8, (1, 1), 1),
        (2, 0.6, (1, 2), 2),
        (5, 0.8, (2, 1), 2),
        (7, 0.2, (3, 3), 3),
        (3, 0.7, (1, 1), 1),
        (4, 0.4, (2, 2), 3),
        (6, 1.0, (2, 1), 2),
        (1, 0.1, (1, 3), 3),
        (9, 1.0, (3, 1), 3),
    ],
)
def test_the_curriculum_by_length_and_difficulty(length, delta, place, phase):
    assert groups.bucket(length, delta) == place
    assert groups.phase(place) == phase


def test_a_group_that_is_no_better_has_no_bucket():
    assert groups.bucket(2, 0.0) is groups.bucket(2, -0.5) is None
    with pytest.raises(ValueError, match=r"1\.5, above the first edge of difficulty 1"):
        groups.bucket(2, 1.5)


def test_a_group_is_worth_the_mean_of_the_rollouts_after_it():
    one = session(["go", "a", "1", "b"], 0.25, returns=[[1, 0, 1], []])
    assert groups.measured(one, 1) == pytest.approx(0.666667, abs=1e-6)
    assert groups.measured(one, 2) == 0.25  # the session ended there
    assert groups.measured(session(["go", "a", "1", "b"], 0.25), 1) is None


def test_groups_against_as_many_turns():
    expert = session(
        ["go", "a", "1", "b", "2", "c"], 1.0, returns=[[], [1, 1, 1, 0, 0], []], where="expert"
    )
    others = [
        session(
            ["go", "x", "1", "y", "8", "late"], None, branch=0, returns=[[], [0, 1, 0, 0, 0], []]
        ),
        session(["go", "a", "1", "b", "2", "z"], 0.0, branch=2),
        session(["go", "a", "1", "v"], 0.0, branch=1),
        session(["go", "p", "1", "q"], None, branch=0, returns=[[], []]),
        session(["go", "w"], 0.9, branch=0),
    ]
    found, told = split(groups.group_pairs([expert, *others], lambda one: groups.fixed_size(3, 2)))
    first, second = found
    assert (words(first.chosen), words(first.rejected)) == (["a", "1", "b"], ["x", "1", "y"])
    assert first.columns == {"length": 2, "delta": 0.4, "bucket": [1, 2], "phase": 2}
    assert second.columns == {"length": 1, "delta": 1.0, "bucket": [1, 1], "phase": 1}
    assert second.row()["first_turn"] == 2
    assert told == {"no_branch": 1, "no_return": 1, "not_better": 1}
    cut, reward = (lambda one: [0, 2]), lambda one, end: float(one is expert)
    found, told = split(groups.group_pairs([expert, *others], cut, reward=reward, last_phase=1))
    assert len(found) == 4
    assert all(pair.columns["delta"] == 1 for pair in found)


# Steps ---------------------------------------------------------------------------------------


def test_the_first_wrong_step_against_a_right_one():
    wrong = answer(["one", "two ", "bad", "end"], False, error_step=2)
    right = [
        answer(["one", "two", " bad", "done"], True),
        answer(["one", "two", "good", "done"], True),
        answer(["one", "good"], True),
    ]
    (row,), told = split(steps.step_pairs([wrong, *right], "\n"))
    assert row["initial_reason_steps"] == "one\ntwo \n"
    assert (row["chosen"], row["rejected"]) == ("good", "bad")
    assert row["full_chosen"] == "one\ntwo\ngood\ndone"
    assert row["ends_turn"] is False
    assert told == {"unused": 2}


def test_an_error_in_the_first_step_has_no_steps_before_it():
    found = steps.step_pairs([answer(["bad"], False, error_step=0), answer(["good"], True)], "\n")
    assert split(found)[0][0]["initial_reason_steps"] == ""


@pytest.mark.parametrize(
    ("wrong", "right", "reason"),
    [
        ({"error_step": 1}, ["a", " b "], "identical"),
        ({"error_step": 1}, ["c", "d"], "no_correction"),
        ({"error_step": 1}, ["a"], "no_correction"),
        ({}, ["a", "c"], "no_error_step"),
    ],
)
def test_steps_that_are_no_pair(wrong, right, reason):
    found = steps.step_pairs([answer(["a", "b"], False, **wrong), answer(right, True)], "\n")
    assert split(found) == ([], {reason: 1, "unused": 1})


def test_monte_carlo_labels():
    outcomes = [True] * 3 + [False] * 5
    assert steps.monte_carlo(outcomes, soft=True) == 0.375
    assert steps.monte_carlo(outcomes) == 1
    assert steps.monte_carlo([False] * 8) == 0
    assert steps.monte_carlo([]) is None
    table = [[1, 1], [1, 0], [1, 1]]
    assert steps.labels(3, table.__getitem__, final=False, soft=True) == [1, 0.5, 0]
    assert steps.labels(3, table.__getitem__, final=False) == [1, 1, 0]


def test_labels_of_missing_steps_and_steps_without_labels_are_left_out():
    rollouts = [[True], [True, False], [], [False], [True], [True]]
    (row,), told = split(steps.labelled(answer([*"abcde"], True, rollouts=rollouts), "\n"))
    assert (row["completions"], row["labels"]) == (["a", "b"], [1, 1])
    assert told == {"missing_steps": 1, "unlabelled": 3}
    assert split(steps.labelled(answer(["a", "b"]), "\n")) == ([], {"no_label": 1})


def test_an_answer_that_was_cut_off_has_no_last_step():
    rollouts = [[True], [False], [False]]
    given = answer("a\n\nb\nhal", False, rollouts=rollouts, unfinished=True)
    whole, notes = steps.in_steps(given, "\n")
    assert [note.reason for note in notes] == ["unfinished_step"]
    (row,), told = split(steps.labelled(whole, "\n"))
    assert (row["completions"], row["labels"]) == (["a", "b"], [1, 0])
    assert told == {"missing_steps": 1}
    assert split(steps.step_pairs([whole], "\n")) == ([], {"no_error_step": 1})


def test_the_separator_in_a_step_is_escaped():
    given = answer(["a\nb", "c"], True, rollouts=[[True], []])
    (row,), told = split(steps.labelled(given, "\n"))
    assert row["completions"] == ["a\\nb", "c"]
    assert told == {"escaped": 1}
    assert steps.escaped("a##b", "##", "=") == "a=b"
    with pytest.raises(ValueError, match="set --escape"):
        steps.escaped("a##b", "##")


# The command ---------------------------------------------------------------------------------


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_as(path, kinds):
    """The rows of a file as a recipe reads them."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        shape = formats.detect(row.keys(), row, accept=kinds)
        found.append(formats.normalize(row, shape, "out"))
    return found


def run(kind, tmp_path, rows, *options):
    out = tmp_path / "out.jsonl"
    assert cli.main(["pairs", kind, write(tmp_path / "in.jsonl", rows), str(out), *options]) == 0
    return out


def test_pairs_of_turns_are_read_as_preferences(tmp_path, capsys):
    rows = [
        {"messages": said("go", "a", "1", "b", "2"), "reward": 1},
        {"messages": said("go", "a", "1", "c"), "reward": 0, "error_turn": 1},
        {"messages": said("go", "a", "1", "d"), "reward": 0},
        {"messages": said("stay", "a"), "reward": 0},
    ]
    out = run("trajectory", tmp_path, rows)
    first, second = read_as(out, preference_rows.PAIRS)
    assert isinstance(first, ComparedRow)
    assert words(first.prompt) == ["go", "a", "1"]
    assert [words(side) for side in first.completions] == [["b"], ["c"]]
    assert first.meta["first_turn"] == 1
    assert [words(side) for side in second.completions] == [["b"], ["d"]]
    printed = capsys.readouterr().out
    assert "left out: 1 alone: the only session of its task" in printed
    assert "in.jsonl:4" in printed
    assert "wrote 2 trajectory pairs" in printed
    out.unlink()
    repeated = [{**row, "messages": said("go", "a", "go", *"ab"[i:])} for i, row in enumerate(rows)]
    (pair,) = read_as(run("trajectory", tmp_path, repeated[:2], "--whole"), preference_rows.PAIRS)
    assert words(pair.prompt) == ["go"]  # a side that says it again does not repeat the prompt
    assert [words(side) for side in pair.completions] == [["a", "go", "a"], ["a", "go", "b"]]
    out.unlink()
    (pair,) = read_as(run("segment", tmp_path, rows), preference_rows.PAIRS)
    assert [words(side) for side in pair.completions] == [["b"], ["c"]]


def test_groups_are_read_as_preferences(tmp_path):
    texts = ["go", "a", "1", "b", "2", "c"]
    rows = [
        {"messages": said(*texts), "reward": 1, "task": 7, "entropies": [0, 9, 0]},
        {"messages": said("go", "a", "1", "x"), "reward": 0, "task": 7, "branch": 1},
    ]
    (pair,) = read_as(run("group", tmp_path, rows, "--cut", "entropy"), preference_rows.PAIRS)
    assert [words(side) for side in pair.completions] == [["b", "2", "c"], ["x"]]
    assert pair.scores == [1, 0]
    assert pair.meta["bucket"] == [1, 1]
    assert pair.meta["task"] == 7


def test_steps_are_read_as_steps(tmp_path):
    rows = [
        {"prompt": "q", "completion": "a\n\nb\n\nc", "correct": False, "error_step": [2, 1]},
        {"prompt": "q", "completion": "a\n\nd", "correct": True},
    ]
    out = run("step", tmp_path, rows, "--separator", "\\n\\n")
    (pair,) = read_as(out, preference_rows.PAIRS)
    assert pair.begun == "a\n\n"
    assert pair.completions == ["d", "b"]
    rows = [
        {"prompt": "q", "steps": ["a", "b"], "rollouts": [[1, 0, None], None], "correct": False}
    ]
    (row,) = read_as(
        run("labels", tmp_path, rows, "--soft", "--overwrite"), preference_rows.STEPWISE
    )
    assert isinstance(row, StepsRow)
    assert (row.steps, row.labels) == (["a", "b"], [0.5, 0])


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        (
            "segment",
            {"messages": said("q", "a"), "reward": 0, "error_turn": 1},
            "a turn from 0 to 0",
        ),
        ("segment", {"messages": said("q"), "reward": 0}, "no assistant's message"),
        ("segment", {"messages": said("q", "a")}, "reward: is needed"),
        ("segment", {"messages": said("q", "a"), "reward": [1, "high"]}, "expected a number"),
        ("group", {"messages": said("q", "a"), "reward": 0, "returns": [[1], [1]]}, "1 lists"),
        ("group", {"messages": said("q", "a"), "reward": 0, "groups": [1]}, "groups: expected"),
        ("step", {"prompt": "q", "steps": ["a"], "error_step": 1}, "error_step is 1"),
        ("labels", {"prompt": "q", "steps": [""]}, "a step without words"),
        ("labels", {"prompt": "q", "steps": ["a"], "rollouts": [[0.5]]}, "true or false"),
    ],
)
def test_bad_rows_name_file_and_line(kind, row, said, tmp_path, capsys):
    source, out = write(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl"
    assert cli.main(["pairs", kind, source, str(out)]) == 1
    printed = capsys.readouterr().err
    assert "in.jsonl:1: " in printed
    assert said in printed
    assert not out.exists()


def test_bad_rows_can_be_left_out_and_counted(tmp_path, capsys):
    good = [{"messages": said("q", text), "reward": i} for i, text in enumerate("ab")]
    rows = [*good, {"messages": [], "reward": 0}]
    run("trajectory", tmp_path, rows, "--malformed", "drop")
    assert "left out: 1 malformed" in capsys.readouterr().out


def test_wrong_usage_is_refused(tmp_path, capsys):
    source, out = write(tmp_path / "in.jsonl", []), tmp_path / "out.jsonl"
    for arguments, text in (
        (["segment", source, str(out), "--phase", "2"], "--phase is for group, not for segment"),
        (["group", source, str(out), "--lengths", "3,0"], "--lengths rise from 0"),
        (["group", source, str(out), "--percentile", "9"], "--percentile is for --cut entropy"),
        (["step", source, str(tmp_path / "out.json")], "call it out.jsonl"),
        (["step", source, source, "--overwrite"], "exists; choose another OUT"),
    ):
        assert cli.main(["pairs", *arguments]) == 2
        assert text in capsys.readouterr().err
    assert cli.main(["pairs", "step", source, str(out)]) == 1
    assert "no step pairs" in capsys.readouterr().err
