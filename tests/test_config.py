"""A configuration file is read strictly, by the declared types, and every slip is explained."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpost import config as configs
from jaxpost.commands import recipes
from jaxpost.config import names
from jaxpost.options import Range, option


@dataclasses.dataclass(frozen=True)
class LoRA:
    rank: int = option(16, "Rank of the adapter.")
    alpha: float = option(32.0)
    ranks: tuple[tuple[str, int], ...] = option(())


@dataclasses.dataclass(frozen=True)
class Model:
    path: str = option(help="A Hugging Face folder or hub id.")
    lora: LoRA | None = option(None, "Low-rank adapters; null trains every parameter.")


@dataclasses.dataclass(frozen=True)
class Data:
    train: str | tuple[str, ...] = option(help="The rows to train on.")
    max_length: int | None = option(None, "Longest row.", "tokens")
    mixture: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    name: Literal["adamw", "lion", "adafactor"] = option("adamw", "The update rule.")
    learning_rate: float = option(1e-5, "Peak learning rate.", "per step")
    weight_decay: float = option(0.0)
    nesterov: bool = option(False)

    def __post_init__(self):
        if self.name == "lion" and self.nesterov:
            raise ValueError("nesterov is a key of adamw; remove it or set name: adamw")


@dataclasses.dataclass(frozen=True)
class Config:
    model: Model
    data: Data
    run: str = option(help="The folder of this run.")
    steps: int = option(100, "Updates to make.", "updates")
    seed: int = option(0)
    optimizer: Optimizer = option(Optimizer(learning_rate=2e-5), "How parameters move.")
    stop: tuple[str, ...] = option(())
    window: int | float | str | None = option(None)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


RECIPES = {"sft": Config}
GOOD = """# Fine-tunes a tiny model.
# 12 % to 63 % in 4 minutes on two cores.

recipe: sft
model:
  path: models/tiny
data:
  train: [a.jsonl, "b c.jsonl"]
  mixture: {a: 1, b: 0.5}
