"""`metrics.jsonl` and `samples.jsonl` of a run that goes back to a checkpoint."""

import itertools
import json
import logging
from pathlib import Path

from jaxpost.runs import disk

log = logging.getLogger(__name__)

RECORDS = ("metrics.jsonl", "samples.jsonl")
_NAMED = 5  # lines quoted in warnings, at most


def cut_after(folder: Path, step: int) -> None:
    """Leave no record after this step, so that none comes twice."""
    last = step if step > 0 else -1  # afresh: what was measured before step 1 comes again
    for name in RECORDS:
        count = _truncate(folder / name, last)
        if count:
            log.info("%s: cut %d records that come after step %d", name, count, step)


def _truncate(path: Path, step: int) -> int:
    """Keep the records of a JSONL file with `step` at most this one; returns how many went.

    A last line that a kill cut short counts among them; what else is no record goes with a warning.
    Written beside and renamed, so that a kill here leaves either file whole.
    """
    if not path.exists():
        return 0
    before = path.read_bytes()
    lines = before.splitlines()
    steps = [_step_of(line) for line in lines]
    cut = 1 if before and not before.endswith(b"\n") and steps[-1] is None else 0
    strange = [n for n, found in enumerate(steps[: len(lines) - cut]) if found is None]
    for n in strange[:_NAMED]:
        log.warning("%s line %d is no record and was removed: %r", path, n + 1, lines[n][:200])
    if len(strange) > _NAMED:
        log.warning("%s: %d more such lines were removed", path, len(strange) - _NAMED)
    belong = (found is not None and found <= step for found in steps)
    after = b"".join(line + b"\n" for line in itertools.compress(lines, belong))
    if after != before:
        disk.write(path, after)
    return len(lines) - after.count(b"\n") - len(strange)


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for what is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if type(step) is int else None
