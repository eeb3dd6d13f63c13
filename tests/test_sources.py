"""Files of every kind to batches: nothing lost, nothing repeated, and exact positions."""

import bz2
import collections
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pytest
from array_record.python import array_record_module
from pyarrow import csv, ipc, parquet

from jaxpost.batch import Example
from jaxpost.data import paths, readers, sources
from jaxpost.data.formats import ChatRow, CompletionRow, Dropped, Note, Noted, TextRow
from jaxpost.data.sources import DataConfig


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def letters(row):
    """A row's characters as tokens, all trained; `!` makes the row untrainable."""
    if row.text == "!":
        return Dropped("no_good", row.where)
    if "?" in row.text:
        raise ValueError("no questions")
    tokens = np.array([ord(letter) for letter in row.text], np.int32)
    return Example(tokens, np.ones(len(tokens), bool), np.ones(len(tokens), np.float32))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path, count, longest=9):
    """A file of numbered texts of different lengths."""
    return write(path, [{"text": f"{n:03d}{'.' * (n * 7 % longest)}"} for n in range(count)])


def stream(config, **options):
    settings = {"length": 16, "batch_size": 2, "seed": 0} | options
    return sources.batches(config, letters, **settings)


def sequences(batch):
    """The texts that a batch holds, in its order, from inputs and the last target."""
    found = []
    for row in range(len(batch.inputs)):
        for number in range(1, batch.segment_ids[row].max(initial=0) + 1):
            here = batch.segment_ids[row] == number
            assert batch.positions[row][here].tolist() == list(range(here.sum()))
            tokens = [batch.inputs[row][here][0], *batch.targets[row][here]]
            assert tokens[:-1] == batch.inputs[row][here].tolist()
            found.append("".join(map(chr, tokens)))
    return found


def taken(data, count):
    return list(itertools.chain(*(sequences(batch) for batch, _ in itertools.islice(data, count))))


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# Files.


def test_lines_may_end_and_begin_as_they_like(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\r\n\n  \r\n {"text": "b"}\n\n{"text": "\xc3\xa9"}\n'
        b'\xef\xbb\xbf\n\xef\xbb\xbf{"text": "\xef\xbb\xbfc"}'
    )
    reader = readers.Lines(path)
    assert list(reader) == [
        ({"text": "a"}, f"{path}:1"),
        ({"text": "b"}, f"{path}:4"),
        ({"text": "é"}, f"{path}:6"),
        ({"text": "\ufeffc"}, f"{path}:8"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "b"', r"a\.jsonl:2: not JSON: Expecting ',' delimiter at column 13: "),
        (b'["b"]', r"a\.jsonl:2: expected a JSON object, got '\[\"b\"\]'"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: not UTF-8"),
        (b'{"text": 3}', r"a\.jsonl:2: column text: expected text, got int 3"),
        (b'{"text": "\\ud83d\\ude00 \\uD800"}', r"a\.jsonl:2: \\ud800 is half of a character"),
        (b'{"text": "b", "x": ' + b"[" * 10**5, r"a\.jsonl:2: JSON that is nested too deep"),
        (b'{"text": "b", "x": ' + b"1" * 5000 + b"}", r"a\.jsonl:2: JSON with a number that is"),
        (b'{"txt": "b"}', r"a\.jsonl:2: no column text, which text rows need; found txt"),
    ],
)
def test_a_broken_line_is_named_or_dropped(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "aaa"}\n' + line + b'\n{"text": "ccc"}\n')
    with pytest.raises(ValueError, match=words):
        list(sources.rows(str(path), DataConfig(str(path))))
    lenient = DataConfig(str(path), malformed="drop", shuffle=False)
    found = list(sources.rows(str(path), lenient))
    assert [type(row) for row in found] == [TextRow, Dropped, TextRow]
    assert found[1].reason == "malformed"
    assert "a.jsonl:2" in found[1].where
    _, report = next(stream(lenient, epochs=1))
    assert report.dropped == {"malformed": 1}


@pytest.mark.parametrize(
    ("ending", "pack"),
    [
        (".gz", gzip.compress),
        (".GZ", gzip.compress),
        (".bz2", bz2.compress),
        (".zst", lambda data: pa.compress(data, "zstd", asbytes=True)),
    ],
)
def test_compressed_lines_are_unpacked_once(tmp_path, ending, pack):
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(b'{"text": "a"}\n{"text": '))
    (reader,) = paths.open_path(str(path))
    assert reader[0] == ({"text": "a"}, f"{path}:1")
    with pytest.raises(ValueError, match=rf"a\.jsonl\{ending}:2: not JSON"):
        reader[1]
    path.write_bytes(pack(b'{"text": "b"}\n'))
    os.utime(path, (1, 1))
    (reader,) = paths.open_path(str(path))
    assert reader[0][0] == {"text": "b"}
    assert len(list(paths.cache_folder().iterdir())) == 1
    path.write_bytes(b"not packed")
    with pytest.raises(ValueError, match="cannot be unpacked"):
        paths.open_path(str(path))


