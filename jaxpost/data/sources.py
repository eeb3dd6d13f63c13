"""Data as a configuration names it, to batches.

    stream = batches(config, tokenize, length=1024, batch_size=8, seed=0)
    print(*stream.summary, sep="\n")          # train.jsonl: 1,204 rows, type messages
    batch, report = next(stream)              # TokenBatch [8, 1024], DataReport
    stream.set_state(stream.get_state())      # exact, also in another process

Grain shuffles, mixes, divides rows among processes and makes windows ahead; what is packed is a
window of rows at a time.
"""

import bisect
import dataclasses
import hashlib
import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from jaxpost.batch import TokenBatch
from jaxpost.data import formats, paths, stream, windows
from jaxpost.data.formats import Dropped, Format, Kind, Row
from jaxpost.data.readers import Reader
from jaxpost.data.stream import DataReport, DataStream, Tally
from jaxpost.data.windows import Tokenize
from jaxpost.options import check_ranges, option

__all__ = [
    "DataConfig",
    "DataReport",
    "DataStream",
    "batches",
    "eval_batches",
    "eval_rows",
    "open_source",
    "rows",
]

log = logging.getLogger(__name__)

Paths = str | tuple[str, ...] | dict[str, float]
PIPELINE = 1  # goes up when the same data and settings give other batches
UNPACKED = 32  # rows prepared at a time where none share a row


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Files of rows, and how they become batches."""

    train: Paths = option(
        help="files, folders or patterns to train on: one, a list, or a mixture {path: weight}"
    )
    eval: Paths | None = option(None, "held-out files, as `train`; null: none")
    format: str = option("auto", "type of the rows: auto, or the name of one (messages, text, …)")
    columns: dict[str, str] | None = option(
        None, "columns under other names, {prompt: question, completion: solution}; a.b is a key"
    )
    as_chat: bool | None = option(
        None, "make plain prompts and completions turns; null: for questions and alpaca only"
    )
    max_length: int = option(1024, "room of a row", "targets", least=1)
    too_long: windows.TooLong = option(
        "auto", "longer sequences: drop, split, truncate or error; auto splits text, drops others"
    )
    malformed: Literal["error", "drop"] = option("error", "rows that cannot be read: error or drop")
    packing: bool = option(True, "put several sequences in a row, apart from one another")
    window: int = option(512, "rows of data packed at a time; more pack better", "rows", least=1)
    shuffle: bool = option(True, "a new random order each pass over the data")
    seed: int | None = option(None, "of the order; null: the run's", least=0)
    workers: int = option(
        0, "processes that prepare data; 0: a thread of this one", "processes", least=0
    )

    def __post_init__(self):
        check_ranges(self, "data.")
        for name in ("train", "eval"):
            check_paths(name, getattr(self, name))
        if not self.packing and self.window != DataConfig.window:
            raise ValueError("data.window is for packing, and data.packing is false; leave it out")
        if not self.shuffle and self.seed is not None:
            raise ValueError("data.seed is for shuffling, and data.shuffle is false; leave it out")


def check_paths(name: str, given: Paths | None) -> None:
    """Refuses an empty list and weights that are not positive."""
    if given is not None and not given:
        raise ValueError(f"{name}: no path is given")
    if isinstance(given, Mapping):
        for path, weight in given.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"{name}: {path}: expected a weight above 0, got {weight}")


@dataclasses.dataclass(frozen=True)
class Source:
    """The rows of some files, by number: a random-access source for Grain.

    Attributes:
      path: what the user wrote.
      readers: its files.
      formats: the format of each.
      starts: the number of each file's first row.
      malformed: whether a row that cannot be read is an error or dropped.
    """

    path: str
    readers: tuple[Reader, ...]
    formats: tuple[Format, ...]
    starts: tuple[int, ...]
    malformed: Literal["error", "drop"]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Any:
        """The canonical row, or `Dropped`."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        file = bisect.bisect_right(self.starts, index) - 1
        try:
            row, where = self.readers[file][index - self.starts[file]]
            return formats.normalize(row, self.formats[file], where)
        except ValueError as error:
            if self.malformed == "drop":
                return Dropped("malformed", str(error))
            raise

    def __repr__(self) -> str:
        return f"Source({self.path}, {len(self)} rows)"

    def summary(self) -> list[str]:
        """A line a file; files alike are counted together."""
        alike: dict[str, list[Reader]] = {}
        for reader, format in zip(self.readers, self.formats, strict=True):
            alike.setdefault(str(format), []).append(reader)
        lines = []
        for format, readers in alike.items():
            count = sum(len(reader) for reader in readers)
            files = "" if len(readers) == 1 else f"{len(readers)} files, "
            name = readers[0].path if len(readers) == 1 else self.path
            lines.append(f"{name}: {files}{count:,} rows, type {format}")
        return lines


