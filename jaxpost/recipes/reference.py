"""The reference's log-probabilities of a data set, computed once and kept in a file.

A pair's two numbers are found again by its tokens, so the file serves any order of the data and
further runs; its name tells the reference's parameters and what else the numbers depend on.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpost.batch import PreferenceBatch
from jaxpost.data.preferences import PreferenceReport
from jaxpost.typing import Params

log = logging.getLogger(__name__)


def fingerprint(params: Params, *others: object) -> str:
    """Of parameters, their names and types, and of `others` by what they print."""
    digest = hashlib.sha256(repr(others).encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)).view(np.uint8).data)
    return digest.hexdigest()[:16]


class Cache:
    """Two numbers a pair, of chosen and rejected.

    Args:
      path: the file, read if it is there.
      score: a batch of pairs → [2B], of the reference.
    """

    def __init__(self, path: Path, score: Callable[[PreferenceBatch], Any]):
        self._path, self._score = path, score
        self._found: dict[str, np.ndarray] = {}
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                self._found = dict(zip(file["digests"].tolist(), file["values"], strict=True))

    def fill(self, batches: Iterable[tuple[PreferenceBatch, PreferenceReport]]) -> int:
        """Scores the pairs that are not known yet, and writes the file; their number."""
        before = len(self._found)
        for pairs, report in batches:
            if all(digest in self._found for digest in report.digests):
                continue
            values = np.asarray(self._score(pairs), np.float32).reshape(-1, 2)
            self._found.update(zip(report.digests, values, strict=True))
        new = len(self._found) - before
        if new:
            self._write()
        return new

    def __call__(self, report: PreferenceReport) -> np.ndarray:
        """[2B], of a batch that was scored: chosen, rejected, chosen, …."""
        return np.concatenate([self._found[digest] for digest in report.digests])

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(f".{os.getpid()}.npz")
        digests, values = list(self._found), np.array(list(self._found.values()), np.float32)
        np.savez(partial, digests=np.array(digests), values=values)
        os.replace(partial, self._path)
        log.info("the reference's numbers of %d pairs are in %s", len(digests), self._path)