def test_json_is_an_array_or_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\n[{"text": "a"}, 3]')
    (reader,) = paths.open_path(str(path))
    assert reader[0] == ({"text": "a"}, f"{path}[0]")
    with pytest.raises(ValueError, match=r"a\.json\[1\]: expected a JSON object, got '3'"):
        reader[1]
    path.write_text('{"text": "a"}\n{"text": "b"}')
    (reader,) = paths.open_path(str(path))
    assert len(reader) == 2
    path.write_text('[{"text": "a"},\n {"text" "b"}]')
    with pytest.raises(ValueError, match=r"a\.json:2: not JSON"):
        paths.open_path(str(path))


def test_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('prompt,completion\np,"two\nlines"\n\n007,b\n')
    (reader,) = paths.open_path(str(path))
    assert list(reader) == [
        ({"prompt": "p", "completion": "two\nlines"}, f"{path}:2"),
        ({"prompt": "007", "completion": "b"}, f"{path}:5"),
    ]
    path.write_text("prompt,completion\np,c\nq\n")
    with pytest.raises(ValueError, match=r"a\.csv:3: 1 cells where the header has 2"):
        paths.open_path(str(path))
    tabs = tmp_path / "a.tsv"
    csv.write_csv(pa.table({"text": ["a"]}), tabs, csv.WriteOptions(delimiter="\t"))
    (reader,) = paths.open_path(str(tabs))
    assert reader[0] == ({"text": "a"}, f"{tabs}:2")


CHATS = [
    {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "tools": None,
        "id": 1,
    },
    {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "4", "name": "f"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "id": 2,
    },
]


def check_chats(path):
    """Rows of a column store are those of JSON lines: nulls that fill its columns up are gone."""
    found = [row for _ in range(2) for row in sources.rows(str(path), DataConfig(str(path)))]
    assert [row.meta for row in found] == [{"id": 1}, {"id": 2}] * 2
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert [row.messages for row in found[:2]] == [
        CHATS[0]["messages"],
        [{"role": "assistant", "tool_calls": [call]}, CHATS[1]["messages"][1]],
    ]
    assert [row.tools for row in found[:2]] == [None, CHATS[1]["tools"]]


def test_parquet_reads_row_groups_as_they_are_needed(tmp_path):
    parquet.write_table(pa.Table.from_pylist(CHATS), tmp_path / "a.parquet", row_group_size=1)
    check_chats(tmp_path / "a.parquet")
    (reader,) = paths.open_path(str(tmp_path / "a.parquet"))
    assert reader[1][1] == f"{tmp_path}/a.parquet[1]"
    groups = readers.Groups(limit=1)
    for group in (0, 1, 1, 0):
        assert groups.get(reader.path, group).num_rows == 1
        assert len(groups._tables) == 1
    (tmp_path / "b.parquet").write_text("hello")
    with pytest.raises(ValueError, match=r"b\.parquet: cannot be read"):
        paths.open_path(str(tmp_path / "b.parquet"))


def test_a_datasets_folder(tmp_path):
    table, folder = pa.Table.from_pylist(CHATS), tmp_path / "saved"
    folder.mkdir()
    for number in range(2):
        name = f"data-0000{number}-of-00002.arrow"
        with ipc.new_stream(str(folder / name), table.schema) as out:
            out.write_table(table.slice(number, 1))
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")
    check_chats(folder)
    splits = tmp_path / "splits"
    splits.mkdir()
    (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=r"several splits; name one: .*/train, .*/test"):
        paths.open_path(str(splits))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("state.json", b"{broken", "cannot be read: Expecting property name"),
        ("state.json", b"\xff", "cannot be read: 'utf-8' codec"),
        ("state.json", b"[]", "expected a map with a list"),
        ("state.json", b'{"_data_files": [1]}', "expected a map with a list _data_files"),
        (
            "state.json",
            b'{"_data_files": [{"filename": "a.arrow"}]}',
            "names a.arrow, which is not",
        ),
        ("dataset_dict.json", b"[" * 10**5, "cannot be read: JSON that is nested"),
        ("dataset_dict.json", b'{"splits": 3}', "expected a map with a list splits"),
    ],
)
def test_a_broken_datasets_folder_names_the_file(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=rf"{name}: {words}"):
        paths.open_path(str(tmp_path))