run: runs/x  # a note
"""


@pytest.fixture
def load(tmp_path):
    def load(text: str, *overrides: str) -> Config:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        return configs.load(path, list(overrides), RECIPES)

    return load


@pytest.fixture
def problem(load, tmp_path):
    """The message of the error that a file and overrides give, with the folder left out."""

    def problem(text: str, *overrides: str) -> str:
        with pytest.raises(configs.ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value).replace(f"{tmp_path}/", "")

    return problem


def test_a_file_fills_its_recipes_dataclass(load):
    expected = Config(
        model=Model("models/tiny"),
        data=Data(("a.jsonl", "b c.jsonl"), mixture={"a": 1.0, "b": 0.5}),
        run="runs/x",
    )
    assert load(GOOD) == expected
    assert isinstance(load(GOOD).data.mixture["a"], float)


def test_overrides_are_typed_and_the_last_one_wins(load):
    config = load(
        GOOD,
        "optimizer.learning_rate=1e-6",
        "data.train=[a.jsonl,b.jsonl]",
        "model.lora={rank: 8}",
        "steps=1e3",
        "steps=2_000",
        "run=runs/y=z",
        "stop=['\\n', no]",
    )
    assert config.optimizer.learning_rate == 1e-6
    assert config.data.train == ("a.jsonl", "b.jsonl")
    assert config.model.lora == LoRA(rank=8)
    assert config.steps == 2000
    assert isinstance(config.steps, int)
    assert config.run == "runs/y=z"
    assert config.stop == ("\\n", "no")


def test_an_override_reaches_into_a_part_that_the_file_leaves_out_or_null(load):
    assert load(GOOD, "model.lora.rank=4").model.lora == LoRA(rank=4)
    with_lora = GOOD.replace("path: models/tiny", "path: models/tiny\n  lora: {rank: 2, alpha: 1}")
    assert load(with_lora, "model.lora.rank=4").model.lora == LoRA(4, 1.0)
    assert load(with_lora, "model.lora={rank: 8}").model.lora == LoRA(8)
    assert load(with_lora, "model.lora=null").model.lora is None
    assert load(with_lora, "model.lora=None").model.lora is None
    assert load(GOOD, "extra.a.b=1e-3").extra == {"a": {"b": 1e-3}}


def test_a_part_keeps_the_defaults_of_its_place_not_of_its_class(load):
    assert load(GOOD, "optimizer.weight_decay=0.1").optimizer == Optimizer(
        learning_rate=2e-5, weight_decay=0.1
    )


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-6", 1e-6),
        ("1E-6", 1e-6),
        ("2", 2.0),
        ("-3", -3.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1_000.5", 1000.5),
        ("+1e+2", 100.0),
        (".inf", math.inf),
        ("-inf", -math.inf),
    ],
)
def test_floats_however_they_are_written(load, written, value):
    assert load(GOOD, f"optimizer.learning_rate={written}").optimizer.learning_rate == value
    in_file = load(GOOD + f"optimizer:\n  learning_rate: {written}\n")
    assert in_file.optimizer.learning_rate == value


@pytest.mark.parametrize(
    ("written", "value"),
    [("12", 12), ("0x10", 16), ("0o17", 15), ("1e3", 1000), ("010", 10), ("-0", 0), ("2.0", 2)],
)
def test_integers_however_they_are_written(load, written, value):
    steps = load(GOOD, f"steps={written}").steps
    assert steps == value
    assert isinstance(steps, int)


@pytest.mark.parametrize("written", ["1.5", "true", "'12'", "1:30", "2024-01-02", "[1]", ".inf"])
def test_what_is_not_an_integer(problem, written):
    assert f"override steps={written}: steps: expected int, got " in problem(
        GOOD, f"steps={written}"
    )


@pytest.mark.parametrize(
    "written", ["no", "on", "12", "1e-6", "1:30", "2024-01-02", "true", "a: b"]
)
def test_text_stays_as_it_is_typed(load, written):
    assert load(GOOD, f"run={written}").run == written


@pytest.mark.parametrize("written", ["{% if a %}", "*.jsonl", "@x", "a: b: c"])
def test_an_override_that_is_no_yaml_is_text(load, written):
    assert load(GOOD, f"data.train={written}").data.train == written


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1),
        ("1.0", 1.0),
        ("1e3", 1000.0),
        ("a", "a"),
        ("'1'", "1"),
        ("null", None),
        ("~", None),
    ],
)
def test_a_union_takes_the_type_that_yaml_means(load, written, value):
    window = load(GOOD, f"window={written}").window
    assert window == value
    assert type(window) is type(value)


def test_an_error_names_file_line_key_value_and_type(problem):
    assert problem(GOOD + "steps: many\n") == "x.yaml:11: steps: expected int, got 'many'"
    bad = GOOD + "optimizer:\n  # fast\n  learning_rate: [1]\n"
    assert problem(bad) == "x.yaml:13: optimizer.learning_rate: expected float, got [1]"
    assert problem(GOOD, "data.mixture={a: x}") == (
        "override data.mixture={a: x}: data.mixture.a: expected float, got 'x'"
    )
    assert problem(GOOD, "stop=[a, [b]]") == (
        "override stop=[a, [b]]: stop[1]: expected text, got ['b']"
    )
    assert problem(GOOD, "model.lora={ranks: [[q_proj]]}").endswith(
        "model.lora.ranks[0]: expected [text, int], got ['q_proj']"
    )


def test_the_usual_slips_are_explained(problem):
    assert problem(GOOD, "optimizer.nesterov=yes").endswith("got 'yes' (write true or false)")
    assert problem(GOOD, "optimizer.learning_rate='1e-6'").endswith("(remove the quotes)")
    assert problem(GOOD, "stop=a").endswith("expected list of text, got 'a' (write [a])")
    assert problem(GOOD, "run=").endswith("got null (leave the key out to keep its default)")
    assert problem(GOOD, "optimizer.learning_rate=.nan").endswith("expected float, got '.nan'")


def test_a_choice_offers_the_nearest(problem):
    message = problem(GOOD, "optimizer.name=adamww")
    assert message.endswith(
        "expected one of adamw, lion, adafactor, got 'adamww'; did you mean adamw?"
    )


def test_every_problem_is_reported_at_once(problem):
    message = problem(GOOD.replace("run: runs/x  # a note", "setps: 3\nseed: x"))
    lines = message.splitlines()
    assert sorted(line.split(": ")[0] for line in lines) == ["x.yaml", "x.yaml:10", "x.yaml:11"]


@pytest.mark.parametrize(
    ("setting", "near"),
    [
        ("learning_rate=1", "optimizer.learning_rate"),  # right, but elsewhere
        ("optimizer.learnin_rate=1", "optimizer.learning_rate"),
        ("optimiser.learning_rate=1", "optimizer"),
        ("model.LoRA=null", "model.lora"),
        ("rank=3", "model.lora.rank"),
        ("data.weight_decay=1", "optimizer.weight_decay"),
        ("lr=1", "optimizer.learning_rate"),
        ("model.lora.rnak=1", "model.lora.rank or model.lora.ranks"),
        ("--step=1", "steps or stop"),
    ],
)
def test_an_unknown_key_gets_the_nearest_name(problem, setting, near):
    message = problem(GOOD, setting)
    assert "unknown key" in message
    assert message.endswith(f"; did you mean {near}?")


def test_an_unknown_key_with_nothing_near_says_only_that(problem):
    assert problem(GOOD + "zzqqx: 1\n") == "x.yaml:11: unknown key zzqqx"


def test_a_dotted_key_in_a_file_is_to_be_nested(problem):
    assert problem(GOOD + "optimizer.learning_rate: 1\n") == (
        "x.yaml:11: write optimizer.learning_rate nested: `optimizer:`, and under it "
        "`learning_rate:`"
    )


def test_a_missing_required_key_is_explained(problem):
    assert problem(GOOD.replace("run: runs/x", "seed: 1")) == (
        "x.yaml: the required key run (text) is missing: The folder of this run."
    )
    without_data = "recipe: sft\nrun: x\nmodel: {path: p}\n"
    assert problem(without_data).splitlines()[0] == (
        "x.yaml: the required key data.train (text or list of text) is missing: "
        "The rows to train on."
    )
    assert "key model.path (text) is missing" in problem("recipe: sft\n")


def test_a_key_written_twice_names_both_lines(problem):
    assert problem(GOOD + "run: runs/y\n") == ("x.yaml:11: the key run is already set at x.yaml:10")
    assert "the key path is already set at" in problem(GOOD, "model={path: a, path: b}")


def test_broken_yaml_names_the_line(problem):
    assert problem(GOOD + "stop: *x\n").startswith("x.yaml:11: not valid YAML: found undefined")
    assert problem("a: [1\nb: 2\n").startswith("x.yaml:2: not valid YAML")
    assert problem("a:\n\t- 1\n").startswith("x.yaml:2: not valid YAML")
    assert problem("- a\n") == "x.yaml:1: expected `key: value` lines, got ['a']"
    assert "not valid YAML" in problem("a: \x00\n")
    assert problem("recipe: sft\nrun: !!python/name:os.system x\n").startswith(
        "x.yaml:2: the YAML tag"
    )


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"recipe: \xff\n")
    with pytest.raises(configs.ConfigError, match=r"x.yaml: not UTF-8 text \(.* at byte 8\)"):
        configs.load(path, [], RECIPES)


def test_the_recipe_must_be_known(problem):
    assert problem("recipe: sfft\n") == (
        "x.yaml:1: recipe: expected one of sft, got 'sfft'; did you mean sft?"
    )
    assert problem("seed: 1\n") == "x.yaml: the required key recipe is missing; it is one of sft"
    assert "recipe is missing" in problem("")


def test_a_missing_file_offers_its_neighbours(tmp_path):
    (tmp_path / "sft_tiny.yaml").write_text(GOOD)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(GOOD)

    def message(name):
        with pytest.raises(configs.ConfigError) as caught:
            configs.load(tmp_path / name, [], RECIPES)
        return str(caught.value)

    assert message("sft_tinny.yaml").endswith(
        f"no such file; did you mean {tmp_path}/sft_tiny.yaml?"
    )
    assert message("sft_tiny").endswith(f"did you mean {tmp_path}/sft_tiny.yaml?")
    assert message("nowhere/x.yaml").endswith(f"there is no folder {tmp_path}/nowhere")
    assert message("run").endswith(f"is a folder; did you mean {run}/config.yaml?")


@pytest.mark.parametrize("setting", ["steps", "=3", "a..b=1", ".a=1"])
def test_what_is_no_override(problem, setting):
    assert "is not an override; write key=value" in problem(GOOD, setting)


def test_an_override_below_a_scalar_is_an_error(problem):
    assert problem(GOOD, "steps.x=1") == "override steps.x=1: steps: expected int, got {x: 1}"


def test_contradictions_found_by_the_class_are_configuration_errors(problem):
    assert problem(GOOD, "optimizer={name: lion, nesterov: true}").endswith(
        "optimizer: nesterov is a key of adamw; remove it or set name: adamw"
    )


# Ranges ---------------------------------------------------------------------------------------

MINIMAL = "recipe: {}\nrun: x\nmodel: {{path: m, lora: {{}}}}\ndata: {}\n"
REWARD = "reward: {function: a.b:c}\n"
FILES = "{train: t, eval: e}"
LEVELS = f"{{trajectory: {FILES}, suffix: {FILES}, group: {FILES}}}"


def numeric_keys(config_class: type, prefix: str = "") -> list[tuple[str, Range | None]]:
    """Every key that holds a number, by its dotted name, with its declared range."""
    found, hints = [], typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        hint, name = hints[field.name], prefix + field.name
        part = names.part_of(hint)
        if typing.get_origin(hint) is tuple:
            continue  # of several; the class itself looks at each
        if part is not None:
            found += numeric_keys(part, name + ".")
        elif {int, float} & {hint, *typing.get_args(hint)}:
            found.append((name, field.metadata.get("range")))
    return found


KEYS = [
    pytest.param(recipe, name, within, id=f"{recipe}-{name}")
    for recipe in recipes.RECIPES
    for name, within in numeric_keys(recipes.named(recipe).Config)
]


@pytest.mark.parametrize(("recipe", "name", "within"), KEYS)
def test_every_numeric_key_has_a_range_and_keeps_to_it(recipe, name, within, tmp_path):
    assert within is not None, f"{name} has no range: declare one with option(..., least=...)"
    path, config_class = tmp_path / "x.yaml", recipes.named(recipe).Config
    rewarded = any(field.name == "reward" for field in dataclasses.fields(config_class))
    files = LEVELS if recipe == "hpl" else FILES
    path.write_text(MINIMAL.format(recipe, files) + REWARD * rewarded)
    edge = within.above if math.isinf(within.least) else within.least - 1
    top = min(within.below, within.most + 1, 10**39)
    for number in (edge, top, 10**39):
        with pytest.raises(configs.ConfigError) as caught:
            configs.load(path, [f"{name}={number}"], {recipe: config_class})
        said = str(caught.value)
        assert said.startswith(f"override {name}={number}: {name} is ")
        assert f"; it must be {within}" in said
    for never in (".inf", "-.inf", ".nan"):
        with pytest.raises(configs.ConfigError, match=f"override {name}="):
            configs.load(path, [f"{name}={never}"], {recipe: config_class})


def test_numbers_at_the_ends_of_a_range():
    half_open = Range(least=0, below=1)
    assert [number in half_open for number in (-1, 0, 0.5, 1, math.nan)] == [0, 1, 1, 0, 0]
    assert [number in Range(above=0, most=1) for number in (0, 1e-9, 1, 1.5)] == [0, 1, 1, 0]
    assert math.inf not in Range(least=0)
    assert str(half_open) == "at least 0 and below 1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["batch_size=8", "microbatches=3"], "use one of [1, 2, 4, 8]"),
        (["steps=10", "optimizer.warmup=10"], "optimizer.warmup is 10 of 10 updates"),
        (["data.eval=null", "eval.generate=4"], "eval.generate needs data.eval"),
        (["data.eval=null", "eval.every=4"], "eval.every needs data.eval"),
        (["model.lora.targets=['(']"], "model.lora: LoRA target '(' is not a regular expression"),
        (["model.lora.targets=[x]"], "model.lora: LoRA target 'x' matches no projection"),
        (["model.dtype=int8"], "model.dtype: expected one of float32, bfloat16, float16"),
        (["model.compute_dtype=float64"], "one of float32, bfloat16, float16"),
    ],
)
def test_keys_that_contradict_each_other_are_configuration_errors(settings, said, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(MINIMAL.format("sft", FILES))
    with pytest.raises(configs.ConfigError) as caught:
        configs.load(path, settings, {"sft": recipes.named("sft").Config})
    assert said in str(caught.value)


TEXTS = st.text(max_size=8) | st.sampled_from(
    ["1e-6", "1", "no", "null", "None", "~", "true", ".inf", "", " a", "a: b", "#", "é\n", "1:30"]
)
FLOATS = st.floats(allow_nan=False)


@given(
    run=TEXTS,
    rate=FLOATS,
    steps=st.integers(),
    stop=st.lists(TEXTS, max_size=3),
    window=st.none() | st.integers() | FLOATS | TEXTS,
    extra=st.dictionaries(TEXTS, st.none() | st.booleans() | FLOATS | TEXTS, max_size=3),
    lora=st.none() | st.builds(LoRA, ranks=st.just((("q_proj", 4),))),
)
def test_what_is_written_is_read_back_exactly(
    tmp_path_factory, run, rate, steps, stop, window, extra, lora
):
    config = Config(
        model=Model("m", lora),
        data=Data("a.jsonl", mixture={"a": 1.0}),
        run=run,
        steps=steps,
        optimizer=Optimizer(learning_rate=rate),
        stop=tuple(stop),
        window=window,
        extra=extra,
    )
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(configs.to_yaml(config, "sft"), encoding="utf-8")
    assert configs.load(path, [], RECIPES) == config
    assert configs.from_dict(Config, configs.to_dict(config)) == config


def test_overrides_over_a_configuration_at_hand(load):
    config = load(GOOD, "model.lora={rank: 2}")
    changed = configs.override(config, ["model.lora.alpha=1", "steps=3"])
    assert changed.model.lora == LoRA(2, 1.0)
    assert dataclasses.replace(changed, steps=100, model=config.model) == config
    with pytest.raises(configs.ConfigError, match="unknown key stepps; did you mean steps"):
        configs.override(config, ["stepps=3"])


def test_the_recipe_written_is_the_module_of_the_class(load):
    name = Config.__module__.rpartition(".")[2]
    assert configs.to_yaml(load(GOOD)).splitlines()[0] == f"recipe: {name}"


def test_every_key_is_explained(load):
    page = str(configs.explain(Config))
    assert "steps  int  (default 100)  [updates]\n    Updates to make.\n" in page
    assert "run  text  required\n    The folder of this run.\n" in page
    assert "optimizer.learning_rate  float  (default 2.0e-05)  [per step]\n" in page
    assert "model.lora.rank  int  (default 16)\n    Rank of the adapter.\n" in page
    names = [key.name for key in configs.keys(Config)]
    assert "model.lora.rank" in names
    assert len(names) == len(set(names))


def test_explain_shows_what_a_file_sets(load):
    config = load(GOOD, "steps=7", "model.lora={rank: 8}")
    page = str(configs.explain(Config, config))
    assert "steps  int  = 7  (default 100)  [updates]\n" in page
    assert "run  text  = runs/x\n" in page
    assert "model.lora.rank  int  = 8  (default 16)\n" in page
    assert "seed  int  (default 0)\n" in page


def test_the_header_of_a_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(GOOD)
    assert configs.header(path) == [
        "Fine-tunes a tiny model.",
        "12 % to 63 % in 4 minutes on two cores.",
    ]
