"""Windows to batches, at a position that can be saved.

The position is (window, row of it). Windows are made ahead of their use, by a thread or by worker
processes, and any window can be made on its own, so a saved position is exact and does not depend
on how many workers there were.
"""

import collections
import dataclasses
import json
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import util
from typing import Any

import grain
import numpy as np
from absl import flags

from jaxpost.batch import TokenBatch
from jaxpost.data import windows
from jaxpost.data.rows import REASONS, Dropped, Note
from jaxpost.data.windows import Window

log = logging.getLogger(__name__)

SHOWN = 3  # places kept of each reason
ENDLESS = 1 << 48  # rows


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What is in a batch, and what was dropped since the one before.

    Attributes:
      examples: examples that end in it.
      tokens: targets that are not padding.
      trained: targets in the mask.
      capacity: B · T.
      epoch: passes over the data, this batch included.
      dropped: reason → count of the rows that were read for this batch and dropped.
      places: reason → where the first few of these stand.
    """

    examples: int
    tokens: int
    trained: int
    capacity: int
    epoch: float
    dropped: Mapping[str, int]
    places: Mapping[str, Sequence[str]]

    @property
    def efficiency(self) -> float:
        """The share of a batch that is not padding."""
        return self.tokens / self.capacity

    def metrics(self) -> dict[str, float]:
        """What is logged of a batch; reasons appear when rows were dropped for them."""
        dropped = {f"dropped/{reason}": float(count) for reason, count in self.dropped.items()}
        return {"epoch": self.epoch, "packing_efficiency": self.efficiency, **dropped}


class Tally:
    """Counts of rows by the reason for dropping them, or for a note, with the first places."""

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()
        self.places: dict[str, list[str]] = {}

    def add(self, rows: Sequence[Dropped | Note]) -> "Tally":
        """Counts some more; returns the first row of each reason that is new."""
        first = Tally()
        for row in rows:
            if row.reason not in self.counts:
                first.counts[row.reason], first.places[row.reason] = 1, [row.where]
            self.counts[row.reason] += 1
            places = self.places.setdefault(row.reason, [])
            if len(places) < SHOWN and row.where not in places:
                places.append(row.where)
        return first

    def explained(self) -> list[str]:
        """A line a reason that says what it means."""
        return [f"  {reason}: {REASONS[reason]}" for reason in self.counts if reason in REASONS]

    def __str__(self) -> str:
        parts = []
        for reason, count in self.counts.most_common():
            places = self.places[reason]
            more = ", …" * (count > SHOWN == len(places))
            parts.append(f"{count} {reason} ({', '.join(places)}{more})")
        return ", ".join(parts) or "none"


class WindowStream:
    """Rows of windows in order, at a position that can be saved: what streams of batches share.

    A stream without end logs the first row of each reason for which rows are dropped or noted;
    every stream logs the counts when it has passed over all its data, and when it is closed.

    Attributes:
      summary: a line a file: its rows and their type.
      dropped: what was dropped since this stream was made.
      spelt: the special tokens that rows spell, which are read as such.
      epoch_rows: rows in one pass over the data, all processes together.
      fingerprint: what the batches depend on, kept with the position.
    """

    def __init__(
        self,
        window_data: grain.MapDataset,
        *,
        name: str,
        batch_size: int,
        length: int,
        window: int,
        share: slice,
        epochs: float | None,
        workers: int,
        epoch_rows: int,
        processes: int,
        summary: Sequence[str],
        fingerprint: Mapping[str, Any],
    ):
        """See `sources.batches`.

        Args:
          window_data: windows by number.
          name: of the data, in the log.
          batch_size: rows that make a batch, before `share` is taken of them.
          length: T.
          window: rows of data in a window.
          share: the rows of a batch that are this process's.
          epochs: passes over the data, the last batch filled up with padding; None: no end.
          workers: processes that make windows; 0 makes them in a thread.
          epoch_rows: rows in one pass over the data.
          processes: how many processes divide the rows of data; 1 where each reads them all.
          summary, fingerprint: see above.
        """
        self.summary = tuple(summary)
        self.dropped, self.spelt = Tally(), Tally()
        self._name = name
        self._logged = (0, 0)  # dropped and noted rows that were counted in the log
        self._pass = 0.0  # where in the data the stream began
        self.epoch_rows = epoch_rows
        self.fingerprint = dict(fingerprint)
        self._data, self._size, self._length = window_data, batch_size, length
        self._window_rows, self._share, self._epochs = window, share, epochs
        self._workers, self._processes = workers, processes
        self._number, self._row = 0, 0  # the next row to use
        self._window: Window | None = None  # window `_number`, once made
        self._told = False  # whether the drops of window `_number` were reported
        self._made: list[grain.DatasetIterator] = []  # what makes windows, once started
        weakref.finalize(self, stop, self._made)

    def _take(self, drops: Tally) -> list[tuple[Window, slice]]:
        """The rows of the next batch, by window; fewer than a batch has at the end of the stream.

        Raises:
          StopIteration: there is none.
        """
        parts, missing = [], self._size
        while missing and self._fill(drops):
            assert self._window is not None
            rows = slice(self._row, min(self._row + missing, len(self._window.examples)))
            parts.append((self._window, rows))
            missing -= rows.stop - rows.start
            self._row = rows.stop
            self._finish_window()
        if not parts:
            self.close()
            raise StopIteration
        if self._epochs is not None:
            self._fill(drops)  # so that the last batch tells of the rows dropped after it
        return parts

    def _fill(self, drops: Tally) -> bool:
        """Makes the current window one with a row that is not used yet; False at the end.

        Raises:
          ValueError: a whole pass over the data left no row.
        """
        fruitless = 0
        while self._window is None:
            if not self._made:
                self._made.append(ahead(self._data[self._number :], self._workers))
            window = next(self._made[0], None)
            if window is None:
                return False
            if not self._told:
                drops.add(window.dropped)
                self._tell(self.dropped.add(window.dropped), self.spelt.add(window.notes))
            self._window, self._told = window, True
            fruitless += self._window_rows if not len(window.examples) else 0
            self._finish_window()
            if self._window is None and fruitless * self._processes >= self.epoch_rows:
                self._refuse_empty(fruitless, drops)
        return True

    def _refuse_empty(self, fruitless: int, drops: Tally) -> None:
        longer = f"; data.max_length is {self._length}, raise it" * ("too_long" in drops.counts)
        raise ValueError(
            f"every one of the last {min(fruitless, self.epoch_rows)} rows was dropped, which is "
            f"all of this process's data: {drops}{longer}\n" + "\n".join(drops.explained())
        )

    def _tell(self, dropped: Tally, spelt: Tally) -> None:
        """Logs the first rows of their kinds."""
        if self._epochs is not None:
            return
        if dropped.counts:
            log.info("%s: first rows dropped: %s", self._name, dropped)
        if spelt.counts:
            log.info(
                "%s: first special tokens spelt in texts, and read as such: %s", self._name, spelt
            )

    def _log_counts(self) -> None:
        """Logs all counts, if they grew."""
        counts = self.dropped.counts.total(), self.spelt.counts.total()
        if counts[0] > self._logged[0]:
            log.info("%s: rows dropped so far: %s", self._name, self.dropped)
        if counts[1] > self._logged[1]:
            log.info("%s: rows that spell special tokens so far: %s", self._name, self.spelt)
        self._logged = counts

    def _finish_window(self) -> None:
        """Goes on to the next window if this one has no row left."""
        if self._window is not None and self._row >= len(self._window.examples):
            self._number, self._row = self._number + 1, 0
            self._window, self._told = None, False

    def _report(self, batch: TokenBatch, examples: int, drops: Tally) -> DataReport:
        """Of a batch of the given number of examples; logs the counts at the first pass's end."""
        epoch = self._epoch()
        report = DataReport(
            examples=examples,
            tokens=int(np.sum(batch.segment_ids > 0)),
            trained=int(np.sum(batch.completion_mask)),
            capacity=batch.inputs.size,
            epoch=epoch if self._epochs is None else min(epoch, self._epochs),
            dropped=dict(drops.counts),
            places={reason: tuple(places) for reason, places in drops.places.items()},
        )
        if int(self._pass) < int(report.epoch) and self._logged == (0, 0):
            self._log_counts()
        return report

    def _epoch(self) -> float:
        """Passes over the data so far."""
        done = float(self._number)
        if self._window is not None:
            done += self._row / len(self._window.examples)
        return done * self._window_rows * self._processes / self.epoch_rows

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch, as JSON can hold it."""
        position = {"window": self._number, "row": self._row, "told": self._told}
        return {**position, "fingerprint": self.fingerprint}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
          ValueError: it was saved over other data, or under other settings; the message says which.
        """
        refuse_other(state["fingerprint"], self.fingerprint, "batches")
        self.close()
        self._number, self._row, self._told = state["window"], state["row"], state["told"]
        self._window, self._pass = None, self._epoch()

    def close(self) -> None:
        """Stops the workers; the next batch starts them again."""
        self._log_counts()
        stop(self._made)