def open_source(path: str, config: DataConfig, accept: Sequence[Kind] = formats.SFT) -> Source:
    """The rows of a file, folder or pattern, their formats detected.

    Raises:
      FileNotFoundError, ValueError: nothing there, no rows, or of no type that is accepted.
    """
    readers = [reader for reader in paths.open_path(path) if len(reader)]
    if not readers:
        raise ValueError(f"{path}: no rows")
    found = tuple(detect(reader, config, accept) for reader in readers)
    starts = tuple(itertools.accumulate(map(len, readers), initial=0))
    return Source(path, tuple(readers), found, starts, config.malformed)


def detect(reader: Reader, config: DataConfig, accept: Sequence[Kind]) -> Format:
    """The format of a file, from its first row, or first sound one where others are dropped."""
    for index in range(len(reader)):
        try:
            row, _ = reader[index]
        except ValueError:
            if config.malformed == "error" or index == len(reader) - 1:
                raise
            continue
        return formats.detect(
            list(row),
            row,
            accept=accept,
            name=config.format,
            overrides=config.columns,
            chat=config.as_chat,
            where=str(reader.path),
        )
    raise AssertionError("an empty file")


def open_sources(
    given: Paths, config: DataConfig, accept: Sequence[Kind]
) -> tuple[list[Source], list[float] | None]:
    """The sources that a configuration names, and their weights if they are a mixture."""
    names = [given] if isinstance(given, str) else list(given)
    weights = list(given.values()) if isinstance(given, Mapping) else None
    sources = [open_source(name, config, accept) for name in names]
    if weights is None:
        refuse_repeated(sources)
    return sources, weights


def refuse_repeated(sources: Sequence[Source]) -> None:
    """Refuses a file that is named twice; a mixture may do so, since it says how much of each."""
    named: dict[Path, str] = {}
    for source in sources:
        for reader in source.readers:
            file = reader.path.resolve()
            if file in named:
                raise ValueError(
                    f"{reader.path} is named twice, by {named[file]} and by {source.path}, and "
                    "would count twice; name it once, or give a mixture {path: weight}"
                )
            named[file] = source.path


def refuse_unread(sources: Sequence[Source], weights: Sequence[float]) -> None:
    """Refuses a mixture of which a part has less than a row in a pass."""
    total = sum(map(len, sources))
    for source, weight in zip(sources, weights, strict=True):
        count = total * weight / sum(weights)
        if count < 1:
            raise ValueError(
                f"data.train: {source.path}: a pass over this mixture has {total:,} rows, and a "
                f"weight of {weight:g} gives this part {count:.2g} of them; raise its weight, or "
                "leave it out"
            )


CHECKED = 1 << 23  # bytes of files whose rows are all looked at before anything else is done


def check(given: Paths, config: DataConfig, accept: Sequence[Kind] = formats.SFT) -> None:
    """Opens the files, and reads the rows of those that are not too long for it.

    Raises:
      FileNotFoundError, ValueError: as `batches` and its rows do.
    """
    sources, _ = open_sources(given, config, accept)
    left = CHECKED
    for source in sources:
        left -= sum(reader.path.stat().st_size for reader in source.readers)
        if left >= 0:
            for index in range(len(source)):
                source[index]