def write_table(path, table):
    if path.suffix == ".parquet":
        parquet.write_table(table, path, use_dictionary=False)
        return
    with (ipc.new_file if path.stem == "file" else ipc.new_stream)(str(path), table.schema) as out:
        out.write_table(table)


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize("place", ["pages", "length"])
def test_a_damaged_binary_file_is_named(tmp_path, name, place):
    """Random bytes in an Arrow file's offsets once ended the process."""
    path = tmp_path / name
    write_table(path, pa.table({"text": [f"row {n}" * 40 for n in range(900)]}))
    sound = path.read_bytes()
    if place == "pages":
        path.write_bytes(sound[:600] + b"\xff" * 2000 + sound[2600:])
    else:
        path.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(ValueError, match=rf"{name}(\[\d+\])?: cannot be read"):
        list(sources.rows(str(path), DataConfig(str(path))))


def test_damaged_rows_can_be_dropped(tmp_path):
    path = tmp_path / "file.arrow"
    write_table(path, pa.table({"text": ["abc", "def", "ghi"]}))
    path.write_bytes(path.read_bytes().replace(b"def", b"d\xfff"))
    found = list(sources.rows(str(path), DataConfig(str(path), malformed="drop")))
    assert [type(row) for row in found] == [TextRow, Dropped, TextRow]
    assert "file.arrow[1]: cannot be read" in found[1].where


def test_array_record(tmp_path):
    path = tmp_path / "a.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for row in CHATS:
        writer.write(json.dumps(row).encode())
    writer.write(b"hello")
    writer.close()
    (reader,) = paths.open_path(str(path))
    assert [reader[index][0] for index in (1, 0)] == CHATS[::-1]
    with pytest.raises(ValueError, match=r"a\.array_record\[2\]: not JSON"):
        reader[2]
    sound = path.read_bytes()
    path.write_bytes(sound[:100] + b"\xff" * 40 + sound[140:])
    with pytest.raises(ValueError, match=r"a\.array_record(\[\d\])?: cannot be read"):
        list(sources.rows(str(path), DataConfig(str(path))))
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"a\.array_record: cannot be read"):
        paths.open_path(str(path))


def test_folders_and_patterns(tmp_path):
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", [{"text": name}])
    (tmp_path / "README.md").write_text("hello")
    for path in (tmp_path, tmp_path / "*", tmp_path / "**" / "*.jsonl"):
        config = DataConfig(str(path))
        assert [row.text for row in sources.rows(str(path), config)] == ["a", "b"]
        assert stream(config).summary == (f"{path}: 2 files, 2 rows, type text",)


def test_a_text_file_is_one_document(tmp_path):
    for name, text in (("b", "\ufeffone\r\n\ntwo\n"), ("a", "é"), ("blank", " \n")):
        (tmp_path / f"{name}.txt").write_text(text, "utf-8", newline="")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"three"))
    config = DataConfig(str(tmp_path))
    found = [(row.text, row.where) for row in sources.rows(str(tmp_path), config)]
    names = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt.gz")]
    assert found == list(zip(["é", "one\n\ntwo\n", "three"], names, strict=True))
    write(tmp_path / "d.jsonl", [{"text": "d"}])  # beside rows they are notes
    assert [row.text for row in sources.rows(str(tmp_path), config)] == ["d"]
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"a\.txt: not UTF-8"):
        paths.open_path(f"{tmp_path}/a.txt")


def test_small_files_are_looked_at_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 50 + "{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:51: not JSON"):
        sources.check(str(path), DataConfig(str(path)))
    sources.check(str(path), DataConfig(str(path), malformed="drop"))
    monkeypatch.setattr(sources, "CHECKED", 100)
    sources.check(str(path), DataConfig(str(path)))


def test_a_part_of_a_mixture_that_is_never_read_is_refused(tmp_path):
    texts(tmp_path / "a.jsonl", 6)
    texts(tmp_path / "b.jsonl", 4)
    a, b = f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"
    stream(DataConfig({a: 9, b: 1}))
    for weight in (1e-300, 0.9):
        with pytest.raises(
            ValueError, match=r"b\.jsonl: a pass over this mixture has 10 rows, and"
        ):
            stream(DataConfig({a: 9, b: weight}))


