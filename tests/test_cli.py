"""The command line: help, exit codes, errors without a traceback, and each verb on a tiny model."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxpost import __main__ as cli
from jaxpost import batch as batches
from jaxpost import config as configs
from jaxpost import hub, rewards, rollout
from jaxpost.commands import by_reward, compile_cache, inputs, models, recipes, usage
from jaxpost.data import chat, inspect, tokenizers
from jaxpost.recipes import setup

SLOW = pytest.mark.slow


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
    said = capsys.readouterr().err
    assert "usage: jaxpost" in said
    assert said.endswith("\njaxpost: name a verb, as in jaxpost quickstart\n")


def test_an_unknown_verb_gets_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert said == "jaxpost: there is no verb 'trian'; did you mean train?\n"


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxpost 0.")


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help(verb, capsys, monkeypatch):
    monkeypatch.setenv("JAXPOST_CACHE_DIR", "none")
    assert cli.main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxpost {verb}")


@pytest.mark.parametrize("verb", usage.PARSERS)
def test_help_needs_no_jax(verb):
    code = (
        "import sys; from jaxpost import __main__ as cli; "
        f"assert cli.main(['{verb}', '--help']) == 0; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


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
    assert cli.main(["train", str(tmp_path / "nope.yaml")]) == 2
    assert "no such file\n" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sample", "x", "--temprature", "1"], "did you mean --temperature?"),
        (["sample", "x", "--top-k", "many"], "argument --top-k: invalid int value: 'many'"),
        (["sample", "x", "--chat", "--prompt", "y"], "leave --prompt and --raw out"),
        (["sample", "x", "--max-tokens", "0"], "--max-tokens: it is 0; it must be at least 1"),
        (
            ["sample", "x", "--temperature", "nan"],
            "--temperature: it is nan; it must be at least 0",
        ),
        (
            ["sample", "x", "--seed", str(2**70)],
            "it must be at least 0, and no more than 2147483647",
        ),
        (["sample", "x", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["quickstart", "--scale", "0"], "--scale: it is 0.0; it must be above 0"),
        (["eval", "x", "y", "--rows", "0"], "--rows: it is 0; it must be at least 1"),
        (["eval", "x", "y", "--generate", "-1"], "--generate: it is -1; it must be at least 0"),
        (["eval", "x", "/nowhere/y.jsonl"], "DATA: /nowhere/y.jsonl: no such file"),
        (["convert", "x"], "the following arguments are required: TARGET"),
        (["inspect", "x.yaml", "--batch", "-1"], "--batch: it is -1; it must be at least 0"),
        (["inspect", "/nowhere/x.yaml"], "/nowhere/x.yaml: no such file"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(arguments, said, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("verb", ["sample", "convert", "eval"])
def test_a_model_that_is_not_there_is_one_message_and_code_1(verb, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')
    more = {"sample": ["--prompt", "x"], "eval": [str(tmp_path / "x.jsonl")]}
    assert cli.main([verb, str(tmp_path / "no"), *more.get(verb, ["x"])]) == 1
    error = capsys.readouterr().err
    assert "no such folder" in error
    assert "Traceback" not in error


def test_a_traceback_on_request(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main(["convert", str(tmp_path / "no"), "x", "--traceback"])


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
    assert first[0] == ("row 0 sequence 1: places 0-3, positions 0-3, trained 2 of 4, weights 2")
    assert first[1] == "h|e|l⟦l|o⟧"
    assert first[2].startswith("row 0 sequence 2: places 4-7, positions 0-3, trained 3 of 4")
    assert "\n".join(first[3:5]) == "a|↵\n⟦b|é⟧×0.5"
    assert first[5] == "row 0 padding: 4 places"


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


# Every verb on a tiny model ------------------------------------------------------------------

ARCHITECTURE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.3,
}
CONFIG = """# A tiny run.
recipe: sft
run: run
model: {path: tiny}
data: {train: chat.jsonl, eval: chat.jsonl, max_length: 96}
optimizer: {learning_rate: 1e-3}
steps: 2
batch_size: 2
checkpoint: {every: 1}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tiny model, chats, a configuration, and the run that it makes."""
    folder = tmp_path_factory.mktemp("cli")
    files = tokenizers.byte_tokenizer()
    size = tokenizers.load_tokenizer_from_files(files).vocab_size
    fresh = {"vocab_size": size, **ARCHITECTURE}
    hub.save_model(folder / "tiny", *hub.init_model(fresh, jax.random.key(0), files=files))
    chats = [(f"What is {a}+{a}?", f"{2 * a} é") for a in range(12)] + [("x" * 200, "long")]
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in chats
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "late.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]) + "{\n")
    (folder / "sft.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("JAXPOST_CACHE_DIR", "none")
        assert cli.main(["train", "sft.yaml"]) == 0
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """The folder, as the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAXPOST_CACHE_DIR", "none")
    return folder