def batches(
    config: DataConfig,
    tokenize: Tokenize,
    *,
    length: int,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    epochs: int | None = None,
    fingerprint: str = "",
    accept: Sequence[Kind] = formats.SFT,
) -> DataStream:
    """Batches [batch_size, length] of `config.train`.

    Without `epochs` there is no end, each process reads its own share of every pass over the rows,
    and what does not fill a batch at the end of a pass goes on into the next. With it every process
    reads all rows and takes its share of each batch, so that all make equally many; the last one is
    filled up with padding.

    Args:
      tokenize: row → Example or Dropped; it must be picklable where there are workers.
      batch_size: rows of a batch of this process.
      seed: of the order, unless the configuration has its own.
      fingerprint: whatever else the batches depend on (the tokenizer), for `set_state` to compare.
      accept: the kinds of row to read.
    """
    sources, weights = open_sources(config.train, config, accept)
    if weights is not None:
        refuse_unread(sources, weights)
    own = seed if config.seed is None else config.seed
    order = own if config.shuffle else None
    finite = epochs is not None
    settings = {
        "seed": own,
        "shuffle": config.shuffle,
        "batch_size": batch_size,
        "process_index": process_index,
        "process_count": process_count,
        "epochs": epochs,
    }
    return make_stream(
        config,
        mixed(sources, weights, order, epochs),
        windows.MakeWindow(
            tokenize, length, config.packing, config.too_long, config.malformed, order
        ),
        name="data.train",
        total=sum(map(len, sources)),
        epochs=epochs,
        shard=slice(0, 1) if finite else slice(process_index, process_count),
        share=slice(process_index, None, process_count) if finite else slice(None),
        batch_size=batch_size * process_count if finite else batch_size,
        summary=summary(sources, weights),
        fingerprint=settings
        | fingerprint_of(config, sources, weights)
        | {"length": length, "tokenizer": fingerprint},
    )


def eval_batches(
    config: DataConfig,
    tokenize: Tokenize,
    *,
    length: int,
    batch_size: int,
    rows: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    accept: Sequence[Kind] = formats.SFT,
) -> Iterator[TokenBatch]:
    """Batches of `config.eval` in its order, every example once, the last filled up with padding.

    Each process reads all rows and takes its share of each batch. `rows` reads only the first so
    many.
    """
    reports = eval_stream(
        config,
        tokenize,
        length=length,
        batch_size=batch_size,
        rows=rows,
        process_index=process_index,
        process_count=process_count,
        accept=accept,
    )
    return (batch for batch, _ in reports)


def eval_stream(
    config: DataConfig,
    tokenize: Tokenize,
    *,
    length: int,
    batch_size: int,
    rows: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
    accept: Sequence[Kind] = formats.SFT,
) -> DataStream:
    """As `eval_batches`, with reports of what is in each batch and what was dropped."""
    sources, _ = open_sources(held_out(config), config, accept)
    total = sum(map(len, sources))
    total = total if rows is None else min(rows, total)
    data = grain.MapDataset.concatenate([grain.MapDataset.source(source) for source in sources])
    return make_stream(
        dataclasses.replace(config, workers=0),
        data[:total],
        windows.MakeWindow(
            tokenize, length, config.packing, config.too_long, config.malformed, None
        ),
        name="data.eval",
        total=total,
        epochs=1,
        shard=slice(0, 1),
        share=slice(process_index, None, process_count),
        batch_size=batch_size * process_count,
        summary=summary(sources, None) + ([] if rows is None else [f"the first {total:,} rows"]),
        fingerprint={},
    )


def make_stream(
    config: DataConfig,
    data: grain.MapDataset,
    make: windows.MakeWindow,
    *,
    name: str,
    total: int,
    epochs: int | None,
    shard: slice,
    share: slice,
    batch_size: int,
    summary: Sequence[str],
    fingerprint: Mapping[str, Any],
) -> DataStream:
    """Rows by number to a stream; `shard` is (this process, of how many) that divide the rows."""
    processes = shard.stop
    # A window is at most one pass, so that the first tells of each drop once.
    wanted = config.window if config.packing else max(batch_size, UNPACKED)
    window = min(wanted, math.ceil(total / processes))
    mine = data[shard.start :: processes] if processes > 1 else data
    made = mine.batch(window, batch_fn=list).map_with_index(make)
    return DataStream(
        made,
        name=name,
        batch_size=batch_size,
        length=make.length,
        window=window,
        share=share,
        epochs=epochs,
        workers=config.workers,
        epoch_rows=total,
        processes=processes,
        summary=summary,
        fingerprint=fingerprint,
    )


