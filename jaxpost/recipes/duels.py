"""Held-out measures by a judge of pairs: how often the policy beats what it was at the start."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpost import rewards, writer
from jaxpost.data import prompts as prompt_data
from jaxpost.data.prompts import Prompt
from jaxpost.recipes import accuracy, draws, experience, judge, setup, told
from jaxpost.recipes.experience import Experience
from jaxpost.typing import Params

MEASURES = ("eval/win_rate", "eval/missing", "eval/mean_length", "eval/clipped_ratio")


def check_held_out(config: Any) -> None:
    """As `accuracy.check_held_out`, where a judge takes the place of a reward.

    Raises:
      ValueError: it names the key.
    """
    if config.data.eval is None:
        accuracy.check_held_out(config.data, config.eval, config.checkpoint)
    for key in ("correct", "samples", "pass_at"):
        if getattr(config.eval, key) != getattr(accuracy.EvalConfig, key):
            raise ValueError(f"eval.{key} is of rewards; with a judge remove it")
    if config.checkpoint.keep_best and config.checkpoint.metric not in MEASURES:
        raise ValueError(
            f"checkpoint.metric is {config.checkpoint.metric}, which a judge does not measure; "
            f"use one of {', '.join(MEASURES)}"
        )


class Unjudged:
    """A scorer that gives no rewards."""

    def __init__(self, count: int = 0):
        self._count = count

    def submit(self, items: Sequence[rewards.Item]) -> "Unjudged":
        return Unjudged(len(items))

    def result(self) -> list[rewards.Scored]:
        return [rewards.Scored(float("nan"), {}, "", None)] * self._count


def make_evaluation(
    config: Any, policy: setup.Policy, scorer: judge.Scorer, out: writer.Writer
) -> Callable[[int, Params], dict[str, float]]:
    """`(step, params) -> metrics`: greedy completions of held-out prompts against the start's.

    `policy` is that of the start; its completions are drawn at once.
    """
    if config.data.eval is None:
        return lambda step, params: {}
    fitting = experience.that_fit(config.data, config.rollout, policy.model)
    prompts = prompt_data.held_out(fitting, policy.tokenizer, config.eval.prompts)
    sampling, key = accuracy.greedy(config.rollout), jax.random.key(config.seed)

    def answers(params: Params) -> Experience:
        return accuracy.collected(policy, params, prompts, Unjudged(), config.eval, sampling, key)

    start = answers(policy.params)

    def run(step: int, params: Params) -> dict[str, float]:
        measured, records = against(policy, prompts, answers(params), start, scorer)
        out.samples(step, records)
        return measured

    return run


def against(
    policy: setup.Policy,
    prompts: Sequence[Prompt],
    now: Experience,
    start: Experience,
    scorer: judge.Scorer,
) -> tuple[dict[str, float], list[Mapping[str, Any]]]:
    """The measures, and a record of each completion; a tie is half a win.

    Raises:
      ValueError: the judge failed on every pair.
    """
    asked = [
        draws.items_of(policy, prompt, each.groups([p]).rollout)[0]
        for p, prompt in enumerate(prompts)
        for each in (now, start)
    ]
    pending = [scorer.submit(asked[2 * p : 2 * p + 2]) for p in range(len(prompts))]
    found = now._replace(scored=[each.result()[0] for each in pending])
    values = found.rewards[:, 0]
    there = ~np.isnan(values)
    if not there.any():
        kinds = {one.failure: one.reason for one in found.scored}
        why = "; ".join(f"{kind}: {reason}" for kind, reason in kinds.items())
        raise ValueError(f"no completion of data.eval was judged ({why})")
    measured = (
        np.mean(values[there]),
        np.sum(~there),
        np.mean(found.lengths),
        np.mean(found.truncated),
    )
    return dict(zip(MEASURES, map(float, measured), strict=True)), told.records(
        found, "eval", len(prompts)
    )
