"""The recipes by name, imported only when one is asked for."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxpost import config as configs
from jaxpost.config import names

RECIPES = {
    "sft": "jaxpost.recipes.sft",
    "pretrain": "jaxpost.recipes.pretrain",
    "grpo": "jaxpost.recipes.grpo",
    "reward_model": "jaxpost.recipes.reward_model",
    "process_reward_model": "jaxpost.recipes.process_reward_model",
    "generative_verifier": "jaxpost.recipes.generative_verifier",
    "dpo": "jaxpost.recipes.dpo",
    "hpl": "jaxpost.recipes.hpl",
    "online_dpo": "jaxpost.recipes.online_dpo",
    "kto": "jaxpost.recipes.kto",
    "ppo": "jaxpost.recipes.ppo",
    "pmd": "jaxpost.recipes.pmd",
}


def load(path: str, overrides: Sequence[str]) -> tuple[ModuleType, Any]:
    """The recipe that a configuration file names, as a module, and the configuration.

    Raises:
      ConfigError: as `jaxpost.config.load`.
    """
    recipe = module(path, overrides)
    name = configs.recipe_of(path, overrides, RECIPES)
    return recipe, configs.load(path, overrides, {name: recipe.Config})


def module(path: str, overrides: Sequence[str]) -> ModuleType:
    """The recipe that a configuration file names, as a module."""
    return named(configs.recipe_of(path, overrides, RECIPES))


def named(name: str) -> ModuleType:
    """A recipe's module.

    Raises:
      ConfigError: there is none of this name.
    """
    if name not in RECIPES:
        near = names.did_you_mean(names.nearest(name, RECIPES))
        raise configs.ConfigError(f"there is no recipe {name!r}{near or ': ' + ', '.join(RECIPES)}")
    return importlib.import_module(RECIPES[name])
