"""One run of a checker in the sandbox."""

import pathlib
from collections.abc import Mapping, Sequence

from jaxpost.rewards import sandbox, score

SECONDS = 60.0


def run(
    argv: Sequence[str],
    files: Mapping[str, str],
    readable: Sequence[str | pathlib.Path] = (),
    seconds: float = SECONDS,
) -> sandbox.Outcome:
    """What `argv` says of `files`, which lie in its working folder."""
    limits = sandbox.Limits(
        seconds=seconds,
        memory=8 << 30,
        file_bytes=64 << 20,
        scratch_bytes=256 << 20,
        output_bytes=4 << 20,
        open_files=256,
    )
    texts = {name: text.encode() for name, text in files.items()}
    return sandbox.run(argv, files=texts, readable=list(readable), limits=limits)


def ended(outcome: sandbox.Outcome) -> score.Score | None:
    """0 for a run that did not come to its end. Raises InfrastructureError where the box failed."""
    if outcome.kind == "infrastructure":
        raise score.InfrastructureError(f"sandbox: {outcome.stderr.decode(errors='replace')}")
    return None if outcome.kind == "exit" else score.Score(0.0, {}, outcome.kind)
