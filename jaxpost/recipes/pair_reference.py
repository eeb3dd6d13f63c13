"""What the reference says of pairs: from a file, or by the copy that follows the policy."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxpost import batch as batches
from jaxpost import train_step
from jaxpost.batch import PreferenceBatch
from jaxpost.data.preferences import PreferenceReport
from jaxpost.models.model import Model
from jaxpost.recipes import moving_reference, pairwise, reference, setup
from jaxpost.typing import Params

Asked = Iterable[tuple[PreferenceBatch, PreferenceReport]]
Known = Callable[[PreferenceBatch, PreferenceReport], np.ndarray]  # [2B], its sums
Refer = Callable[[train_step.TrainState], Known]


def make(config: Any, policy: setup.Policy, folder: Path, asked: Callable[[], Asked]) -> Refer:
    """`state -> (pairs, report) -> [2B]`: the reference's sums over the completions of a batch.

    A reference that stays scores all pairs that will be `asked` for now, while the policy is still
    as it starts (or by `config.reference`, which is let go of then), unless the file has them.
    """
    if not config.measured():
        return lambda state: lambda pairs, report: np.zeros(2 * len(pairs.rows), np.float32)
    if config.reference_update is not None:
        return following(config, policy)
    cache, score = reference.opened(
        config, policy, folder, functools.partial(make_score, config), config.length_weight
    )
    cache.fill(((pairs, report.digests) for pairs, report in asked()), score)
    return lambda state: lambda pairs, report: cache(report.digests)


def following(config: Any, policy: setup.Policy) -> Refer:
    """By the parameters that the state holds."""
    score = make_score(config, policy.model)

    def refer(state: train_step.TrainState) -> Known:
        params = moving_reference.of(state, policy.trainable)
        return lambda pairs, report: score(params, pairs)

    return refer


def make_score(config: Any, model: Model) -> Callable[[Params, PreferenceBatch], np.ndarray]:
    """`(params, pairs) -> [2B]`: sums of the completions' log-probabilities."""
    in_parts = functools.cache(functools.partial(pairwise.make_token_logps, model))

    def score(params: Params, pairs: PreferenceBatch) -> np.ndarray:
        rows = batches.flat(pairs.tokens)
        weights = pairwise.token_weights(rows.completion_mask, config.length_weight)
        parts = math.gcd(len(pairs.rows), config.microbatches)  # of a level they may be fewer
        return np.sum(weights * np.asarray(in_parts(parts)(params, rows)), axis=1)

    return score


def to_come(open_data: Callable[..., Any], steps: int) -> Iterator[Any]:
    """(pairs, report) of so many updates; each row once where they pass over all of them."""
    with contextlib.closing(open_data()) as data:
        whole = steps * next(data)[1].epoch >= 1.0
    with contextlib.closing(open_data(once=whole)) as data:
        yield from itertools.islice(data, None if whole else steps)