def test_a_folder_of_several_splits_is_not_read_as_one(tmp_path):
    for name in ("train-0", "test-0"):
        write(tmp_path / f"{name}.jsonl", [{"text": name}])
    with pytest.raises(ValueError, match=r"several splits .* name a file or a pattern"):
        paths.open_path(str(tmp_path))


def test_paths_that_lead_nowhere(tmp_path):
    write(tmp_path / "train.jsonl", [{"text": "a"}])
    with pytest.raises(
        FileNotFoundError, match=r"trian\.jsonl: no such file .* holds train\.jsonl"
    ):
        paths.open_path(f"{tmp_path}/trian.jsonl")
    with pytest.raises(FileNotFoundError, match=r"no such file .* holds train\.jsonl"):
        paths.open_path(f"{tmp_path}/data/x/train.jsonl")
    with pytest.raises(FileNotFoundError, match=r"\*\.parquet: no file matches .* train\.jsonl"):
        paths.open_path(f"{tmp_path}/*.parquet")
    (tmp_path / "a.doc").write_text("hello")
    (tmp_path / ".hidden").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.doc: not a type of file that is read: \.jsonl, "):
        paths.find(f"{tmp_path}/a.doc")
    with pytest.raises(FileNotFoundError, match=r"holds train\.jsonl$"):
        paths.find(f"{tmp_path}/a.dox")
    with pytest.raises(ValueError, match="only local files"):
        paths.open_path("gs://bucket/a.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no rows"):
        stream(DataConfig(f"{tmp_path}/empty.jsonl"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(FileNotFoundError, match="this folder holds no file of rows"):
        paths.open_path(f"{tmp_path}/nothing")


def test_the_summary_names_the_type(tmp_path):
    chats = write(tmp_path / "chats.jsonl", CHATS * 700)
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": CHATS[0]["messages"], "completion": "4"}])
    config = DataConfig({chats: 3, pairs: 1})
    assert stream(config).summary == (
        f"{chats}: 1,400 rows, type messages, 75 % of rows",
        f"{pairs}: 1 rows, type prompt-completion (conversational), 25 % of rows",
    )


def test_columns_and_turns_come_from_the_configuration(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"q": "2+2?", "a": "4"}])
    config = DataConfig(path, columns={"prompt": "q", "completion": "a"}, as_chat=True)
    (row,) = sources.rows(path, config)
    assert isinstance(row, CompletionRow)
    assert row.completion == [{"role": "assistant", "content": "4"}]
    with pytest.raises(ValueError, match=r"a\.jsonl: columns q, a are of no type"):
        stream(DataConfig(path))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train": {"a": 1, "b": 0}}, "train: b: expected a weight above 0, got 0"),
        ({"train": {"a": float("nan")}}, "train: a: expected a weight above 0, got nan"),
        ({"train": ()}, "train: no path is given"),
        ({"train": "a", "eval": {"b": -1}}, "eval: b: expected a weight above 0, got -1"),
        ({"train": "a", "window": 0}, "data.window is 0; it must be at least 1"),
        ({"train": "a", "window": 9, "packing": False}, "data.window is for packing"),
        ({"train": "a", "seed": 0, "shuffle": False}, "data.seed is for shuffling"),
    ],
)
def test_settings_that_make_no_sense(settings, words):
    with pytest.raises(ValueError, match=words):
        DataConfig(**settings)


# Rows to batches.


def windowed(path: str, packing: bool, window: int, **settings) -> DataConfig:
    """With a window of that size where there is packing, which alone has one to set."""
    chosen = {"window": window} if packing else {}
    return DataConfig(path, packing=packing, **chosen, **settings)


def test_packing_loses_nothing_and_crosses_nothing(tmp_path):
    path = texts(tmp_path / "a.jsonl", 50)
    expected = [row.text for row in sources.rows(path, DataConfig(path))]
    for packing in (True, False):
        data = stream(windowed(path, packing, 20, shuffle=False), epochs=1)
        found = [(batch, report) for batch, report in data]
        said = [text for batch, _ in found for text in sequences(batch)]
        assert collections.Counter(said) == collections.Counter(expected)
        assert sum(report.examples for _, report in found) == 50
        assert sum(report.tokens for _, report in found) == sum(map(len, expected)) - 50
        assert found[-1][1].epoch == 1.0
        if packing:
            full = [report.efficiency for _, report in found[:-1]]
            assert np.mean(full) > 0.9
        else:
            assert said == expected
            assert all(batch.segment_ids.max() == 1 for batch, _ in found)