class DataStream(WindowStream):
    """Iterator over (TokenBatch, DataReport), with a position."""

    def __iter__(self) -> "DataStream":
        return self

    def __next__(self) -> tuple[TokenBatch, DataReport]:
        drops = Tally()
        taken = self._take(drops)
        parts = [TokenBatch(*(field[rows] for field in window.batch)) for window, rows in taken]
        examples = sum(int(np.sum(window.examples[rows])) for window, rows in taken)
        if missing := self._size - sum(len(part.inputs) for part in parts):
            parts.append(windows.empty(missing, self._length))
        whole = TokenBatch(*(np.concatenate(field) for field in zip(*parts, strict=True)))
        batch = TokenBatch(*(field[self._share] for field in whole))
        return batch, self._report(whole, examples, drops)


def refuse_other(saved: Mapping[str, Any], own: Mapping[str, Any], what: str) -> None:
    """Raises ValueError where a position was saved over other data; it says what differs."""
    saved, own = (json.loads(json.dumps(each)) for each in (saved, own))  # tuples become lists
    keys = dict.fromkeys([*saved, *own])
    changes = [
        f"{key} was {saved.get(key)} and is {own.get(key)}"
        for key in keys
        if saved.get(key) != own.get(key)
    ]
    if changes:
        raise ValueError(
            f"the saved data position is of other {what}: {'; '.join(changes)}. Put these back, "
            "or start a new run"
        )


def stop(made: list[grain.DatasetIterator]) -> None:
    """Closes and forgets an iterator while Python still can."""
    while made:
        made.pop().close()


def ahead(window_data: grain.MapDataset, workers: int) -> grain.DatasetIterator:
    """Windows in order, made ahead of their use."""
    if not workers:
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        return iter(window_data.to_iter_dataset(options))
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads its flags, also where nothing parses any
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    made = window_data.to_iter_dataset(options).mp_prefetch(processes, start_worker)
    # By the queue and not by shared memory, which containers have little of and a killed run leaks.
    plain = grain.experimental.DatasetOptions(min_shm_size=1 << 60)
    return iter(grain.experimental.WithOptionsIterDataset(made, plain))


def start_worker(number: int, count: int) -> None:
    """Leaves Ctrl-C to the main process, and lets the worker end when that is done or gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker that is told to stop would wait for its queue to be read; half a second is enough for
    # an error to get through.
    util.Finalize(None, lambda: (time.sleep(0.5), os._exit(1)), exitpriority=100)
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
