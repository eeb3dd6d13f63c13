"""Held-out measures of a policy by its reward: greedy accuracy, mean reward, pass@k."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpost import selection, writer
from jaxpost.checkpoint import CheckpointConfig
from jaxpost.data import prompts as prompt_data
from jaxpost.data.prompts import Prompt
from jaxpost.options import check_ranges, option
from jaxpost.recipes import draws, evaluation, experience, judge, setup, told
from jaxpost.typing import Array, Params

EVALUATION = 1 << 30  # a step that no run reaches, for the key
GREEDY = 1e-30  # a temperature so low that `sampling` draws the most probable token


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and how the policy is measured on `data.eval`."""

    every: int = option(
        0, "evaluate after this many rollouts; 0 evaluates at start and end", "rollouts", least=0
    )
    prompts: int | None = option(None, "use only the first so many; null uses all", least=1)
    batch_size: int = option(64, "completions sampled at once", least=1)
    correct: float = option(
        1.0, "a completion is correct if its reward is at least this", least=-1e6, most=1e6
    )
    samples: int = option(0, "completions of a prompt for pass@k, as in training; 0: none", least=0)
    pass_at: tuple[int, ...] = option((1, 8), "the k of pass@k, for those up to eval.samples")

    def __post_init__(self):
        check_ranges(self, "eval.")
        if min(self.pass_at, default=1) < 1:
            raise ValueError(f"eval.pass_at holds {min(self.pass_at)}; each k must be at least 1")

    def due(self, step: int, steps: int) -> bool:
        """Whether to evaluate after this rollout: at the start, every so often, at the end."""
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)


# Of an RL recipe, where it sets `checkpoint.keep_best`.
BEST = CheckpointConfig(metric="eval/accuracy", mode="max")


def check_held_out(
    data: prompt_data.PromptConfig,
    config: EvalConfig,
    saving: CheckpointConfig,
    used: Sequence[str] = (),
) -> None:
    """Refuses what needs `data.eval` without it, and what it could not measure.

    Without it the keys of `eval` are as by default, but for those that training `used`.

    Raises:
      ValueError: it names the key.
    """
    if data.eval is None:
        evaluation.refuse_unused(config, used)
        if saving.keep_best:
            raise ValueError(
                "checkpoint.keep_best needs data.eval: what is best is known by a metric of the "
                "held-out data"
            )
    if config.pass_at != EvalConfig.pass_at and max(config.pass_at, default=0) > config.samples:
        raise ValueError(
            f"eval.pass_at holds {max(config.pass_at)}, and eval.samples is {config.samples}; no k "
            "is above the number of samples"
        )
    if saving.keep_best and saving.metric not in (*MEASURES, *rates(config)):
        raise ValueError(
            f"checkpoint.metric is {saving.metric}, which no evaluation of this run measures; use "
            f"one of {', '.join((*MEASURES, *rates(config)))}"
        )


MEASURES = (
    "eval/accuracy",
    "eval/reward",
    "eval/missing",
    "eval/mean_length",
    "eval/clipped_ratio",
)


def rates(config: EvalConfig) -> list[str]:
    """The names of `pass_rates`, if every prompt has as many scored completions as are drawn."""
    return [f"eval/pass@{k}" for k in config.pass_at if k <= config.samples]


def make_evaluation(
    config: Any, policy: setup.Policy, scorer: judge.Scorer, out: writer.Writer
) -> Callable[[int, Params], dict[str, float]]:
    """`(step, params) -> metrics` on the held-out prompts; completions go to samples.jsonl.

    `config` is a recipe's, of which `data`, `eval`, `rollout` and `seed` are read.
    """
    if config.data.eval is None:
        return lambda step, params: {}
    fitting = experience.that_fit(config.data, config.rollout, policy.model)
    prompts = prompt_data.held_out(fitting, policy.tokenizer, config.eval.prompts)
    key = jax.random.fold_in(jax.random.key(config.seed), EVALUATION)

    def run(step: int, params: Params) -> dict[str, float]:
        measured, records = evaluate(
            policy, params, prompts, scorer, config.eval, config.rollout, key
        )
        out.samples(step, records)
        return measured

    return run


def greedy(sampling: experience.RolloutConfig) -> experience.RolloutConfig:
    """One completion a prompt, of the most probable tokens."""
    return dataclasses.replace(
        sampling,
        completions=1,
        temperature=GREEDY,
        top_k=None,
        top_p=None,
        min_p=None,
    )


def evaluate(
    policy: setup.Policy,
    params: Params,
    prompts: Sequence[Prompt],
    scorer: judge.Scorer,
    config: EvalConfig,
    sampling: experience.RolloutConfig,
    key: Array,
) -> tuple[dict[str, float], list[Mapping[str, Any]]]:
    """The measures, and a record of each greedy completion.

    Completions without a reward are counted, and in no mean.
    """
    found = collected(policy, params, prompts, scorer, config, greedy(sampling), key)
    values = found.rewards[:, 0]
    there = ~np.isnan(values)
    if not there.any():
        kinds = {one.failure: one.reason for one in found.scored}
        why = "; ".join(f"{kind}: {reason}" for kind, reason in kinds.items())
        raise ValueError(f"no completion of data.eval has a reward ({why})")
    out = {
        "eval/accuracy": float(np.mean(values[there] >= config.correct)),
        "eval/reward": float(np.mean(values[there])),
        "eval/missing": float(np.sum(~there)),
        "eval/mean_length": float(np.mean(found.lengths)),
        "eval/clipped_ratio": float(np.mean(found.truncated)),
    }
    if config.samples:
        several = dataclasses.replace(sampling, completions=config.samples)
        again = collected(policy, params, prompts, scorer, config, several, key)
        out |= pass_rates(again.rewards, config)
        out["eval/missing_samples"] = float(np.sum(np.isnan(again.rewards)))
    return out, told.records(found, "eval", len(prompts))


def collected(
    policy: setup.Policy,
    params: Params,
    prompts: Sequence[Prompt],
    scorer: judge.Scorer,
    config: EvalConfig,
    sampling: experience.RolloutConfig,
    key: Array,
) -> experience.Experience:
    """All prompts, some at a time; prompts of like length together."""
    several = max(config.batch_size // sampling.completions, 1)
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].tokens))
    sampling = dataclasses.replace(sampling, prompts=several, spare=0, stale_after=None)
    parts = []
    for number, first in enumerate(range(0, len(order), several)):
        chosen = [prompts[index] for index in order[first : first + several]]
        here = jax.random.fold_in(key, number)
        parts.append(draws.sampled(policy, params, chosen, here, sampling, scorer))
    whole = experience.join([pending.wait() for pending in parts])
    back = np.argsort(order)
    return whole.groups(back.tolist())


def pass_rates(values: np.ndarray, config: EvalConfig) -> dict[str, float]:
    """`eval/pass@k` (`selection.pass_at`); prompts with fewer than k scored ones are left out."""
    out = {}
    for k in config.pass_at:
        rates = []
        for row in values:
            scored = row[~np.isnan(row)]
            if len(scored) >= k:
                rates.append(selection.pass_at(scored >= config.correct, k))
        if rates:
            out[f"eval/pass@{k}"] = float(np.mean(rates))
    return out