def test_train_leaves_a_run_that_can_be_used(here, capsys):
    assert cli.main(["train", "sft.yaml"]) == 0
    assert "finished (step 2 of 2); nothing to do" in capsys.readouterr().err
    recipe, config = recipes.load("sft.yaml", [])
    assert recipes.load("run/config.yaml", []) == (recipe, config)


def test_a_finished_run_needs_its_data_no_more(here, capsys):
    Path("chat.jsonl").rename("gone.jsonl")
    try:
        assert cli.main(["train", "sft.yaml"]) == 0
        assert "nothing to do" in capsys.readouterr().err
        assert cli.main(["train", "sft.yaml", "steps=3"]) == 2
        assert "chat.jsonl" in capsys.readouterr().err
    finally:
        Path("gone.jsonl").rename("chat.jsonl")


def test_eval_says_which_rows_were_not_asked(here, caplog):
    command = ["eval", "run", "chat.jsonl", "--generate", "20", "--max-tokens", "2", "--json"]
    assert cli.main(command) == 0
    assert "rows not asked: 1" in caplog.text


def test_a_changed_configuration_is_refused_with_code_1(here, capsys):
    assert cli.main(["train", "sft.yaml", "optimizer.learning_rate=1", "steps=3"]) == 1
    assert "optimizer.learning_rate: 0.001 -> 1.0" in capsys.readouterr().err


