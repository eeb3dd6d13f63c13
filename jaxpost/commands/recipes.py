"""The recipes by name, imported only when one is asked for."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from jaxpost import config as configs

RECIPES = {
    "sft": "jaxpost.recipes.sft",
    "pretrain": "jaxpost.recipes.pretrain",
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
    return importlib.import_module(RECIPES[configs.recipe_of(path, overrides, RECIPES)])