def test_long_texts_are_split_without_losing_a_target(tmp_path):
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    path = write(tmp_path / "a.jsonl", [{"text": alphabet}])
    batch, report = next(stream(DataConfig(path), length=10, batch_size=3, epochs=1))
    pairs = [
        (chr(read), chr(target))
        for read, target, place in zip(
            batch.inputs.ravel(), batch.targets.ravel(), batch.segment_ids.ravel(), strict=True
        )
        if place
    ]
    assert sorted(pairs) == list(itertools.pairwise(alphabet))
    assert sorted(row[0] for row in batch.positions.tolist()) == [0, 0, 0]
    assert (report.examples, report.tokens, report.trained, report.capacity) == (1, 25, 25, 30)


def masked(row):
    """Trains only the last token, where it is a full stop."""
    tokens = np.array([ord(letter) for letter in row.prompt + row.completion], np.int32)
    mask = np.zeros(len(tokens), bool)
    mask[-1] = row.completion == "."
    return Example(tokens, mask, mask.astype(np.float32))


@pytest.mark.parametrize(
    ("too_long", "prompts", "dropped"),
    [
        ("auto", ["aaa"], {"too_long": 1, "fully_masked": 1}),
        ("drop", ["aaa"], {"too_long": 1, "fully_masked": 1}),
        ("truncate", ["aaa"], {"too_long": 1, "fully_masked": 1}),
        ("split", ["aaa", "b"], {"fully_masked": 1}),
    ],
)
def test_rows_without_a_target_in_reach_are_dropped(tmp_path, too_long, prompts, dropped):
    rows = [("aaa", "."), ("b" * 17, "."), ("ccc", "x")]
    path = write(tmp_path / "a.jsonl", [{"prompt": p, "completion": c} for p, c in rows])
    config = DataConfig(path, too_long=too_long, shuffle=False)
    data = sources.batches(config, masked, length=16, batch_size=4, seed=0, epochs=1)
    ((batch, report),) = data
    assert [text.rstrip(".")[-3:].lstrip("") for text in sequences(batch)] == prompts
    assert report.dropped == dropped
    assert report.trained == len(prompts)
    if too_long == "drop":
        assert report.places["too_long"] == (f"{path}:2",)
        assert report.metrics()["dropped/too_long"] == 1.0


def test_a_sequence_that_is_too_long_can_be_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "x" * 30}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: 29 targets, where a row has room for 16"):
        next(stream(DataConfig(path, too_long="error")))


def test_what_the_tokenizer_refuses_says_where(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "abc?"}])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: no questions"):
        next(stream(DataConfig(path)))
    _, report = next(stream(DataConfig(path, malformed="drop"), epochs=1))
    assert report.dropped == {"malformed": 1}


def test_a_pass_without_a_row_is_an_error(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "!"}] * 5 + [{"text": "a"}] * 4)
    for options in ({}, {"epochs": 1}, {"process_count": 2}):
        for window in (2, 512):
            with pytest.raises(ValueError, match=r"was dropped.* 5 no_good .*:1|rows was dropped"):
                next(stream(DataConfig(path, window=window, shuffle=False), **options))


def test_drops_are_told_once_with_the_rows_that_follow(tmp_path):
    rows = [{"text": "!" if n % 3 == 0 else f"{n:03d}"} for n in range(12)]
    path = write(tmp_path / "a.jsonl", rows)
    for window in (1, 4, 12):
        config = DataConfig(path, window=window, shuffle=False, packing=True)
        reports = [report for _, report in stream(config, epochs=1)]
        assert sum(report.dropped.get("no_good", 0) for report in reports) == 4
        assert sum(report.examples for report in reports) == 8


def noting(row):
    """As `letters`, with a note on each text that holds a colon."""
    found = letters(row)
    if isinstance(found, Dropped) or ":" not in row.text:
        return found
    return Noted(found, (Note("a colon", row.where),))


