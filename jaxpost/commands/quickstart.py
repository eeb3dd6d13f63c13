"""`jaxpost quickstart`: the main job on generated data, in minutes."""

from collections.abc import Sequence

from jaxpost.commands import compile_cache
from jaxpost.recipes import quickstart


def main(argv: Sequence[str]) -> int:
    """Runs the recipe of that name."""
    compile_cache.use_compile_cache()
    return quickstart.main(argv)
