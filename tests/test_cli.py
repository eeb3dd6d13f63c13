"""The command line: help, exit codes, errors without a traceback, and each verb on a tiny model."""

import os
import subprocess
import sys

import numpy as np
import pytest

from jaxpost import __main__ as cli
from jaxpost import batch as batches
from jaxpost.commands import compile_cache
from jaxpost.data import inspect


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxpost", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )


def test_help_lists_the_verbs_and_the_exit_codes(capsys):
    assert cli.main(["--help"]) == 0
    page = capsys.readouterr().out
    for said in (*cli.VERBS, "75 ", "resumable", "130 ", "JAXPOST_CACHE_DIR"):
        assert said in page


def test_without_a_verb_the_help_is_an_error(capsys):
    assert cli.main([]) == 2
    assert "usage: jaxpost" in capsys.readouterr().err


def test_an_unknown_verb_gets_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert said == "jaxpost: there is no verb 'trian'; did you mean train?\n"


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxpost 0.")


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "quickstart"])
def test_every_verb_has_help(verb, capsys):
    try:
        code = cli.main([verb, "--help"])
    except SystemExit as leaving:  # argparse
        code = leaving.code
    assert code == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxpost {verb}")


def test_the_module_is_the_command():
    done = run("trian")
    assert done.returncode == 2
    assert done.stderr == "jaxpost: there is no verb 'trian'; did you mean train?\n"


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m jaxpost --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""


# Errors --------------------------------------------------------------------------------------


def train(tmp_path, text, *overrides):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return cli.main(["train", str(path), *overrides])


def test_a_configuration_error_is_one_message_and_code_2(tmp_path, capsys):
    assert train(tmp_path, "recipe: sfft\n") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "x.yaml:1: recipe: expected one of" in said
    assert "did you mean sft?" in said


def test_a_missing_configuration_offers_its_neighbours(tmp_path, capsys):
    (tmp_path / "sft_tiny.yaml").write_text("recipe: sft\n")
    assert cli.main(["train", str(tmp_path / "sft_tinny.yaml")]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_overrides_before_the_file_are_explained(capsys):
    assert cli.main(["train", "steps=3", "x.yaml"]) == 2
    assert "the configuration file comes first" in capsys.readouterr().err


def test_train_help_lists_the_configurations_at_hand(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "sft_tiny.yaml").write_text(
        "# 12 % to 63 % in 4 minutes.\nrecipe: sft\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--help"]) == 0
    assert "configs/sft_tiny.yaml  12 % to 63 % in 4 minutes.\n" in capsys.readouterr().out


def test_our_own_messages_are_told_from_faults():
    def caught(function, *arguments):
        try:
            function(*arguments)
        except Exception as error:
            return error

    ours = caught(batches.best_fit_decreasing, [3], 2)
    assert cli.on_purpose(ours)
    assert cli.on_purpose(caught(open, "/nowhere/at/all"))
    assert not cli.on_purpose(caught(int, "x"))
    assert not cli.on_purpose(caught(batches.shift, 3))  # raised inside our code, not by it
    assert not cli.on_purpose(caught(np.reshape, np.ones(3), (2, 2)))


# The compile cache ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAXPOST_CACHE_DIR": "none"}, "None"),
        ({"JAXPOST_CACHE_DIR": "{tmp}/c"}, "{tmp}/c/xla/"),
        ({"XDG_CACHE_HOME": "{tmp}/x"}, "{tmp}/x/jaxpost/xla/"),
        ({"HOME": "{tmp}"}, "{tmp}/.cache/jaxpost/xla/"),
        ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/own"}, "{tmp}/own"),
        ({"JAXPOST_CACHE_DIR": "/proc/no"}, "None"),
    ],
)
def test_where_compiled_programs_are_kept(tmp_path, monkeypatch, environment, expected):
    import jax

    for name in ("JAXPOST_CACHE_DIR", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: jax.config.values[name] for name in names}
    try:
        folder = compile_cache.use_compile_cache()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert str(folder).startswith(expected.format(tmp=tmp_path))


def test_compiled_programs_are_found_again(tmp_path):
    code = (
        "from jaxpost.commands import compile_cache; import jax; folder = "
        "compile_cache.use_compile_cache(); print(jax.jit(lambda x: x * 3)(2.0)); "
        "print(len(list(folder.glob('*-cache'))))"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAXPOST_CACHE_DIR": str(tmp_path)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    said = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=environment
        )
        for _ in range(2)
    ]
    assert [done.stderr for done in said] == ["", ""]
    assert said[0].stdout.split() == said[1].stdout.split()
    assert int(said[0].stdout.split()[1]) >= 1


# A batch, shown ------------------------------------------------------------------------------


def example(said: str, mask: str, weight: float = 1.0) -> batches.Pairs:
    """A sequence of bytes; `mask` has a 1 for each byte that is trained."""
    tokens = np.frombuffer(said.encode(), np.uint8).astype(np.int32)
    trained = np.array([letter == "1" for letter in mask])
    weights = np.where(trained, weight, 0.0).astype(np.float32)
    return batches.shift(batches.Example(tokens, trained, weights))


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.fixture
def shown() -> batches.TokenBatch:
    packed = batches.row_of([example("hello", "00011"), example("a\nbé", "00111", 0.5)], 12)
    return batches.stack([packed, batches.row_of([example("xyz", "011")], 12)])


def test_trained_tokens_are_marked_and_characters_are_whole(shown):
    first = str(inspect.show_row(shown, 0, decode, plain=True)).splitlines()
    assert first[0] == (
        "row 0, sequence 1: places 0-3, positions 0-3, 2 of 4 targets trained, weights 2"
    )
    assert first[1] == "h|e|l⟦l|o⟧"
    assert first[2].startswith("row 0, sequence 2: places 4-7, positions 0-3, 3 of 4 targets")
    assert "\n".join(first[3:5]) == "a|↵\n⟦b|é⟧×0.5"
    assert first[5] == "row 0: 4 places of padding"


def test_bytes_that_make_no_character_are_one_piece_each(shown):
    broken = batches.stack(
        [batches.row_of([batches.Pairs(*3 * [np.array([97, 195, 98, 99])], np.ones(4))], 5)]
    )
    found = list(inspect.pieces(broken, 0, slice(0, 4), decode))
    assert [piece.ids for piece in found] == [(97,), (97,), (195,), (98,), (99,)]


def test_colours_hold_the_same_text(shown):
    page = inspect.show_row(shown, 0, decode)
    assert "hello" in str(page)
    assert {span.style for span in page.spans} >= {*inspect.CONTEXT, *inspect.TRAINED}
    assert inspect.WEIGHTED[0] in {span.style for span in page.spans}


def test_totals(shown):
    total = inspect.totals(shown)
    assert total == inspect.Totals(
        rows=2, length=12, sequences=3, tokens=10, trained=7, weights=5.5, shortest=2, longest=4
    )
    assert total.efficiency == 10 / 24


def test_the_table_of_places_holds_every_pair(shown):
    lines = inspect.positions_table(shown, 0, decode).splitlines()
    assert len(lines) == 1 + 8
    assert lines[4].split() == ["3", "1", "3", "1", "108", "'l'", "->", "111", "'o'"]
    assert lines[5].split()[:4] == ["4", "2", "0", "-"]