def test_what_is_dropped_or_noted_is_logged_first_and_at_the_end_of_a_pass(tmp_path, caplog):
    rows = [{"text": text} for text in ("!", "ab", "c:", "!", "d:", "e" * 20)]
    path = write(tmp_path / "a.jsonl", rows)
    config = DataConfig(path, window=1, shuffle=False, too_long="drop")
    data = sources.batches(config, noting, length=16, batch_size=1, seed=0)
    with caplog.at_level("INFO", "jaxpost"):
        next(data)
        assert caplog.messages == [f"data.train: first rows dropped: 1 no_good ({path}:1)"]
        list(itertools.islice(data, 3))
        told = caplog.messages[1:]
        assert any("first special tokens" in said and f"({path}:3)" in said for said in told)
        assert f"data.train: first rows dropped: 1 too_long ({path}:6)" in told
        counts = f"3 no_good ({path}:1, {path}:4), 1 too_long ({path}:6)"
        assert f"data.train: rows dropped so far: {counts}" in told
        assert (
            f"data.train: rows that spell special tokens so far: 2 a colon ({path}:3, {path}:5)"
            in told
        )
        count = len(caplog.messages)
        list(itertools.islice(data, 6))
        assert len(caplog.messages) == count
        data.close()
        data.close()
        assert len(caplog.messages) == count + 2
    assert (data.dropped.counts["too_long"], data.spelt.counts["a colon"]) == (3, 6)


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    path = texts(tmp_path / "a.jsonl", 4)
    for given in ((path, path), (path, str(tmp_path / "*.jsonl")), (str(tmp_path), path)):
        with pytest.raises(ValueError, match=rf"{path} is named twice, by .* mixture"):
            stream(DataConfig(given))
    # A mixture says how much of each it wants.
    assert len(stream(DataConfig({path: 1.0, str(tmp_path): 2.0})).summary) == 2


def test_every_row_too_long_says_which_key_to_raise(tmp_path):
    rows = [{"prompt": "abc", "completion": "."}]
    path = write(tmp_path / "a.jsonl", rows)
    for too_long in ("auto", "truncate"):
        data = sources.batches(
            DataConfig(path, too_long=too_long), masked, length=1, batch_size=1, seed=0
        )
        with pytest.raises(ValueError, match=r"1 too_long .*data\.max_length is 1, raise it"):
            next(data)


def test_every_pass_has_another_order_and_every_seed(tmp_path):
    path = texts(tmp_path / "a.jsonl", 40, longest=1)
    data = stream(DataConfig(path, packing=False), batch_size=40)
    one, two = taken(data, 1), taken(data, 1)
    other = taken(stream(DataConfig(path, packing=False), batch_size=40, seed=1), 2)
    assert sorted(one) == sorted(two) == sorted(other[:40])
    assert len({tuple(order) for order in (one, two, other[:40], other[40:])}) == 4
    again = taken(stream(DataConfig(path, packing=False, seed=0), batch_size=40, seed=9), 1)
    assert again == one
    plain = stream(DataConfig(path, packing=False, shuffle=False), batch_size=40)
    assert taken(plain, 1) == taken(plain, 1) == sorted(one)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_a_pass_without_loss_or_repetition(tmp_path, processes, packing):
    path = texts(tmp_path / "a.jsonl", 50)
    expected = collections.Counter(row.text for row in sources.rows(path, DataConfig(path)))
    config = windowed(path, packing, 5)
    found = collections.Counter()
    for index in range(processes):
        data = stream(config, batch_size=1, process_index=index, process_count=processes)
        # Window 5 and 50 rows a pass: after 3 passes a process has read 150 / processes rows.
        rows = 0
        while rows < 150 // processes:
            batch, report = next(data)
            rows += report.examples
            found.update(sequences(batch))
        assert rows == 150 // processes
    assert found == collections.Counter({text: 3 * count for text, count in expected.items()})


def test_processes_make_equally_many_batches_of_finite_data(tmp_path):
    path = texts(tmp_path / "a.jsonl", 23)
    config = DataConfig(path, eval=path, window=7)
    parts = [
        list(stream(config, epochs=2, process_index=index, process_count=3)) for index in range(3)
    ]
    assert len({len(part) for part in parts}) == 1
    found = collections.Counter(
        text for part in parts for batch, _ in part for text in sequences(batch)
    )
    assert set(found.values()) == {2}
    assert len(found) == 23


def test_what_does_not_fill_a_batch_goes_on_into_the_next_pass(tmp_path):
    path = texts(tmp_path / "a.jsonl", 5, longest=1)
    data = stream(DataConfig(path, packing=False), batch_size=3)
    found = taken(data, 10)
    assert [sorted(found[n : n + 5]) for n in range(0, 30, 5)] == [sorted(found[:5])] * 6
    assert [round(report.epoch, 6) for _, report in itertools.islice(data, 2)] == [6.6, 7.2]


def test_a_mixture_keeps_its_weights(tmp_path):
    one = write(tmp_path / "one.jsonl", [{"text": f"one {n}"} for n in range(10)])
    two = write(tmp_path / "two.jsonl", [{"text": f"two {n}"} for n in range(100)])
    data = stream(DataConfig({one: 3, two: 1}, packing=False), batch_size=100)
    found = taken(data, 4)
    assert collections.Counter(text[:3] for text in found) == {"one": 300, "two": 100}
    assert collections.Counter(found) == collections.Counter(
        {f"one {n}": 30 for n in range(10)} | {f"two {n}": 1 for n in range(100)}
    )
    _, report = next(data)
    assert report.epoch == pytest.approx(500 / 110)
    assert data.epoch_rows == 110
    both = stream(DataConfig((one, two), packing=False, shuffle=False), batch_size=110)
    assert taken(both, 1) == [f"one {n}" for n in range(10)] + [f"two {n}" for n in range(100)]


