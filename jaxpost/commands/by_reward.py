"""`jaxpost eval` by a reward: greedy accuracy, mean reward, pass@k."""

import argparse
import collections
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxpost import config as configs
from jaxpost import rewards
from jaxpost.commands import models
from jaxpost.data import prompts
from jaxpost.recipes import accuracy, experience, judge, setup

MAX_TOKENS = 128
KEYS = {
    "rows": "eval.prompts",
    "batch_size": "eval.batch_size",
    "completions": "eval.samples",
    "max_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is asked, how it is sampled and judged: parts of an RL recipe's configuration."""

    data: prompts.PromptConfig
    reward: rewards.RewardConfig
    rollout: experience.RolloutConfig
    eval: accuracy.EvalConfig
    seed: int


def is_asked(opened: models.Opened, options: argparse.Namespace) -> bool:
    """Whether a reward is given, or the run has one."""
    return options.reward is not None or models.has_prompts(opened.config)


def measure(
    opened: models.Opened, options: argparse.Namespace
) -> tuple[dict[str, float], Sequence[Mapping[str, Any]]]:
    """The measures, and a record of each greedy completion.

    The draws are those of training's own evaluations, so a run's last one is found again.
    """
    settings = read_settings(opened, options)
    policy = setup.Policy(opened.model, opened.params, opened.tokenizer, None)
    asked = read_prompts(settings, policy)
    print(f"{options.data}: {len(asked)} prompts", file=sys.stderr)
    key = jax.random.fold_in(jax.random.key(settings.seed), accuracy.EVALUATION)
    with scorer_of(settings) as scorer:
        metrics, records = accuracy.evaluate(
            policy, policy.params, asked, scorer, settings.eval, settings.rollout, key
        )
    tell(settings, records)
    return metrics, records


def read_settings(opened: models.Opened, options: argparse.Namespace) -> Settings:
    """The run's own settings, or the defaults, under the options and the overrides.

    Raises:
      ConfigError: an override or option that is not understood, or has nothing to act on.
    """
    if options.generate:
        raise configs.ConfigError(
            "--generate compares with the data's answers; with a reward leave it out"
        )
    start = own_settings(opened, options)
    given = {key: vars(options)[name] for name, key in KEYS.items()}
    chosen = [f"{key}={value}" for key, value in given.items() if value is not None]
    settings = configs.override(start, [*chosen, *options.overrides])
    if options.temperature is not None and not settings.eval.samples:
        raise configs.ConfigError("--temperature is that of sampled ones; give --completions too")
    wanted = {k for k in (*settings.eval.pass_at, settings.eval.samples) if k}
    measured = dataclasses.replace(settings.eval, pass_at=tuple(sorted(wanted)))
    return dataclasses.replace(settings, eval=measured)


def own_settings(opened: models.Opened, options: argparse.Namespace) -> Settings:
    """Those of the run that a reward trained, else the defaults; on this data, by this reward."""
    config = opened.config
    if models.has_prompts(config):
        data = dataclasses.replace(config.data, train=options.data, eval=options.data)
        reward = config.reward
        if reward is None and options.reward is None:
            raise configs.ConfigError("the run was judged by pairs; give a reward: --reward PATH")
        if options.reward is not None:
            reward = dataclasses.replace(
                reward or rewards.RewardConfig(options.reward),
                function=options.reward,
                options=None,
                weight=1.0,
                name=None,
                parts=(),
                model=None,
                model_weight=1.0,
                steps=None,
            )
        assert reward is not None  # refused above
        return Settings(data, reward, config.rollout, config.eval, config.seed)
    return Settings(
        prompts.PromptConfig(
            train=options.data,
            eval=options.data,
            template_kwargs=opened.chat.template_kwargs,
        ),
        rewards.RewardConfig(options.reward),
        experience.RolloutConfig(max_new_tokens=MAX_TOKENS),
        accuracy.EvalConfig(),
        0,
    )


def read_prompts(settings: Settings, policy: setup.Policy) -> list[prompts.Prompt]:
    """The prompts of DATA that the model has room for; those it has not are logged.

    Raises:
      ConfigError: there is none.
    """
    logging.getLogger(prompts.__name__).setLevel(logging.INFO)
    fitting = experience.that_fit(settings.data, settings.rollout, policy.model)
    try:
        return prompts.held_out(fitting, policy.tokenizer, settings.eval.prompts)
    except ValueError as error:
        raise configs.ConfigError(f"DATA, {settings.data.eval}: {error}") from error


@contextlib.contextmanager
def scorer_of(settings: Settings) -> Iterator[judge.Scorer]:
    """What judges. Raises ConfigError where the functions cannot be used."""
    with contextlib.ExitStack() as stack:
        try:
            scorer = stack.enter_context(judge.opened(settings.reward))
        except rewards.RewardError as error:
            raise configs.ConfigError(f"reward: {error}") from error
        yield scorer


def tell(settings: Settings, records: Sequence[Mapping[str, Any]]) -> None:
    """Says how the completions of pass@k were drawn, and which have no reward."""
    drawn = settings.rollout
    if settings.eval.samples:
        print(
            f"pass@k: {settings.eval.samples} completions of each at temperature "
            f"{drawn.temperature:g}",
            file=sys.stderr,
        )
    missing = collections.Counter(one["reason"] for one in records if one["reward"] is None)
    if missing:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(missing.items()))
        print(f"no reward for {missing.total()} of {len(records)}: {kinds}", file=sys.stderr)
