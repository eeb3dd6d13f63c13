"""`jaxpost best MODEL DATA`: best of n, pass@n and votes, by any scorer."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich import console, table

from jaxpost import config as configs
from jaxpost import hub, rewards, selection
from jaxpost.commands import choosing_usage
from jaxpost.commands.candidates import file, sources
from jaxpost.commands.candidates.judging import Candidates
from jaxpost.commands.candidates.settings import Settings
from jaxpost.rewards import answers, resolve

COLUMNS = ("pass", "best", "majority", "weighted", "reward", "score")
SUBSETS = 1000
AS_NUMBERS = ("reward", "score")  # the others are shares


class Group(NamedTuple):
    """N judged completions of a prompt, as `selection` takes them.

    Attributes:
      row: of DATA.
      right, rewards, scores: [N].
      votes: [N], numbers of the answers, −1 for none; or None where they are not known.
      weights: [N], of the votes; or None where scores are no weights.
    """

    row: int
    right: np.ndarray
    rewards: np.ndarray
    scores: np.ndarray
    votes: np.ndarray | None
    weights: np.ndarray | None


def main(argv: Sequence[str]) -> int:
    """Prints the measures as a table, or as JSON."""
    options = choosing_usage.best().parse_intermixed_args(argv)
    find = finder(options.answer)
    source = sources.source_of(options)
    settings = source.settings
    find = find or known_finder(settings.reward)
    tell(settings, find)
    if find is None and (options.vote is not None or options.subsets is not None):
        raise configs.ConfigError("--vote and --subsets are of votes, which need --answer")
    found = [one for one in map(judged, file.gathered(source, options)) if one.texts]
    if not found:
        raise ValueError("no completion has a reward and a score, so there is nothing to measure")
    correct = source.correct if options.correct is None else options.correct
    groups = groups_of(found, correct)
    if find is not None:
        votes = ballots(find, found, settings)
        weights = weights_of(groups, vote_of(settings, options))
        pairs = zip(groups, votes, weights, strict=True)
        groups = [group._replace(votes=v, weights=w) for group, v, w in pairs]
    measured = measures(groups, options.subsets or SUBSETS, settings.seed)
    if settings.scorer is None:
        measured.pop("score")  # it is the reward
    print_measures(measured, options.json)
    return 0


def judged(one: Candidates) -> Candidates:
    """Only the completions that have a reward and a score."""
    there = np.flatnonzero([not reason for reason in one.reasons]).tolist()
    return one._replace(
        texts=[one.texts[i] for i in there],
        cut=[one.cut[i] for i in there],
        rewards=one.rewards[there],
        scores=one.scores[there],
        reasons=[""] * len(there),
    )


def groups_of(found: Sequence[Candidates], correct: float) -> list[Group]:
    """As arrays; nobody votes yet."""
    return [
        Group(one.asked.prompt.row, one.rewards >= correct, one.rewards, one.scores, None, None)
        for one in found
    ]


# Answers ---------------------------------------------------------------------------------------


def finder(path: str | None) -> answers.Find | None:
    """The function of --answer. Raises ConfigError where there is none."""
    if path is None:
        return None
    try:
        return resolve.resolve(path)
    except ValueError as error:
        raise configs.ConfigError(f"--answer: {error}") from error


def known_finder(reward: rewards.RewardConfig | None) -> answers.Find | None:
    """What finds the answers that the reward judges, where that is known."""
    path = answers.OF_VERIFIERS.get(str(reward and reward.function))
    return None if path is None else resolve.resolve(path)


def ballots(
    find: answers.Find, found: Sequence[Candidates], settings: Settings
) -> list[np.ndarray]:
    """[N] a prompt: the numbers of its completions' answers, −1 for none."""
    said = [[answer_of(find, one, text) for text in one.texts] for one in found]
    if find is not answers.math:
        return [np.array(answers.numbered(each)) for each in said]
    assert settings.reward is not None  # who read them has seen to it
    with answers.judge_of_pairs(settings.reward) as same:
        return [np.array(each) for each in answers.merged(said, same)]


