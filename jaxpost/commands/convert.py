"""`jaxpost convert SOURCE TARGET`: any model at hand to a Hugging Face folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxpost import hub
from jaxpost.commands import compile_cache, models, usage


def main(argv: Sequence[str]) -> int:
    """Converts one model."""
    parser = usage.convert()
    options = parser.parse_args(argv)
    target = Path(options.target).expanduser()
    try:
        hub.refuse_source(target, options.source, options.adapter, options.base)
    except ValueError as error:
        parser.error(str(error))
    if target.is_dir() and any(target.iterdir()) and not options.overwrite:
        parser.error(f"{target} is not empty; choose another folder, or give --overwrite")
    compile_cache.use_compile_cache()
    if models.is_run(options.source):
        convert_run(options)
    else:
        convert(options)
    print(f"wrote {options.target}")
    return 0


def convert_run(options: argparse.Namespace) -> None:
    """A checkpoint to a folder, adapters folded in."""
    if options.base is not None:
        raise ValueError(f"--base is for adapters, and {options.source} is a run")
    opened = models.open_model(options.source, step=options.step, adapter=options.adapter)
    hub.save_model(options.target, opened.model, opened.params, dtype=options.dtype)


def convert(options: argparse.Namespace) -> None:
    """Anything else to a folder."""
    source, adapter = options.source, options.adapter
    if options.step != "latest":
        raise ValueError(f"{source} is not a run's folder, so it has no step {options.step}")
    if options.base is not None:
        if adapter is not None:
            raise ValueError("--base says that SOURCE is the adapter; leave --adapter out")
        source, adapter = options.base, options.source
    models.check_tokenizer(source)
    hub.convert(source, options.target, dtype=options.dtype, adapter=adapter)