# Positions.


def straight(config, count):
    data = stream(config)
    found = [(next(data), json.dumps(data.get_state())) for _ in range(count)]
    data.close()
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_a_saved_position_is_exact(tmp_path, packing):
    rows = [{"text": "!" if n % 7 == 0 else f"{n:03d}{'.' * (n % 25)}"} for n in range(60)]
    config = windowed(write(tmp_path / "a.jsonl", rows), packing, 11)
    expected = straight(config, 44)
    for place in range(0, 40, 3):
        data = stream(config)
        if place % 2:
            next(data)  # a stream that was used already
        data.set_state(json.loads(expected[place][1]))
        for (batch, report), _ in expected[place + 1 : place + 4]:
            found, told = next(data)
            assert same(found, batch)
            assert told == report


def test_a_saved_position_is_exact_with_any_number_of_workers(tmp_path):
    rows = [{"text": "!" if n % 7 == 0 else f"{n:03d}{'.' * (n % 25)}"} for n in range(60)]
    path = write(tmp_path / "a.jsonl", rows)
    expected = straight(DataConfig(path, window=11), 30)
    for place in (2, 18):
        data = stream(DataConfig(path, window=11, workers=2))
        data.set_state(json.loads(expected[place][1]))
        for (batch, report), state in expected[place + 1 :]:
            found, told = next(data)
            assert same(found, batch)
            assert told == report
            assert json.dumps(data.get_state()) == state
        data.close()


def test_finite_data_resumes_too(tmp_path):
    rows = [{"text": "!" if n > 8 else f"{n:03d}"} for n in range(12)]
    config = DataConfig(write(tmp_path / "a.jsonl", rows), shuffle=False, packing=False)
    whole = list(stream(config, epochs=1))
    assert sum(report.dropped.get("no_good", 0) for _, report in whole) == 3
    for place in range(1, len(whole) + 1):
        first = stream(config, epochs=1)
        told = [next(first)[1] for _ in range(place)]
        second = stream(config, epochs=1)
        second.set_state(json.loads(json.dumps(first.get_state())))
        rest = list(second)
        assert len(rest) == len(whole) - place
        assert all(same(a, b) for (a, _), (b, _) in zip(rest, whole[place:], strict=True))
        told += [report for _, report in rest]
        assert told == [report for _, report in whole]


def test_a_position_of_other_data_is_refused(tmp_path):
    path, other = texts(tmp_path / "a.jsonl", 20), texts(tmp_path / "b.jsonl", 9)
    state = json.loads(json.dumps(stream(DataConfig(path)).get_state()))
    for config, options, words in [
        (DataConfig(path), {"seed": 1}, "seed was 0 and is 1"),
        (DataConfig(path), {"batch_size": 3}, "batch_size was 2 and is 3"),
        (DataConfig(path), {"fingerprint": "abc"}, "tokenizer was  and is abc"),
        (DataConfig(path), {"process_count": 2}, "process_count was 1 and is 2"),
        (DataConfig(path, packing=False), {"length": 8}, "packing was True and is False; length"),
        (DataConfig((path, other)), {}, r"data 1 \(b.jsonl\) was None and is 1 files, "),
    ]:
        with pytest.raises(ValueError, match=words):
            stream(config, **options).set_state(state)
    same_rows = stream(DataConfig(path, workers=3))
    same_rows.set_state(state)
    (tmp_path / "b").mkdir()
    moved = (tmp_path / "a.jsonl").rename(tmp_path / "b" / "a.jsonl")
    stream(DataConfig(str(moved))).set_state(state)
    moved.write_text(moved.read_text().replace("003", "004"))
    with pytest.raises(ValueError, match=r"data 0 \(a.jsonl\) was 1 files, \d+ bytes, \w+ and is"):
        stream(DataConfig(str(moved))).set_state(state)


# Held-out data.


