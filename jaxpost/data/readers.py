"""Files as random-access rows: `len(reader)`, and `reader[i]` → (row, where it stands).

JSON lines and CSV say `file:line`, the others `file[row]`. Lines are found once, by a scan for line
breaks, and read when asked for; Parquet is read by row group, an Arrow file is mapped. Readers hold
no open file until they are read, so that they can be sent to a worker.
"""

import collections
import contextlib
import csv
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from array_record.python import array_record_data_source
from pyarrow import ipc, parquet

from jaxpost.data import json_text

Record = tuple[dict[str, Any], str]


@runtime_checkable
class Reader(Protocol):
    """Rows of one file."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Row `index` and where it stands; raises ValueError if it is broken."""
        ...


def parse(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        row = json_text.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON: {error.msg} at column {error.colno}: {shown(text, error.pos)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {shown(text, 0)}")
    return row


def shown(text: bytes, place: int) -> str:
    """A few characters around a place."""
    around = text.decode(errors="replace")
    start = max(place - 30, 0)
    return repr(around[start : place + 30])


@contextlib.contextmanager
def reading(where: str | Path) -> Iterator[None]:
    """Says where, when a library cannot make sense of what a file holds."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, RuntimeError, ValueError, IndexError) as error:
        raise ValueError(f"{where}: cannot be read: {str(error).strip()}") from error


class Lines:
    """One JSON object a line; blank lines and byte order marks are passed over."""

    def __init__(self, path: Path, unpacked: Path | None = None):
        """`unpacked` is the file to read where `path` is compressed."""
        self.path = path
        self._file = unpacked or path
        self._starts, self._stops, self._numbers = index_lines(self._file)
        self._descriptor: int | None = None

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:
        if self._descriptor is None:
            self._descriptor = os.open(self._file, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        start, stop = int(self._starts[index]), int(self._stops[index])
        where = f"{self.path}:{self._numbers[index]}"
        return parse(os.pread(self._descriptor, stop - start, start), where), where

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_descriptor": None}


SCANNED = 1 << 26  # bytes looked through at a time
MARK = b"\xef\xbb\xbf"  # a byte order mark in UTF-8


def index_lines(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the lines of a file that are not blank start and stop, and their numbers from 1."""
    size = path.stat().st_size
    if size == 0:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    data = np.memmap(path, np.uint8, "r")
    breaks = [
        np.flatnonzero(data[start : start + SCANNED] == ord("\n")) + start
        for start in range(0, size, SCANNED)
    ]
    stops = np.concatenate([*breaks, [size]]).astype(np.int64)
    starts = np.concatenate([[0], stops[:-1] + 1]).astype(np.int64)
    if bytes(data[:2]) in (b"\xff\xfe", b"\xfe\xff"):
        raise ValueError(f"{path}: is UTF-16 text; write it as UTF-8")
    leads = data[np.minimum(starts, size - 1)]
    for line in np.flatnonzero(leads == MARK[0]).tolist():  # files with one, put together
        if bytes(data[starts[line] : starts[line] + len(MARK)]) == MARK:
            starts[line] += len(MARK)
    full = starts < stops
    leads = data[np.minimum(starts, size - 1)]
    for line in np.flatnonzero(full & (leads <= ord(" "))).tolist():
        full[line] = bool(bytes(data[starts[line] : stops[line]]).strip())
    return starts[full], stops[full], np.flatnonzero(full) + 1


class Table:
    """Rows held in memory, with where each stands."""

    def __init__(self, path: Path, rows: Sequence[Any], places: Sequence[str]):
        self.path = path
        self._rows = rows
        self._places = places

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        row, where = self._rows[index], self._places[index]
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected a JSON object, got {str(row)[:60]!r}")
        return row, where


def json_file(path: Path, unpacked: Path | None = None) -> Reader:
    """A `.json` file: an array of rows, or one row a line."""
    file = unpacked or path
    with open(file, encoding="utf-8-sig") as opened:
        try:
            head = opened.read(4096).lstrip()
            if not head.startswith("["):
                return Lines(path, unpacked)
            opened.seek(0)
            rows = json_text.loads(opened.read())
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return Table(path, rows, [f"{path}[{index}]" for index in range(len(rows))])


def csv_file(path: Path, unpacked: Path | None = None, delimiter: str = ",") -> Reader:
    """A CSV file with a header; every cell is text."""
    csv.field_size_limit(1 << 30)
    rows, places = [], []
    with open(unpacked or path, encoding="utf-8-sig", newline="") as opened:
        reader = csv.reader(opened, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            line = reader.line_num + 1
            for cells in reader:
                where, line = f"{path}:{line}", reader.line_num + 1
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise ValueError(
                        f"{where}: {len(cells)} cells where the header has {len(header)}"
                    )
                rows.append(dict(zip(header, cells, strict=True)))
                places.append(where)
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}") from error
    if len(set(header)) != len(header):
        raise ValueError(f"{path}:1: the header names a column twice: {', '.join(header)}")
    return Table(path, rows, places)


class Document:
    """A file of plain text as one row, `{"text": …}`; none where it is blank."""

    def __init__(self, path: Path, unpacked: Path | None = None):
        self.path = path
        self._file = unpacked or path
        self._count = int(bool(self._read().strip()))

    def _read(self) -> str:
        try:
            return self._file.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: not UTF-8: {error}") from error

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Record:
        return {"text": self._read()}, str(self.path)


class Groups:
    """The row groups of Parquet files read last, up to `limit` bytes in all; safe for threads."""

    def __init__(self, limit: int):
        self._limit = limit
        self._lock = threading.Lock()
        self._tables: collections.OrderedDict[tuple[Path, int], pa.Table] = (
            collections.OrderedDict()
        )

    def get(self, path: Path, group: int) -> pa.Table:
        """A row group, the last one always kept."""
        with self._lock:
            table = self._tables.pop((path, group), None)
            if table is None:
                table = parquet.ParquetFile(path, memory_map=True).read_row_group(group)
            self._tables[path, group] = table
            size = sum(kept.nbytes for kept in self._tables.values())
            while size > self._limit and len(self._tables) > 1:
                size -= self._tables.popitem(last=False)[1].nbytes
            return table


GROUPS = Groups(1 << 30)


class Parquet:
    """A Parquet file.

    A shuffled read of a file whose row groups exceed a gibibyte reads whole groups again and again:
    such data is better kept as JSON lines, ArrayRecord or a datasets folder.
    """

    def __init__(self, path: Path):
        self.path = path
        with reading(path):
            metadata = parquet.ParquetFile(path).metadata
        counts = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Record:
        group = int(np.searchsorted(self._starts, index, "right")) - 1
        where = f"{self.path}[{index}]"
        with reading(where):
            table = GROUPS.get(self.path, group)
            return plain(table.slice(index - int(self._starts[group]), 1)), where


MAGIC = b"ARROW1"  # what an Arrow file begins with, and a stream does not


class Arrow:
    """An Arrow file or stream, as `datasets` saves it; mapped, not loaded."""

    def __init__(self, path: Path):
        self.path = path
        self._batches: list[pa.RecordBatch] | None = None
        self._sound: dict[int, bool] = {}
        counts = [batch.num_rows for batch in self._opened()]
        self._starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._batches = None

    def _opened(self) -> list[pa.RecordBatch]:
        if self._batches is None:
            source = pa.memory_map(str(self.path))
            with reading(self.path):
                if source.read(len(MAGIC)) == MAGIC:
                    file = ipc.open_file(source)
                    count = file.num_record_batches
                    self._batches = [file.get_batch(index) for index in range(count)]
                else:
                    source.seek(0)
                    self._batches = list(ipc.open_stream(source))
        return self._batches

    def _is_sound(self, number: int) -> bool:
        """Whether a batch is as it should be; broken offsets in one would end the process."""
        if number not in self._sound:
            try:
                self._opened()[number].validate(full=True)
                self._sound[number] = True
            except pa.ArrowInvalid:
                self._sound[number] = False
        return self._sound[number]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Record:
        number = int(np.searchsorted(self._starts, index, "right")) - 1
        where = f"{self.path}[{index}]"
        with reading(where):
            batch = self._opened()[number]
            row = batch.slice(index - int(self._starts[number]), 1)
            if not self._is_sound(number):
                row.validate(full=True)
            return plain(row), where

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_batches": None}


def plain(row: pa.Table | pa.RecordBatch) -> dict[str, Any]:
    """The one row of a table as Python values.

    A column of maps gives each the keys of all, with null where it had none, so nulls inside lists
    and maps are taken out again.
    """
    (values,) = row.to_pylist(maps_as_pydicts="strict")
    return {name: without_nulls(value) for name, value in values.items()}


def without_nulls(value: Any) -> Any:
    """A value without the null entries of the maps in it."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


class Records:
    """An ArrayRecord file whose records are JSON objects."""

    def __init__(self, path: Path):
        self.path = path
        self._source: Any = None
        self._count = len(self._opened())

    def _opened(self) -> Any:
        if self._source is None:
            with reading(self.path):
                self._source = array_record_data_source.ArrayRecordDataSource(str(self.path))
        return self._source

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Record:
        where = f"{self.path}[{index}]"
        with reading(where):
            record = self._opened()[index]
        return parse(record, where), where

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None}
