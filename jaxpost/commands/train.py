"""`jaxpost train CONFIG [key=value ...]`: runs the recipe that a configuration names."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpost import config as configs
from jaxpost.commands import recipes

USAGE = """usage: jaxpost train CONFIG [key=value ...]

CONFIG is a YAML file that names its recipe ({recipes}) and sets its keys; key=value pairs
override it, with dots for keys within parts: steps=50 optimizer.learning_rate=1e-6. The folder
of the run is the key `run`; the same command again resumes one that was stopped or killed.

  jaxpost train CONFIG --help   every key: type, default, unit, and the value that CONFIG gives it
"""


def main(arguments: Sequence[str]) -> int:
    """Runs a recipe; its exit code is 0 when the run is finished and 75 when it was stopped."""
    arguments = list(arguments)
    wants_help = bool({"-h", "--help"} & set(arguments))
    arguments = [argument for argument in arguments if argument not in ("-h", "--help")]
    if not arguments:
        print(overview(), end="", file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    path, *overrides = arguments
    if "=" in path and not Path(path).exists():
        raise configs.ConfigError(f"the configuration file comes first, before {path}")
    if wants_help:
        show_keys(path, overrides)
        return 0
    recipe, config = recipes.load(path, overrides)
    from jaxpost import runs
    from jaxpost.commands import compile_cache, inputs

    if not runs.is_finished(config.run, config.steps):  # what one read may be gone
        inputs.check(config)
    inputs.check_export(config.run, config.model)
    compile_cache.use_compile_cache()
    return recipe.train(config) or 0


def overview() -> str:
    """The usage, and the configurations at hand by the first line of their header."""
    text = USAGE.format(recipes=", ".join(recipes.RECIPES))
    files = sorted(Path("configs").glob("*.yaml"))
    if not files:
        return text
    width = max(len(str(file)) for file in files)
    lines = [f"  {file!s:<{width}}  {(configs.header(file) or [''])[0]}" for file in files]
    return text + "\nconfigurations here:\n" + "\n".join(line.rstrip() for line in lines) + "\n"


def show_keys(path: str, overrides: Sequence[str]) -> None:
    """Every key of a configuration; the values only if it is free of errors, which come last."""
    from rich import console

    config_class = recipes.module(path, overrides).Config
    config, problem = None, None
    try:
        _, config = recipes.load(path, overrides)
    except configs.ConfigError as error:
        problem = error
    out = console.Console(highlight=False, soft_wrap=True)
    for line in configs.header(path):
        out.print(f"# {line}", style="dim", markup=False)
    out.print(configs.explain(config_class, config))
    if problem is not None:
        raise problem
