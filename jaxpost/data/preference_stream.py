"""Batches of judged completions, at a position that can be saved."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import grain

from jaxpost.batch import PreferenceBatch, StepBatch, TokenBatch, UnpairedBatch
from jaxpost.data import messages as chats
from jaxpost.data import preference_batches as arrays
from jaxpost.data import sources
from jaxpost.data.kinds import Kind
from jaxpost.data.preference_batches import Items
from jaxpost.data.preference_config import PreferenceConfig
from jaxpost.data.preference_tokens import Judge, Judged
from jaxpost.data.rows import Dropped
from jaxpost.data.stream import DataReport, Tally, WindowStream

Batch = PreferenceBatch | UnpairedBatch | StepBatch
B_co = TypeVar("B_co", PreferenceBatch, UnpairedBatch, StepBatch, covariant=True)
PHASES = (1, 2, 3)  # of a curriculum
NOT_READ = ("train", "eval", "seed", "shuffle", "workers", "format", "columns", "as_chat")


class Batching(NamedTuple):
    """What a recipe asks of the data.

    Attributes:
      batch_size: rows of a batch of this process.
      seed: of the order, unless the configuration has its own.
      part: which files; those of `eval` are read in their order, and once.
      once: read those of `train` so too, to learn something of each row before training.
      limit: only the first so many rows of data, where they are read once.
      read_end: whether the last token is read too, for a score that is taken there (`ends`).
      vocab_size: rows with an id that the model has no embedding for are dropped.
      last_phase: only the rows of a curriculum whose column `phase` is not above this.
      process_index, process_count: which share of the data.
    """

    batch_size: int
    seed: int = 0
    part: Literal["train", "eval"] = "train"
    once: bool = False
    limit: int | None = None
    read_end: bool = False
    vocab_size: int | None = None
    last_phase: int | None = None
    process_index: int = 0
    process_count: int = 1


@dataclasses.dataclass(frozen=True)
class PreferenceReport(DataReport):
    """What is in a batch (an example is a pair, a list or a completion), and what was dropped.

    Attributes:
      digests: of each row of the batch, for what is stored of it (the reference's log-probs): the
        same for the same tokens and mask; empty for padding.
    """

    digests: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Numbered:
    """The rows of several sources, with their numbers among all."""

    sources: tuple[sources.Source, ...]
    starts: tuple[int, ...]

    def __call__(self, number: Any) -> tuple[int, Any]:
        source = bisect.bisect_right(self.starts, number) - 1
        return int(number), self.sources[source][int(number) - self.starts[source]]


class PreferenceStream(WindowStream, Generic[B_co]):
    """Iterator over (batch, PreferenceReport): see `preferences`."""

    def __init__(
        self,
        window_data: grain.MapDataset,
        make: Callable[[Items, int], B_co],
        *,
        limit: int,
        fixed: bool,
        name: str,
        batch_size: int,
        length: int,
        window: int,
        share: slice,
        epochs: int | None,
        workers: int,
        epoch_rows: int,
        processes: int,
        summary: Sequence[str],
        fingerprint: dict[str, Any],
    ):
        """See `WindowStream`.

        Args:
          make: items to a batch of a length.
          limit: tokens of a sequence, for which a row has room.
          fixed: whether every batch is `length` long, as it must be where processes share it.
        """
        super().__init__(
            window_data,
            name=name,
            batch_size=batch_size,
            length=length,
            window=window,
            share=share,
            epochs=epochs,
            workers=workers,
            epoch_rows=epoch_rows,
            processes=processes,
            summary=summary,
            fingerprint=fingerprint,
        )
        self._make, self._fixed, self._limit = make, fixed, limit

    def __iter__(self) -> "PreferenceStream[B_co]":
        return self

    def __next__(self) -> tuple[B_co, PreferenceReport]:
        drops = Tally()
        taken = self._take(drops)
        found: list[Judged] = [item for window, rows in taken for item in window.batch[rows]]
        items = [*found, *[None] * (self._size - len(found))]
        batch = self._make(items[self._share], self._length_of(found))
        digests = tuple(item.digest() if item else "" for item in items[self._share])
        report = self._report(tokens_of(batch), len(found), drops)
        return batch, PreferenceReport(**vars(report), digests=digests)

    def _length_of(self, items: Sequence[Judged]) -> int:
        if self._fixed:
            return self._length
        tokens = max(len(one.tokens) for item in items for one in item.examples)
        return arrays.room(tokens + self._length - self._limit, self._length)


def tokens_of(batch: Batch) -> TokenBatch:
    """The tokens of a batch; of steps the mask is on those that end one."""
    if isinstance(batch, StepBatch):
        inputs, segment_ids, positions, mask, labels, *_ = batch
        return TokenBatch(inputs, inputs, mask, labels, segment_ids, positions)
    return batch.tokens


def open_stream(
    config: PreferenceConfig,
    judge: Judge,
    make: Callable[[Items, int], B_co],
    batching: Batching,
    accept: Sequence[Kind],
) -> PreferenceStream[B_co]:
    """The rows of the files that `config` names, judged and put into batches.

    Without end each process reads its own share of the rows; once, all read all of them, and take
    their share of each batch.

    Raises:
      FileNotFoundError, ValueError: as `sources.batches` does; keep_start, where the last token is
        read for what it says of the whole; a row without a phase, or none up to the last.
    """
    if batching.read_end and config.too_long == "keep_start":
        raise ValueError(
            "data.too_long is keep_start, which cuts the ends at which completions are scored; "
            "use drop or keep_end"
        )
    once = batching.once or batching.part == "eval"
    files, (index, count) = config.files(), (batching.process_index, batching.process_count)
    given = sources.held_out(files) if batching.part == "eval" else config.train
    found, weights = sources.open_sources(given, files, accept)
    if weights is not None and not once:
        sources.refuse_unread(found, weights)
    seed = batching.seed if config.seed is None else config.seed
    starts = tuple(itertools.accumulate(map(len, found), initial=0))
    numbers: list[Sequence[int]] = [range(*ends) for ends in itertools.pairwise(starts)]
    if batching.last_phase is not None:
        numbers, weights = up_to(batching.last_phase, found, numbers, weights)
    if once:
        order = sources.mixed(numbers, None, None, 1)[: batching.limit]
        total, mine = len(order), order
    else:
        order = sources.mixed(numbers, weights, seed if config.shuffle else None, None)
        total, mine = sum(map(len, numbers)), order[index::count] if count > 1 else order
    size = batching.batch_size * count if once else batching.batch_size
    window = min(max(size, sources.UNPACKED), math.ceil(total / (1 if once else count)))
    read = mine.map(Numbered(tuple(found), starts))
    return PreferenceStream(
        read.batch(window, batch_fn=list).map_with_index(judge),
        make,
        limit=judge.limit,
        fixed=count > 1,
        name=f"data.{batching.part}",
        batch_size=size,
        length=config.max_length,
        window=window,
        share=slice(index, None, count) if once else slice(None),
        epochs=1 if once else None,
        workers=0 if once else config.workers,
        epoch_rows=total,
        processes=1 if once else count,
        summary=sources.summary(found, None if once else weights),
        fingerprint=fingerprint(config, judge, batching, seed, found, weights),
    )


def up_to(
    last: int,
    found: Sequence[sources.Source],
    numbers: Sequence[Sequence[int]],
    weights: Sequence[float] | None,
) -> tuple[list[Sequence[int]], list[float] | None]:
    """The numbers of rows whose phase is not above the last, and the weights of what has some."""
    kept = [
        [number for number, phase in zip(part, phases_of(source), strict=True) if phase <= last]
        for source, part in zip(found, numbers, strict=True)
    ]
    if not any(kept):
        raise ValueError(f"{', '.join(s.path for s in found)}: no row of a phase up to {last}")
    if weights is not None:
        weights = [weight for weight, part in zip(weights, kept, strict=True) if part]
    return [part for part in kept if part], weights


def phases_of(source: sources.Source) -> Iterator[int]:
    """The phase of each row of a source; one that cannot be read is told of from the first on.

    Raises:
      ValueError: a row has none.
    """
    for row in map(source.__getitem__, range(len(source))):
        phase = PHASES[0] if isinstance(row, Dropped) else row.meta.get("phase")
        if phase not in PHASES:
            raise ValueError(
                f"{row.where}: column phase: expected 1, 2 or 3, got {chats.described(phase)}; "
                "`jaxpost pairs group` writes it"
            )
        yield int(phase)


def fingerprint(
    config: PreferenceConfig,
    judge: Judge,
    batching: Batching,
    seed: int,
    found: Sequence[sources.Source],
    weights: Sequence[float] | None,
) -> dict[str, Any]:
    """What the batches depend on."""
    keys = dataclasses.asdict(config)
    return {
        "seed": seed,
        "shuffle": config.shuffle,
        **{key: value for key, value in keys.items() if key not in NOT_READ},
        **sources.fingerprint_of(config.files(), found, weights),
        **batching._replace(seed=seed)._asdict(),
        "too_long": config.too_long,
        "tokenizer": judge.tokenizer.fingerprint,
    }