@pytest.mark.parametrize("processes", [1, 2])
def test_held_out_data_is_read_once_in_order(tmp_path, processes):
    path = texts(tmp_path / "a.jsonl", 23)
    expected = [row.text for row in sources.rows(path, DataConfig(path))]
    config = DataConfig(path, eval=path, packing=False, workers=2)
    found = [
        list(
            sources.eval_batches(
                config,
                letters,
                length=16,
                batch_size=4,
                process_index=index,
                process_count=processes,
            )
        )
        for index in range(processes)
    ]
    assert {len(part) for part in found} == {6 // processes}
    assert all(batch.inputs.shape == (4, 16) for part in found for batch in part)
    said = [text for part in found for batch in part for text in sequences(batch)]
    assert sorted(said) == sorted(expected)
    if processes == 1:
        assert said == expected
    few = sources.eval_batches(config, letters, length=16, batch_size=4, rows=5)
    assert [text for batch in few for text in sequences(batch)] == expected[:5]


def test_held_out_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", [CHATS[0], {"messages": []}, CHATS[1]])
    config = DataConfig(path, eval=path)
    assert [row.where[-2:] for row in sources.eval_rows(config, any_tokens)] == [":1", ":3"]
    (row,) = sources.eval_rows(config, any_tokens, 1)
    assert isinstance(row, ChatRow)
    assert isinstance(list(sources.rows(path, config))[1], Dropped)
    with pytest.raises(ValueError, match=r"data\.eval is not set"):
        sources.eval_rows(DataConfig(path), any_tokens)


def any_tokens(row):
    return Example(np.arange(3, dtype=np.int32), np.ones(3, bool), np.ones(3, np.float32))


def test_rows_to_answer_are_those_that_are_measured(tmp_path, caplog):
    """Of five rows one is malformed, one refused, one untrainable and one too long."""
    rows = [{"text": text} for text in (3, "a?", "!", "x" * 30, "abc")]
    path = write(tmp_path / "a.jsonl", rows)
    config = DataConfig(path, eval=path, malformed="drop", too_long="drop", max_length=16)
    with caplog.at_level("INFO", "jaxpost"):
        assert [row.text for row in sources.eval_rows(config, letters)] == ["abc"]
        ((_, report),) = sources.eval_stream(config, letters, length=16, batch_size=2)
    assert report.examples == 1
    assert report.dropped == {"malformed": 2, "no_good": 1, "too_long": 1}
    told, measured = caplog.messages
    assert told.startswith("data.eval: rows not asked: 2 malformed (")
    assert told.partition("asked: ")[2] == measured.partition("so far: ")[2]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: column text"):
        sources.eval_rows(DataConfig(path, eval=path), letters)


# Workers.


def test_an_error_in_a_worker_arrives(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": "abc"}] * 5 + [{"text": 3}])
    data = stream(DataConfig(path, workers=1, shuffle=False))
    with pytest.raises(ValueError, match=r"a\.jsonl:6: column text: expected text, got int 3"):
        next(data)


PROGRAM = """
import sys, numpy as np
from jaxpost.batch import Example
from jaxpost.data import sources

def letters(row):
    tokens = np.arange(len(row.text), dtype=np.int32)
    return Example(tokens, np.ones(len(tokens), bool), np.ones(len(tokens), np.float32))

if __name__ == "__main__":
    config = sources.DataConfig(sys.argv[1], workers=1)
    data = sources.batches(config, letters, length=8, batch_size=2, seed=0)
    next(data)
    print("ready", flush=True)
    input()
"""


def workers_of(process):
    """Its child processes but the tracker of shared resources."""
    children = []
    for thread in os.listdir(f"/proc/{process}/task"):
        with open(f"/proc/{process}/task/{thread}/children") as file:
            children += map(int, file.read().split())
    return [child for child in children if "spawn_main" in command(child)]


def command(process):
    with open(f"/proc/{process}/cmdline") as file:
        return file.read()


@pytest.mark.parametrize("number", [signal.SIGKILL, None])
def test_workers_end_with_the_program(tmp_path, number):
    """Also from a program that knows nothing of absl's flags."""
    path, program = texts(tmp_path / "a.jsonl", 20), tmp_path / "program.py"
    program.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(program), path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    workers = workers_of(process.pid)
    assert len(workers) == 1
    if number is None:
        assert process.communicate("\n", timeout=20) == ("", "")
        assert process.returncode == 0
    else:
        process.send_signal(number)
        process.communicate(timeout=20)
    for _ in range(100):
        if not any(os.path.exists(f"/proc/{worker}") for worker in workers):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker lives on")


def test_reading_data_loads_no_framework_but_grains():
    code = "import sys, jaxpost.data.sources; print([m for m in sys.modules if '.' not in m])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "'grain'" in loaded
    for name in ("torch", "tensorflow", "transformers", "datasets", "pandas"):
        assert f"'{name}'" not in loaded
