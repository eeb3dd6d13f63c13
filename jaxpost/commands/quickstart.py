"""`jaxpost quickstart`: the main job on generated data, in minutes."""

from collections.abc import Sequence
from pathlib import Path

from jaxpost.commands import compile_cache, usage
from jaxpost.recipes import quickstart


def main(argv: Sequence[str]) -> int:
    """Runs the recipe of that name."""
    options = usage.quickstart().parse_args(argv)
    compile_cache.use_compile_cache()
    return quickstart.train(Path(options.run), options.scale, options.method)
