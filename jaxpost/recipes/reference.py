"""The reference's log-probabilities of a data set, computed once and kept in a file.

The numbers of a pair, or of a completion, are found again by its tokens, so the file serves any
order of the data and further runs; its name tells the reference's parameters and what else the
numbers depend on.
"""

import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpost import hub
from jaxpost.batch import TokenBatch
from jaxpost.models.model import Model
from jaxpost.options import option
from jaxpost.recipes import setup
from jaxpost.typing import Params

log = logging.getLogger(__name__)

Score = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Keys of the reference."""

    reference: str | None = option(
        None, "folder or hub id of the reference; null: the policy as it starts"
    )
    reference_cache: str | None = option(
        None, "folder for the reference's numbers, shared between runs; null: in the run's"
    )


def fingerprint(params: Params, *others: object) -> str:
    """Of parameters, their names and types, and of `others` by what they print."""
    digest = hashlib.sha256(repr(others).encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).view(np.uint8).data)
    return digest.hexdigest()[:16]


def digests(rows: TokenBatch) -> tuple[str, ...]:
    """Of rows [B, T]: the same for the same tokens and mask, however many are padding."""
    found = []
    for row in zip(rows.inputs, rows.targets, rows.completion_mask, rows.segment_ids, strict=True):
        inputs, targets, mask, segments = row
        count = np.count_nonzero(segments)
        content = inputs[:count].tobytes() + targets[:count].tobytes() + mask[:count].tobytes()
        found.append(hashlib.blake2b(content, digest_size=16).hexdigest())
    return tuple(found)


class Cache:
    """Numbers of what has a digest, in a file: two of each pair, or one of each completion."""

    def __init__(self, path: Path):
        self._path = path
        self._found: dict[str, np.ndarray] = {}
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                self._found = dict(zip(file["digests"].tolist(), file["values"], strict=True))

    def fill(self, batches: Iterable[tuple[Any, Sequence[str]]], score: Score) -> int:
        """Scores what is not known yet of (batch, digests), and writes the file; their number.

        `score`: a batch of B → [B · numbers], of the reference.
        """
        before = len(self._found)
        for batch, known in batches:
            if all(digest in self._found for digest in known):
                continue
            values = np.asarray(score(batch), np.float32).reshape(len(known), -1)
            self._found.update(zip(known, values, strict=True))
        new = len(self._found) - before
        if new:
            self._write()
        return new

    def __call__(self, known: Sequence[str]) -> np.ndarray:
        """[B · numbers], of a batch that was scored, by its digests; of pairs both in turn."""
        return np.concatenate([self._found[digest] for digest in known])

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}.npz")
        known, values = list(self._found), np.array(list(self._found.values()), np.float32)
        np.savez(partial, digests=np.array(known), values=values)
        os.replace(partial, self._path)
        log.info("the reference's numbers of %d rows are in %s", len(known), self._path)


def opened(
    config: Any,
    policy: setup.Policy,
    folder: Path,
    make_score: Callable[[Model], Callable[[Params, Any], Any]],
    *others: object,
) -> tuple[Cache, Score]:
    """The file of a recipe's reference, and what fills it.

    The reference is `config.reference`, else the policy, which is to be as it starts. `others` is
    what the numbers depend on besides its parameters; see `fingerprint`. Let go of the second when
    the file is full: it holds the parameters.
    """
    params, model = policy.params, policy.model
    if config.reference is not None:
        model, params = hub.load_model(config.reference, dtype=config.model.dtype)
    name, score = fingerprint(params, model.config.compute_dtype, *others), make_score(model)
    path = Path(config.reference_cache or folder / "reference") / f"{name}.npz"
    return Cache(path), lambda batch: score(params, batch)
