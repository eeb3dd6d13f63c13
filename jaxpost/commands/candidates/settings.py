"""How completions are drawn and judged: parts of an RL recipe's configuration."""

import argparse
import dataclasses
from pathlib import Path

from jaxpost import config as configs
from jaxpost import rewards, selection
from jaxpost.commands import by_reward, models
from jaxpost.data import prompts
from jaxpost.recipes import experience

KEYS = {
    "completions": "rollout.completions",
    "max_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
}
OF_TRAINING = ("prompts", "staleness", "spare", "stale_after")  # keys of `rollout` alone


@dataclasses.dataclass(frozen=True)
class Settings:
    """How completions are drawn and judged; `scorer` is None where the reward chooses."""

    data: prompts.PromptConfig
    reward: rewards.RewardConfig | None
    scorer: rewards.RewardConfig | None
    rollout: experience.RolloutConfig
    seed: int


def start_of(opened: models.Opened, options: argparse.Namespace) -> Settings:
    """The settings of the run that a reward trained, else the defaults."""
    config = opened.config
    if not models.has_prompts(config):
        data = prompts.PromptConfig(
            train=options.data, eval=options.data, template_kwargs=opened.chat.template_kwargs
        )
        sampling = experience.RolloutConfig(max_new_tokens=by_reward.MAX_TOKENS)
        return Settings(data, None, None, sampling, 0)
    data = dataclasses.replace(config.data, train=options.data, eval=options.data)
    unused = {name: getattr(experience.RolloutConfig, name) for name in OF_TRAINING}
    return Settings(
        data, config.reward, None, dataclasses.replace(config.rollout, **unused), config.seed
    )


def read_settings(start: Settings, options: argparse.Namespace) -> Settings:
    """The settings under the options and overrides. Raises ConfigError."""
    if options.reward is not None:
        start = dataclasses.replace(start, reward=judge_of(options.reward, "--reward"))
    if options.scorer is not None:
        start = dataclasses.replace(start, scorer=judge_of(options.scorer, "--scorer"))
    chosen = {key: vars(options)[name] for name, key in KEYS.items()}
    given = [f"{key}={value}" for key, value in chosen.items() if value is not None]
    settings = configs.override(start, [*given, *options.overrides])
    if settings.reward is None:
        raise configs.ConfigError(
            "what is a completion worth? give --reward: module:name, file.py:name, or the folder "
            "of a reward model"
        )
    for name in OF_TRAINING:
        if getattr(settings.rollout, name) != getattr(experience.RolloutConfig, name):
            raise configs.ConfigError(f"rollout.{name} is for training; leave it out")
    if settings.rollout.completions > selection.MOST:
        raise configs.ConfigError(
            f"rollout.completions is {settings.rollout.completions}; it is {selection.MOST} at most"
        )
    return settings


def judge_of(named: str, option: str) -> rewards.RewardConfig:
    """A function by its import path, or a reward model by its folder or hub id."""
    if Path(named).is_dir() or (":" not in named and not named.endswith(".py")):
        return rewards.RewardConfig(model=named)
    if not named.rpartition(":")[2]:
        raise configs.ConfigError(f"{option} {named}: write module:name or file.py:name")
    return rewards.RewardConfig(named)