def answer_of(find: answers.Find, one: Candidates, text: str) -> str | None:
    """A completion's answer. Raises ValueError where the function fails, or returns no text."""
    try:
        answer = find(text)
    except Exception as error:
        where = one.asked.row.where
        raise ValueError(
            f"--answer failed on a completion of {where}: {type(error).__name__}: {error}"
        ) from error
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"--answer returned {answer!r}; it returns text, or None for no answer")
    return answer


def vote_of(settings: Settings, options: argparse.Namespace) -> str:
    """What a vote weighs: by default σ(score) where a reward model alone scores, with any sign."""
    chooser = settings.scorer or settings.reward
    if options.vote is not None or chooser is None or chooser.function or chooser.model is None:
        return options.vote or "score"
    return "sigmoid" if hub.kind_of(chooser.model) == "reward_model" else "score"


def weights_of(groups: Sequence[Group], vote: str) -> list[np.ndarray | None]:
    """[N] a prompt; None where some score is negative, which is told on standard error."""
    if vote == "sigmoid":
        return [0.5 * (1.0 + np.tanh(0.5 * group.scores)) for group in groups]
    least = min(float(np.min(group.scores)) for group in groups)
    if least < 0:
        print(
            f"no weighted votes: a score is {least:g}, which would take votes from its answer; "
            "--vote sigmoid weighs them by σ(score)",
            file=sys.stderr,
        )
    return [None if least < 0 else group.scores for group in groups]


# Measures --------------------------------------------------------------------------------------


def tell(settings: Settings, find: answers.Find | None) -> None:
    """Says what chooses, and why there are no votes."""
    if settings.scorer is None:
        print("no --scorer: the reward itself chooses", file=sys.stderr)
    if find is None:
        print("no votes: give --answer, which finds a completion's final answer", file=sys.stderr)


def measures(groups: Sequence[Group], subsets: int, seed: int) -> dict[str, dict[int, float]]:
    """Each measure by n: its mean over the prompts that have n judged completions."""
    out: dict[str, dict[int, float]] = {name: {} for name in COLUMNS}
    for n in selection.sizes(max(len(group.right) for group in groups)):
        rows = [of_prompt(group, n, subsets, seed) for group in groups if len(group.right) >= n]
        if len(rows) < len(groups):
            fewer = len(groups) - len(rows)
            print(f"n = {n} is without {fewer} prompts, which have fewer", file=sys.stderr)
        for name in rows[0]:
            out[name][n] = float(np.mean([row[name] for row in rows]))
    return {name: values for name, values in out.items() if values}


def of_prompt(group: Group, n: int, subsets: int, seed: int) -> dict[str, float]:
    """What n completions of one prompt are worth."""
    right = group.right.astype(float)
    out = {
        "pass": selection.pass_at(group.right, n),
        "best": selection.best_of(group.scores, right, n),
        "reward": selection.best_of(group.scores, group.rewards, n),
        "score": selection.best_of(group.scores, group.scores, n),
    }
    if group.votes is not None:
        out["majority"] = selection.majority(group.votes, right, n)
    if group.votes is not None and group.weights is not None:
        chosen = selection.subsets(len(right), n, subsets, (seed, group.row, n))
        out["weighted"] = selection.weighted(group.votes, group.weights, right, chosen)
    return out


def print_measures(found: dict[str, dict[int, float]], as_json: bool) -> None:
    """A row for each n, or one line of JSON: best/pass@8 and so on."""
    if as_json:
        flat = {f"best/{name}@{n}": value for name, of in found.items() for n, value in of.items()}
        print(json.dumps(flat))
        return
    shown = table.Table("n", *found)
    for column in shown.columns:
        column.justify = "right"
    for n in found["pass"]:
        cells = [
            f"{of[n]:.4f}" if name in AS_NUMBERS else f"{of[n]:.2%}" for name, of in found.items()
        ]
        shown.add_row(str(n), *cells)
    console.Console().print(shown)