def test_train_help_explains_the_keys_of_a_configuration(here, capsys):
    assert cli.main(["train", "sft.yaml", "steps=7", "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# A tiny run.\n")
    assert "steps  int, at least 1  = 7  (default 1000)  [updates]\n" in page
    assert "optimizer.learning_rate  float, above 0  = 0.001  (default 2.0e-05)\n" in page
    config_class = recipes.named("sft").Config
    for key in configs.keys(config_class):
        assert key.help, f"{key.name} has no help"


def test_every_key_of_every_recipe_has_help():
    for name in recipes.RECIPES:
        missing = [key.name for key in configs.keys(recipes.named(name).Config) if not key.help]
        assert missing == []


CONFIGURATIONS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_every_configuration_loads_and_says_what_it_reaches(path):
    recipe, config = recipes.load(str(path), [])
    assert isinstance(config, recipe.Config)
    assert path.stem.startswith(configs.to_dict(config)["recipe"])
    assert configs.header(path)


def test_help_comes_before_what_is_wrong_with_a_configuration(here, capsys):
    assert cli.main(["train", "sft.yaml", "setps=7", "--help"]) == 2
    said = capsys.readouterr()
    assert "steps  int, at least 1  (default 1000)" in said.out
    assert "did you mean steps?" in said.err


def test_a_stopped_run_leaves_with_75_and_goes_on(here):
    arguments = ["train", "sft.yaml", "run=stopped", "steps=100000", "data.eval=null"]
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxpost", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    metrics = here / "stopped" / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and metrics.stat().st_size:
            break
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    _, error = job.communicate(timeout=120)
    assert job.returncode == 75, error
    done = len(metrics.read_text().splitlines())
    assert cli.main([*arguments, f"steps={done + 1}"]) == 0
    assert len(metrics.read_text().splitlines()) == done + 1


def test_inspect_shows_the_batch_and_what_was_dropped(here, capsys):
    assert cli.main(["inspect", "sft.yaml", "batch_size=4", "--width", "200", "--rows", "4"]) == 0
    page = capsys.readouterr().out
    assert "chat.jsonl: 13 rows, type messages" in page
    assert "⟦" in page
    assert "|é|<|im_end|>⟧" in page
    assert "dropped so far: 1 too_long (chat.jsonl:13)" in page
    assert "4 rows of 96 places hold" in page
    assert "  too_long: longer than data.max_length" in page


def test_inspect_begins_with_the_counts_and_shows_a_few_rows(here, capsys):
    assert cli.main(["inspect", "sft.yaml", "batch_size=5", "--width", "200"]) == 0
    page = capsys.readouterr().out
    places = [page.index(said) for said in ("rows of 96", "dropped so far", "row 0", "row 2 seq")]
    assert places == sorted(places)
    assert "row 3 seq" not in page
    assert "2 more rows: --rows 5" in page


def test_inspect_says_why_nothing_is_left(here, capsys):
    Path("questions.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    assert cli.main(["inspect", "sft.yaml", "data.train=questions.jsonl"]) == 1
    found = capsys.readouterr()
    assert "empty_target: nothing to train on: no assistant's turn with words" in found.err
    assert (found.out + found.err).count("questions.jsonl: 1 rows") == 1


def test_a_hub_that_cannot_be_reached_is_told_alike_by_train_and_inspect(here, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "cache"))
    said = []
    for key in ("model.path", "model.tokenizer"):
        for verb in ("train", "inspect"):
            assert cli.main([verb, "sft.yaml", "run=never", f"{key}=no-such-owner/model"]) == 2
            said.append(capsys.readouterr().err)
    assert set(said) == {said[0]}
    assert "run `hf download no-such-owner/model --local-dir FOLDER`, and give FOLDER" in said[0]
    assert not (here / "never").exists()


def test_inspect_shows_one_row_as_a_table(here, capsys):
    assert cli.main(["inspect", "sft.yaml", "--row", "1", "--batch", "1", "--width", "200"]) == 0
    page = capsys.readouterr().out
    assert "row 1 sequence 1" in page
    assert "row 0" not in page
    assert "input -> target" in page
    assert "'é' -> " in page or "-> 259 '<|im_end|>'" in page


def test_inspect_refuses_a_row_that_is_not_there(here, capsys):
    assert cli.main(["inspect", "sft.yaml", "--row", "2"]) == 1
    assert "the batch has rows 0 to 1" in capsys.readouterr().err


def sampled(capsys, *arguments) -> str:
    assert cli.main(["sample", *arguments, "--max-tokens", "6"]) == 0
    return capsys.readouterr().out


def test_sample_is_what_the_model_says(here, capsys):
    said = sampled(capsys, "run", "--prompt", "hello", "--temperature", "0")
    opened = models.open_model("run")
    prompt = [{"role": "user", "content": "hello"}]
    text = opened.tokenizer.render(prompt, add_generation_prompt=True)
    expected = rollout.generate_text(
        opened.model,
        opened.params,
        opened.tokenizer,
        [opened.tokenizer.encode(text)],
        max_new_tokens=6,
    )
    assert said == expected[0] + "\n"
    assert sampled(capsys, "run/model", "--prompt", "hello", "--temperature", "0") == said


@pytest.mark.parametrize(
    ("arguments", "typed", "said"),
    [
        ([], "", "there is no prompt: standard input is empty; give --prompt TEXT"),
        (["--raw"], "\n", "there is no prompt"),
        (["--chat"], "", "nothing was said: --chat reads turns from standard input"),
    ],
)
def test_sample_without_a_word_is_wrong_usage(here, capsys, monkeypatch, arguments, typed, said):
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert cli.main(["sample", "tiny", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_sample_depends_on_its_seed_alone(here, capsys):
    first = sampled(capsys, "tiny", "--prompt", "hello", "--top-k", "50", "--seed", "3")
    assert sampled(capsys, "tiny", "--prompt", "hello", "--top-k", "50", "--seed", "3") == first
    assert sampled(capsys, "tiny", "--prompt", "hello", "--top-k", "50", "--seed", "4") != first


def test_sample_reads_standard_input_and_stops_at_text(here, capsys, monkeypatch):
    plain = sampled(capsys, "tiny", "--prompt", "ab", "--raw", "--temperature", "0")
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab"))
    assert sampled(capsys, "tiny", "--raw", "--temperature", "0") == plain
    stop = plain[1:3]
    cut = sampled(capsys, "tiny", "--prompt", "ab", "--raw", "--temperature", "0", "--stop", stop)
    assert cut == plain[: plain.index(stop)] + "\n"


def test_a_chat_remembers_until_it_is_reset(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nhi\n/reset\n/what\n\nhi\n/quit\nhi\n"))
    said = sampled(capsys, "tiny", "--chat", "--temperature", "0")
    first = sampled(capsys, "tiny", "--prompt", "hi", "--temperature", "0")
    turns = said.split("> hi\n")
    assert (turns[0], turns[1], turns[3]) == ("", first, f"{first}> /quit\n")
    assert turns[2] != f"{first}> /reset\n> /what\n> \n"  # the second has seen the first turn


def test_a_chat_too_long_for_the_model_says_so(here, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 300 + "\nhi\n"))
    assert cli.main(["sample", "tiny", "--chat", "--max-tokens", "2"]) == 0
    assert "the model takes 256 in all; /reset begins anew" in capsys.readouterr().err


def test_eval_measures_and_answers(here, capsys):
    command = ["eval", "run", "chat.jsonl", "--generate", "3", "--max-tokens", "2", "--json"]
    assert cli.main([*command, "--samples", "answers.jsonl"]) == 0
    said = capsys.readouterr()
    metrics = json.loads(said.out)
    logged = [
        json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert metrics["eval/loss"] == pytest.approx(logged[-1]["eval/loss"], rel=1e-6)
    assert metrics["eval/exact_match"] == 0.0
    assert "dropped 1 rows: too_long" in said.err
    assert len((here / "answers.jsonl").read_text().splitlines()) == 3


def test_eval_announces_the_rows_that_it_reads_and_fits_the_model(here, capsys, caplog):
    assert cli.main(["eval", "tiny", "chat.jsonl", "--rows", "5"]) == 0
    assert "13 rows, type messages\nthe first 5 rows\n" in capsys.readouterr().err
    assert "positions" not in caplog.text  # 256, and a row has room for 1024 by default


def test_eval_with_its_arguments_the_other_way_round_says_so(here, capsys):
    for model in ("tiny", "run"):
        assert cli.main(["eval", "chat.jsonl", model]) == 2
        assert (
            f"MODEL comes before DATA: jaxpost eval {model} chat.jsonl" in capsys.readouterr().err
        )


JUDGE = """
import json, pathlib

LOG = pathlib.Path(__file__).with_name("judged.jsonl")


def odd(completion, example):
    number = example["number"]
    with LOG.open("a") as file:
        file.write(json.dumps([number, completion]) + "\\n")
    return None if number == 3 else float(sum(map(ord, completion)) % 2)


def never(completion, example):
    raise OSError("the judge is out")
"""
RL = f"""recipe: grpo
run: rl
model: {{tokenizer: bytes, fresh: {json.dumps(ARCHITECTURE)}}}
data: {{train: asked.jsonl, eval: asked.jsonl}}
reward: {{function: judge.py:odd}}
rollout: {{prompts: 4, completions: 2, max_new_tokens: 4, temperature: 0.9}}
optimizer: {{learning_rate: 1e-2}}
steps: 1
eval: {{samples: 2}}
"""


@pytest.fixture
def judged(here):
    """The folder with prompts, a judge that notes what it is asked, and nothing noted yet."""
    rows = [{"prompt": f"{number} is", "number": number} for number in range(8)]
    (here / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "judge.py").write_text(JUDGE)
    (here / "judged.jsonl").unlink(missing_ok=True)
    return here


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def is_odd(text):
    return sum(map(ord, text)) % 2 == 1


def test_eval_by_a_reward_is_what_one_counts_by_hand(judged, capsys):
    command = ["eval", "tiny", "asked.jsonl", "--reward", "judge.py:odd", "--max-tokens", "4"]
    more = ["--completions", "3", "--temperature", "0.8", "eval.pass_at=[1,2]", "--json"]
    assert cli.main([*command, *more, "--samples", "written.jsonl"]) == 0
    said = capsys.readouterr()
    metrics, written = json.loads(said.out), lines("written.jsonl")

    model, params = hub.load_model("tiny")
    tokenizer = tokenizers.load_tokenizer("tiny")
    prompts = [[tokenizer.bos_id, *tokenizer.encode(f"{number} is")] for number in range(8)]
    greedy = rollout.generate_text(
        model, params, tokenizer, prompts, max_new_tokens=4, temperature=0.0
    )
    assert [one["completion"] for one in written] == greedy
    right = [is_odd(text) for number, text in enumerate(greedy) if number != 3]
    assert 0 < sum(right) < 7
    assert metrics["eval/accuracy"] == pytest.approx(sum(right) / 7)
    assert metrics["eval/reward"] == pytest.approx(sum(right) / 7)
    assert metrics["eval/missing"] == 1
    assert [one["reward"] for one in written] == [
        None if number == 3 else float(is_odd(text)) for number, text in enumerate(greedy)
    ]
    assert "no reward for 1 of 8: none 1\n" in said.err

    asked = lines("judged.jsonl")
    assert len(asked) == 8 * (1 + 3)
    for number, text in enumerate(greedy):
        asked.remove([number, text])  # what is left was sampled
    rows = [[is_odd(text) for number, text in asked if number == n] for n in range(8) if n != 3]
    # Of 3 with c right, 2 at random are both wrong in C(3 - c, 2) of 3 cases.
    two = [1 - {0: 3, 1: 1, 2: 0, 3: 0}[sum(row)] / 3 for row in rows]
    assert metrics["eval/pass@1"] == pytest.approx(np.mean(rows))
    assert metrics["eval/pass@2"] == pytest.approx(np.mean(two))
    assert metrics["eval/pass@3"] == pytest.approx(np.mean([any(row) for row in rows]))
    assert metrics["eval/missing_samples"] == 3
    assert "pass@k: 3 completions of each at temperature 0.8\n" in said.err


@pytest.mark.parametrize("recipe", ["grpo", *(pytest.param(r, marks=SLOW) for r in ("ppo", "pmd"))])
def test_a_run_by_a_reward_is_measured_by_its_own(recipe, judged, capsys):
    """Its last evaluation is found again; and what `convert` reads is what it exported."""
    text = RL.replace("grpo", recipe).replace("run: rl", f"run: rl_{recipe}")
    (judged / "rl.yaml").write_text(text + ("tau: 0.1\n" if recipe == "pmd" else ""))
    assert cli.main(["train", "rl.yaml"]) == 0
    capsys.readouterr()
    run = f"rl_{recipe}"
    assert cli.main(["eval", run, "asked.jsonl", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    last = {k: v for k, v in lines(f"{run}/metrics.jsonl")[-1].items() if k.startswith("eval/")}
    assert {name: metrics[name] for name in last} == pytest.approx(last)
    assert metrics.keys() - last.keys() == {"eval/pass@2"}
    opened = models.open_model(run)
    options = usage.eval().parse_args([run, "asked.jsonl", "rollout.max_new_tokens=2"])
    settings = by_reward.read_settings(opened, options)
    assert (settings.rollout.max_new_tokens, settings.rollout.temperature) == (2, 0.9)
    assert opened.chat == chat.ChatOptions()
    other = rewards.RewardConfig(model="some/judge", workers=3)
    opened = opened._replace(config=dataclasses.replace(opened.config, reward=other))
    options = usage.eval().parse_args([run, "asked.jsonl", "--reward", "judge.py:never"])
    judge = by_reward.read_settings(opened, options).reward
    assert judge == rewards.RewardConfig("judge.py:never", workers=3)
    assert cli.main(["convert", run, f"{run}_converted"]) == 0
    exported = (judged / run / "model" / "model.safetensors").read_bytes()
    assert (judged / f"{run}_converted" / "model.safetensors").read_bytes() == exported


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["asked.jsonl", "--reward", "judge.py:od"], 2, "judge.py has no od; did you mean odd?"),
        (["asked.jsonl", "--reward", "no.module:f"], 2, "no.module:f: there is no module no"),
        (["asked.jsonl", "--reward", "judge.py"], 2, "'judge.py' is not an import path"),
        (["text.jsonl", "--reward", "judge.py:odd"], 2, "text.jsonl"),
        (["empty.jsonl", "--reward", "judge.py:odd"], 2, "empty.jsonl: data.eval holds no prompt"),
        (["asked.jsonl", "--reward", "judge.py:never"], 1, "has a reward (error: OSError: the jud"),
        (["asked.jsonl", "--reward", "judge.py:odd", "rollout.top=2"], 2, "rollout.top_k"),
        (["asked.jsonl", "--reward", "judge.py:odd", "--generate", "2"], 2, "leave it out"),
        (["asked.jsonl", "--reward", "judge.py:odd", "--temperature", "2"], 2, "give --complet"),
        (["chat.jsonl", "--completions", "2"], 2, "--completions needs --reward"),
        (["chat.jsonl", "--samples", "x.jsonl"], 2, "--samples needs --generate or --reward"),
    ],
)
def test_eval_by_a_reward_says_what_is_wrong(arguments, code, said, judged, capsys):
    (judged / "text.jsonl").write_text('{"text": "no prompt"}\n')
    (judged / "empty.jsonl").write_text('{"prompt": ""}\n')
    assert cli.main(["eval", "tiny", *arguments, "--rows", "2"]) == code
    assert said in capsys.readouterr().err
    assert not Path("x.jsonl").exists()


def test_weights_that_are_not_finite_are_never_used(here, capsys):
    hub.convert("tiny", "spoilt")
    path = here / "spoilt" / "model.safetensors"
    arrays = dict(safetensors.numpy.load_file(path))
    arrays["model.norm.weight"] = np.full_like(arrays["model.norm.weight"], np.nan)
    safetensors.numpy.save_file(arrays, path)
    for command in (["sample", "spoilt", "--prompt", "a"], ["eval", "spoilt", "chat.jsonl"]):
        assert cli.main(command) == 1
        assert "model.safetensors: tensor model.norm.weight holds 16" in capsys.readouterr().err
    assert cli.main(["convert", "spoilt", "no"]) == 1
    assert not (here / "no").exists()


# A model and a tokenizer, a run and its data --------------------------------------------------


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_everywhere(here, capsys):
    config = {**ARCHITECTURE, "vocab_size": 100}
    files = tokenizers.byte_tokenizer()
    hub.save_model("narrow", *hub.init_model(config, jax.random.key(0), files=files))
    fresh = [f"model.fresh={json.dumps(config)}", "model.path=null", "model.tokenizer=bytes"]
    commands = [
        (2, ["train", "sft.yaml", "run=never", "model.path=narrow"]),
        (2, ["train", "sft.yaml", "run=never", *fresh]),
        (2, ["inspect", "sft.yaml", "model.path=narrow"]),
        (2, ["inspect", "sft.yaml", *fresh]),
        (1, ["eval", "narrow", "chat.jsonl"]),
        (1, ["sample", "narrow", "--prompt", "a"]),
        (1, ["convert", "narrow", "no"]),
    ]
    for code, command in commands:
        assert cli.main(command) == code, command
        said = capsys.readouterr().err
        assert "the tokenizer has 260 ids, and " in said
        assert "a vocabulary of 100; use the model's own tokenizer" in said
    assert not (here / "never").exists()
    assert not (here / "no").exists()


def test_an_added_token_that_nothing_else_needs_is_only_warned_of(caplog):
    files = tokenizers.byte_tokenizer()
    content = json.loads(files["tokenizer.json"])
    image = {**content["added_tokens"][0], "id": 260, "content": "<image>"}
    content["added_tokens"].append(image)
    more = {**files, "tokenizer.json": json.dumps(content).encode()}
    tokenizer = tokenizers.load_tokenizer_from_files(more)
    assert tokenizer.vocab_size == 261
    setup.check_vocabulary(tokenizer, 261, "m")
    assert caplog.text == ""
    setup.check_vocabulary(tokenizer, 260, "m")
    assert "a text that holds <image> cannot be read" in caplog.text
    with pytest.raises(ValueError, match="261 ids, and m a vocabulary of 259"):
        setup.check_vocabulary(tokenizer, 259, "m")


def test_where_the_model_cannot_be_written_is_found_before_training(here, capsys):
    (here / "other" / "model").mkdir(parents=True)
    (here / "other" / "model" / "mine.txt").write_text("mine")
    (here / "another").mkdir()
    (here / "another" / "model").write_text("a file")
    for run, said in (
        ("other", "run: the trained model goes to"),
        ("another", "is a file; give a folder"),
        ("run", "run: run/model is model.path, and training would write over it"),
    ):
        model = "run/model" if run == "run" else "tiny"
        assert cli.main(["train", "sft.yaml", f"run={run}", f"model.path={model}"]) == 2
        assert said in capsys.readouterr().err
    assert (here / "other" / "model" / "mine.txt").read_text() == "mine"
    assert not (here / "other" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.train=chats.jsonl", "data.train: chats.jsonl: no such file or folder"),
        ("data.train=sft.yaml", "data.train: sft.yaml: not a type of file that is read"),
        ("data.eval=late.jsonl", "data.eval: late.jsonl:3: not JSON"),
        ("data.eval=[chat.jsonl,no/*.jsonl]", "data.eval: no/*.jsonl: no file matches"),
        ("data.train={chat.jsonl: 1, no: 2}", "data.train: no: no such file or folder"),
        ("model.path=./tniy", "model: ./tniy: no such folder"),
        ("model.tokenizer=./tniy", "no such tokenizer folder or file, and not a hub id"),
        ("model.adapter=tniy", "model: tniy: no such"),
        ("steps=0", "steps is 0; it must be at least 1"),
    ],
)
def test_what_is_not_there_is_found_before_a_run_is_begun(here, capsys, setting, said):
    assert cli.main(["train", "sft.yaml", "run=never", setting]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "never").exists()


def test_rows_longer_than_the_model_are_warned_of(here, caplog):
    assert cli.main(["eval", "tiny", "chat.jsonl", "data.max_length=256"]) == 0
    assert "positions" not in caplog.text
    assert cli.main(["eval", "tiny", "chat.jsonl", "data.max_length=257"]) == 0
    assert "data.max_length is 257, and the model was made for 256 positions" in caplog.text
    caplog.clear()
    _, config = recipes.load("sft.yaml", ["data.max_length=300"])
    inputs.check(config)
    assert "Set data.max_length=256, or raise max_position_embeddings" in caplog.text


def test_convert_overwrites_on_request_only_and_never_its_source(here, capsys):
    hub.convert("tiny", "taken", dtype="bfloat16")
    before = (here / "taken" / "model.safetensors").read_bytes()
    assert cli.main(["convert", "tiny", "taken"]) == 2
    assert "taken is not empty; choose another folder, or give --overwrite" in (
        capsys.readouterr().err
    )
    assert (here / "taken" / "model.safetensors").read_bytes() == before
    assert cli.main(["convert", "tiny", "taken", "--overwrite"]) == 0
    assert (here / "taken" / "model.safetensors").read_bytes() != before
    for source, target in (("tiny", "./tiny"), ("run", "run"), ("run", "run/checkpoints/a")):
        assert cli.main(["convert", source, target, "--overwrite"]) == 2
        assert "the source" in capsys.readouterr().err


def test_eval_takes_keys_of_the_data(here, capsys):
    assert cli.main(["eval", "tiny", "chat.jsonl", "data.max_length=4"]) == 1
    assert "dropped, which is all" in capsys.readouterr().err
    assert cli.main(["eval", "tiny", "chat.jsonl", "data.max_lengths=4"]) == 2
    assert "did you mean data.max_length?" in capsys.readouterr().err
    assert cli.main(["eval", "tiny", "chat.jsonl"]) == 0
    assert "perplexity" in capsys.readouterr().out


def test_convert_writes_what_the_run_exported(here):
    assert cli.main(["convert", "run", "out"]) == 0
    for file in (here / "run" / "model").iterdir():
        assert (here / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def test_convert_takes_an_earlier_step_and_another_type(here):
    assert cli.main(["convert", "run", "earlier", "--step", "1", "--dtype", "bfloat16"]) == 0
    _, params = hub.load_model(here / "earlier")
    assert params["embedding"].dtype == jax.numpy.bfloat16
    expected = models.open_model("run", step="1", dtype="bfloat16").params["embedding"]
    np.testing.assert_array_equal(params["embedding"], expected)


def test_adapters_convert_by_every_way(here, capsys):
    lora = ["run=lora", "model.lora={rank: 2}", "ema_decay=0.5", "data.eval=null"]
    assert cli.main(["train", "sft.yaml", *lora]) == 0
    assert cli.main(["convert", "lora", "from_run"]) == 0
    assert cli.main(["convert", "lora/adapter", "from_adapter", "--base", "tiny"]) == 0
    assert cli.main(["convert", "tiny", "from_base", "--adapter", "lora/adapter"]) == 0
    weights = {
        name: (here / name / "model.safetensors").read_bytes()
        for name in ("lora/model", "from_run", "from_adapter", "from_base")
    }
    assert len(set(weights.values())) == 1
    assert cli.main(["convert", "tiny", "no", "--base", "tiny", "--adapter", "lora/adapter"]) == 1
    assert "leave --adapter out" in capsys.readouterr().err


def test_pretraining_and_its_batches(here, capsys):
    texts = [{"text": "one two three " * 4}] * 8
    (here / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    (here / "pretrain.yaml").write_text(
        "recipe: pretrain\nrun: pretrain\nmodel:\n  tokenizer: bytes\n  fresh: "
        + json.dumps(ARCHITECTURE)
        + "\ndata: {train: text.jsonl, max_length: 64}\nsteps: 2\nbatch_size: 2\n"
    )
    assert cli.main(["inspect", "pretrain.yaml"]) == 0
    assert "⟦" in capsys.readouterr().out
    assert cli.main(["train", "pretrain.yaml"]) == 0
    assert sampled(capsys, "pretrain", "--prompt", "one", "--raw")