def mixed(
    sources: Sequence[Source | Sequence[int]],
    weights: Sequence[float] | None,
    seed: int | None,
    epochs: int | None,
) -> grain.MapDataset:
    """Rows by number: in turn without weights, else in proportion to them.

    A pass over a mixture is as many rows as it holds; what a weight favours comes up more often.
    """
    total = sum(map(len, sources))
    passes = epochs or max(stream.ENDLESS // total, 1)
    data = [grain.MapDataset.source(source) for source in sources]
    if weights is None:
        joined = data[0] if len(data) == 1 else grain.MapDataset.concatenate(data)
        return shuffled(joined, seed, 0).repeat(passes)
    endless = [
        shuffled(part, seed, index).repeat(stream.ENDLESS // len(part))
        for index, part in enumerate(data)
    ]
    return grain.MapDataset.mix(endless, weights)[: total * passes]


def shuffled(data: grain.MapDataset, seed: int | None, part: int) -> grain.MapDataset:
    """Another order each pass, or the given one without a seed.

    Grain adds the number of the pass to its seed, so neighbouring seeds would share orders.
    """
    if seed is None:
        return data
    return data.shuffle(int(np.random.SeedSequence([seed, part]).generate_state(1)[0]))


def summary(sources: Sequence[Source], weights: Sequence[float] | None) -> list[str]:
    """A line a file, with its share of a mixture."""
    lines = []
    for index, source in enumerate(sources):
        share = "" if weights is None else f", {100 * weights[index] / sum(weights):.3g} % of rows"
        lines += [line + share for line in source.summary()]
    return lines


def fingerprint_of(
    config: DataConfig, sources: Sequence[Source], weights: Sequence[float] | None
) -> dict[str, Any]:
    """What batches depend on besides the arguments of `batches`."""
    keys = ("format", "columns", "as_chat", "too_long", "malformed", "packing", "window")
    return {
        **{key: getattr(config, key) for key in keys},
        **{f"data {i} ({Path(s.path).name})": digest(s) for i, s in enumerate(sources)},
        "mixture": weights,
        "pipeline": f"{PIPELINE}, grain {grain.__version__}",
    }


BLOCK, BLOCKS = 1 << 16, 256


def digest(source: Source) -> str:
    """The size and a digest of a source's files: of all of them up to 16 MiB, else of samples."""
    sizes = [reader.path.stat().st_size for reader in source.readers]
    blocks = max(BLOCKS // len(sizes), 2)
    found = hashlib.sha256()
    for reader, size in zip(source.readers, sizes, strict=True):
        found.update(f"{reader.path.name} {size}\n".encode())
        with open(reader.path, "rb") as file:
            if size <= BLOCK * blocks:
                found.update(file.read())
                continue
            for start in np.linspace(0, size - BLOCK, blocks).astype(int).tolist():
                file.seek(start)
                found.update(file.read(BLOCK))
    return f"{len(sizes)} files, {sum(sizes)} bytes, {found.hexdigest()[:16]}"


def held_out(config: DataConfig) -> Paths:
    """`config.eval`, which must be given."""
    if config.eval is None:
        raise ValueError("data.eval is not set: name the held-out files")
    return config.eval


def rows(
    given: Paths, config: DataConfig, accept: Sequence[Kind] = formats.SFT
) -> Iterator[Row | Dropped]:
    """Canonical rows of files in their order, and `Dropped` for those that cannot be trained."""
    for source in open_sources(given, config, accept)[0]:
        for index in range(len(source)):
            yield source[index]


def eval_rows(config: DataConfig, tokenize: Tokenize, count: int | None = None) -> list[Row]:
    """The first `count` rows of `config.eval` that `eval_batches` keeps; all without `count`.

    How many were passed over for which reasons is logged.
    """
    make = windows.MakeWindow(
        tokenize, config.max_length, False, config.too_long, config.malformed, None
    )
    dropped, kept = Tally(), []
    for row in rows(held_out(config), config):
        found = make.pieces(row, [])
        if isinstance(found, Dropped):
            dropped.add([found])
        else:
            kept.append(row)
        if len(kept) == count:
            break
    if dropped.counts:
        log.info("data.eval: rows not asked: %s", dropped)
    return kept
