"""Recipes from configuration to exported model, on models of a few thousand parameters.

What is held here: a run that was killed and resumed is the run that was not, byte for byte; both
recipes learn what their data teaches; every switch of the objective does what its name says; what
is exported is what was trained.
"""

import dataclasses
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import yaml

from jaxpost import batch as batches
from jaxpost import checkpoint, hub, models, optimizers, runs, train_step, writer
from jaxpost import config as configs
from jaxpost.data import chat, sources, tokenizers
from jaxpost.recipes import evaluation, pretrain, quickstart, setup, sft

TINY = tiny.TINY | {"max_position_embeddings": 128}
WORDS = ("red ", "green ", "blue ", "yellow ")
LETTERS = "abcdefgh"


@pytest.fixture(scope="module", autouse=True)
def cache(compiled):
    """Where all runs of this file, in this process and in others, keep compiled programs."""
    return compiled


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """`words.jsonl`: text of four words. `copy.jsonl`, `copy_held_out.jsonl`: 'abc=' → 'abc'."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    texts = [{"text": "".join(rng.choices(WORDS, k=rng.randint(2, 12)))} for _ in range(200)]
    write(folder / "words.jsonl", texts[:160])
    write(folder / "words_held_out.jsonl", texts[160:])
    triples = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    rng.shuffle(triples)
    rows = [{"prompt": f"{triple}=", "completion": triple} for triple in triples]
    write(folder / "copy.jsonl", rows[:448])
    write(folder / "copy_held_out.jsonl", rows[448:])
    write(
        folder / "reasoning.jsonl",
        [{"prompt": f"{t}=", "reasoning": f"{t[0]} {t[1]}", "answer": t[2]} for t in triples[:40]],
    )
    return folder


def write(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(run, train, *, rate=3e-3, optimizer="adamw", **changes) -> sft.Config:
    """A small run; what belongs to its data goes there, the rest to the recipe."""
    names = {"max_length": 64, "packing": True, "workers": 0, "window": 16}
    of_data = {name: changes.pop(name, default) for name, default in names.items()}
    if not of_data["packing"]:
        del of_data["window"]
    given = {
        "model": setup.ModelConfig(fresh=TINY, tokenizer="bytes"),
        "batch_size": 4,
        "checkpoint": checkpoint.CheckpointConfig(every=0),
        "data": sources.DataConfig(
            train=str(train), eval=changes.pop("eval_data", None), **of_data
        ),
        "optimizer": optimizer
        if isinstance(optimizer, optimizers.OptimizerConfig)
        else optimizers.OptimizerConfig(name=optimizer, learning_rate=rate, schedule="constant"),
    }
    recipe = changes.pop("recipe", sft)
    return recipe.Config(run=str(run), **{**given, **changes})


def metrics_of(run) -> list[dict]:
    """What was recorded, but for what depends on the clock."""
    lines = (Path(run) / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in writer.WALL_CLOCK}
        for line in lines
    ]


def values_of(run, name: str) -> list[float]:
    return [record[name] for record in metrics_of(run) if name in record]


def weights_of(run) -> dict[str, np.ndarray]:
    model, params = hub.load_model(Path(run) / "model")
    del model
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def start_of(config: sft.Config) -> tuple[setup.Policy, batches.TokenBatch]:
    """The policy before, and the data of, the first update."""
    policy = setup.load_policy(config.model, jax.random.key(config.seed))
    return policy, next(sft.make_data(config, policy.tokenizer))[0]


# Stopped and resumed ---------------------------------------------------------------------------


def launch(folder: Path, cache: Path, config: sft.Config, *harms: str) -> list[int]:
    """Exit codes of `jaxpost train`, once for each harm, each in a process of its own."""
    path = folder / f"{Path(config.run).name}.yaml"
    recipe = "pretrain" if isinstance(config, pretrain.Config) else "sft"
    path.write_text(yaml.safe_dump({"recipe": recipe, **configs.to_dict(config)}))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAXPOST_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("recipe_run.py")), str(path), *harms],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("child ")]
    assert len(lines) == len(harms), done.stdout + done.stderr
    return [int(line.split()[-1]) for line in lines]


def resumable(run, data, **changes) -> sft.Config:
    every_4 = checkpoint.CheckpointConfig(every=4)
    eval_data = str(data / "words_held_out.jsonl")
    return config_of(
        run,
        data / "words.jsonl",
        steps=20,
        checkpoint=every_4,
        eval_data=eval_data,
        eval=evaluation.EvalConfig(every=6, batch_size=4),
        neftune_alpha=5.0,
        ema_decay=0.9,
        **changes,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory, data, cache):
    """A run of 20 updates that nothing disturbed."""
    folder = tmp_path_factory.mktemp("straight")
    config = resumable(folder / "run", data)
    assert launch(folder, cache, config, "none") == [0]
    return folder / "run"


def same_run(one, other) -> None:
    names = ("model/model.safetensors", "samples.jsonl")
    for name in names:
        if (Path(one) / name).exists():
            assert (Path(one) / name).read_bytes() == (Path(other) / name).read_bytes()
    assert metrics_of(one) == metrics_of(other)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path, data, cache, straight, workers):
    """SIGKILL while step 12 is saved in the background: the run goes on from step 8."""
    config = resumable(tmp_path / "run", data, workers=workers)
    assert launch(tmp_path, cache, config, "kill:12", "none") == [-9, 0]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "resuming from step 8 of 20" in log
    same_run(tmp_path / "run", straight)
    assert [record["step"] for record in metrics_of(straight) if "loss" in record] == list(
        range(1, 21)
    )


def test_a_run_that_is_asked_to_stop_resumes_to_the_same_bytes(tmp_path, data, cache, straight):
    """SIGTERM ends it with code 75; a start of the finished run changes no file."""
    config = resumable(tmp_path / "run", data)
    assert launch(tmp_path, cache, config, "term:8", "none") == [75, 0]
    same_run(tmp_path / "run", straight)
    before = contents(tmp_path / "run")
    assert launch(tmp_path, cache, config, "none") == [0]
    assert contents(tmp_path / "run") == before


class StoppedAt3And6(evaluation.EvalConfig):
    """Asked to stop at the steps at which it evaluates."""

    def due(self, step: int, steps: int) -> bool:
        if step in (3, 6):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().due(step, steps)


def test_a_run_stopped_where_it_evaluates_measures_the_same(tmp_path, data):
    """At step 3 and at the last one; the best checkpoint is known by its metric."""

    def config(name: str, eval_config: evaluation.EvalConfig) -> sft.Config:
        return config_of(
            tmp_path / name,
            data / "words.jsonl",
            steps=6,
            checkpoint=checkpoint.CheckpointConfig(every=3, keep_last=1, keep_best=1),
            eval_data=str(data / "words_held_out.jsonl"),
            eval=eval_config,
        )

    assert sft.train(config("straight", evaluation.EvalConfig(every=3, rows=8))) == 0
    stopped = config("stopped", StoppedAt3And6(every=3, rows=8))
    steps = []
    for code in (75, 75, 0):
        assert sft.train(stopped) == code
        steps.append(checkpoint.list_steps(Path(stopped.run) / "checkpoints")[-1])
    assert steps == [3, 6, 6]
    assert [len(values_of(tmp_path / n, "eval/loss")) for n in ("straight", "stopped")] == [3, 3]
    same_run(tmp_path / "stopped", tmp_path / "straight")


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Learning --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copying(tmp_path_factory, data):
    """SFT on three letters to be repeated."""
    run = tmp_path_factory.mktemp("copying") / "run"
    config = config_of(
        run,
        data / "copy.jsonl",
        eval_data=str(data / "copy_held_out.jsonl"),
        model=setup.ModelConfig(fresh={**TINY, "hidden_size": 64}, tokenizer="bytes"),
        batch_size=8,
        steps=250,
        rate=1e-2,
        eval=evaluation.EvalConfig(generate=64, max_new_tokens=5, batch_size=16),
        log=writer.WriterConfig(every=50),
    )
    assert sft.train(config) == 0
    return config


def test_sft_learns_a_rule_that_holds_for_rows_it_has_not_seen(copying):
    losses = values_of(copying.run, "eval/loss")
    matches = values_of(copying.run, "eval/exact_match")
    assert losses[0] > math.log(256) - 1  # it knows nothing of bytes yet
    assert losses[-1] < 0.2
    assert matches[0] == 0.0
    assert matches[-1] > 0.9
    samples = [json.loads(line) for line in (Path(copying.run) / "samples.jsonl").open()]
    assert all(s["correct"] == (s["completion"] == s["expected"]) for s in samples)


def test_pretraining_gets_below_the_entropy_of_its_letters(tmp_path, data):
    config = config_of(
        tmp_path / "run",
        data / "words.jsonl",
        recipe=pretrain,
        eval_data=str(data / "words_held_out.jsonl"),
        steps=60,
        rate=1e-2,
    )
    assert pretrain.train(config) == 0
    held_out = [json.loads(line)["text"] for line in (data / "words_held_out.jsonl").open()]
    letters = "".join(held_out)
    shares = np.array([letters.count(letter) for letter in sorted(set(letters))]) / len(letters)
    entropy = -np.sum(shares * np.log(shares))  # 2.3 nats; 0.26 with all of its order
    losses = values_of(config.run, "eval/loss")
    assert losses[0] > entropy + 2
    assert losses[-1] < entropy - 1
    assert not any("eval/exact_match" in record for record in metrics_of(config.run))


def test_what_is_exported_is_what_was_trained(copying):
    """The folder loads by path alone, and computes the logits of the last checkpoint."""
    folder = Path(copying.run) / "model"
    model, params = hub.load_model(folder)
    policy = setup.load_policy(copying.model, jax.random.key(copying.seed))
    last = checkpoint.find_checkpoint(copying.run)
    trained = checkpoint.load_params(last, policy.params)
    tokenizer = tokenizers.load_tokenizer(folder)
    tokens = jnp.array([tokenizer.encode("abc=abc")])
    np.testing.assert_array_equal(
        models.logits(model, params, tokens), models.logits(policy.model, trained, tokens)
    )
    assert tokenizer.encode("abc=") == policy.tokenizer.encode("abc=")
    assert tokenizer.fingerprint == policy.tokenizer.fingerprint


# The objective ---------------------------------------------------------------------------------


def first_loss(tmp_path, data, **changes) -> tuple[float, sft.Config]:
    config = config_of(tmp_path / "run", data / "copy.jsonl", steps=2, **changes)
    assert sft.train(config) == 0
    return values_of(config.run, "loss")[0], config


def reference(config: sft.Config):
    """logps, log-normalizers and normalised weights of the first update, the plain way."""
    policy, batch = start_of(config)
    logits = models.logits(
        policy.model,
        policy.params,
        batch.inputs,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
    )
    normalizers = np.asarray(jax.nn.logsumexp(logits, axis=-1), np.float64)
    chosen = np.take_along_axis(np.asarray(logits), np.asarray(batch.targets)[..., None], 2)[..., 0]
    weights = np.asarray(batch.loss_weights, np.float64)
    return chosen - normalizers, normalizers, weights / weights.sum()


def test_the_first_loss_is_the_mean_over_trained_tokens(tmp_path, data):
    loss, config = first_loss(tmp_path, data)
    logp, _, weights = reference(config)
    assert loss == pytest.approx(-np.sum(weights * logp), rel=1e-5)


def test_dft_and_z_loss_are_in_the_loss(tmp_path, data):
    loss, config = first_loss(tmp_path, data, loss="dft", z_loss=0.1)
    logp, normalizers, weights = reference(config)
    expected = np.sum(weights * (-np.exp(logp) * logp + 0.1 * normalizers**2))
    assert loss == pytest.approx(expected, rel=1e-5)


def test_reasoning_has_its_own_weight(tmp_path, data):
    config = config_of(
        tmp_path / "run",
        data / "reasoning.jsonl",
        steps=2,
        chat=chat.ChatOptions(reasoning_weight=0.5),
        eval_data=str(data / "reasoning.jsonl"),
        eval=evaluation.EvalConfig(generate=2, max_new_tokens=4),
    )
    assert sft.train(config) == 0
    _, batch = start_of(config)
    assert set(np.unique(batch.loss_weights)) == {0.0, 0.5, 1.0}
    logp, _, weights = reference(config)
    assert values_of(config.run, "loss")[0] == pytest.approx(-np.sum(weights * logp), rel=1e-5)
    samples = [json.loads(line) for line in (Path(config.run) / "samples.jsonl").open()]
    assert {len(sample["expected"]) for sample in samples} == {1}  # the answer without its reasons


def test_neftune_adds_noise_of_the_size_of_each_sequence(tmp_path, data):
    """±alpha / sqrt(L · D), other noise in each row and step, none where alpha is 0."""
    loss, config = first_loss(tmp_path, data, neftune_alpha=5.0)
    logp, _, weights = reference(config)
    assert loss != pytest.approx(-np.sum(weights * logp), rel=1e-4)
    policy, batch = start_of(config)
    noise = np.asarray(sft.neftune(config, policy.model, sft.make_batch(batch, jax.random.key(1))))
    row = np.asarray(batch.segment_ids)[0]
    for segment in set(row.tolist()) - {0}:
        here = noise[0][row == segment]
        bound = 5.0 / math.sqrt(len(here) * TINY["hidden_size"])
        assert 0.95 * bound < np.abs(here).max() <= bound
    assert not np.array_equal(noise[0], noise[1])


def test_microbatches_do_not_change_the_update(tmp_path, data):
    """Under plain gradient descent, where a small error stays one."""
    whole, halves = (
        config_of(
            tmp_path / str(parts),
            data / "copy.jsonl",
            steps=3,
            rate=0.1,
            optimizer="sgd",
            microbatches=parts,
        )
        for parts in (1, 2)
    )
    for config in (whole, halves):
        assert sft.train(config) == 0
    start = setup.load_policy(whole.model, jax.random.key(0)).params
    one, other = weights_of(whole.run), weights_of(halves.run)
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], atol=1e-5, err_msg=name)
    assert np.abs(one["['embedding']"] - np.asarray(start["embedding"])).max() > 1e-3


def test_the_moving_average_is_exported(tmp_path, data):
    """ema ← decay · ema + (1 − decay) · params, from the parameters at the start."""
    each = checkpoint.CheckpointConfig(every=1, keep_last=2)
    _, config = first_loss(tmp_path, data, ema_decay=0.75, checkpoint=each)
    start = setup.load_policy(config.model, jax.random.key(0)).params
    one, two = (
        checkpoint.load_params(checkpoint.find_checkpoint(config.run, step), start)
        for step in (1, 2)
    )
    average = jax.tree.map(lambda a, b, c: 0.75 * (0.75 * a + 0.25 * b) + 0.25 * c, start, one, two)
    exported = hub.load_model(Path(config.run) / "model")[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), exported, average)
    assert not np.allclose(exported["embedding"], two["embedding"], atol=1e-4)


def test_lora_trains_and_keeps_the_adapters_alone(tmp_path, data, copying):
    """Frozen parameters are in no checkpoint; adapter and merged model say the same."""
    base = Path(copying.run) / "model"
    lora = setup.LoRAConfig(rank=2, alpha=4.0)
    _, config = first_loss(
        tmp_path, data, rate=1e-2, model=setup.ModelConfig(path=str(base), lora=lora)
    )
    kept = json.loads((checkpoint.find_checkpoint(config.run) / "manifest.json").read_text())
    of_params = [name for name in kept["leaves"] if name.split("/")[0] == "params"]
    assert of_params
    assert all(name.split("/")[-1] in ("lora_a", "lora_b") for name in of_params)
    assert not any(name.endswith(("kernel", "embedding", "scale")) for name in kept["leaves"])

    tokens = jnp.array([[97, 98, 99, 61]])
    model, params = hub.load_model(base)
    adapted = hub.load_adapter(Path(config.run) / "adapter", model, params)
    merged = hub.load_model(Path(config.run) / "model")
    plain, with_adapter, with_merged = (
        np.asarray(models.logits(m, p, tokens)) for m, p in ((model, params), adapted, merged)
    )
    np.testing.assert_allclose(with_adapter, with_merged, atol=1e-4)
    assert np.abs(with_adapter - plain).max() > 1e-2
    np.testing.assert_array_equal(merged[1]["embedding"], params["embedding"])
    np.testing.assert_array_equal(merged[1]["final_norm"]["scale"], params["final_norm"]["scale"])


# Refusals --------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_it_sound(tmp_path, data):
    each = checkpoint.CheckpointConfig(every=1, keep_last=9)
    config = config_of(tmp_path / "run", data / "copy.jsonl", steps=9, rate=1e38, checkpoint=each)
    with pytest.raises(FloatingPointError, match=r"step 2: .*is (nan|inf)"):
        sft.train(config)
    assert checkpoint.list_steps(tmp_path / "run" / "checkpoints") == [1]
    assert not (tmp_path / "run" / "model").exists()
    assert not (tmp_path / "run" / "finished.json").exists()


def test_float16_is_refused_asked_for_or_stored(tmp_path):
    for key in ("dtype", "compute_dtype"):
        with pytest.raises(ValueError, match=f"model.{key} is float16.*bfloat16 or float32"):
            setup.ModelConfig(fresh=TINY, tokenizer="bytes", **{key: "float16"})
    tokenizer = tokenizers.byte_tokenizer()
    size = tokenizers.load_tokenizer_from_files(tokenizer).vocab_size
    model, params = hub.init_model(
        {**TINY, "vocab_size": size}, jax.random.key(0), dtype="float16", files=tokenizer
    )
    hub.save_model(tmp_path / "half", model, params)
    stored = setup.ModelConfig(path=str(tmp_path / "half"), dtype=None)
    with pytest.raises(ValueError, match=r"half stores is float16"):
        setup.load_policy(stored, jax.random.key(0))
    wider = dataclasses.replace(stored, dtype="float32")
    assert setup.load_policy(wider, jax.random.key(0)).params["embedding"].dtype == jnp.float32


NOTHING_TO_MEASURE = [
    ({"eval": evaluation.EvalConfig(rows=3)}, "eval.rows needs data.eval.*set eval.rows=null"),
    ({"eval": evaluation.EvalConfig(batch_size=2)}, "eval.batch_size needs data.eval"),
    ({"eval": evaluation.EvalConfig(every=2)}, "eval.every needs data.eval.*set eval.every=0"),
    ({"checkpoint": checkpoint.CheckpointConfig(keep_best=1)}, "keep_best.* need data.eval"),
    ({"checkpoint": checkpoint.CheckpointConfig(metric="eval/x")}, "metric need data.eval"),
]


@pytest.mark.parametrize(("changes", "words"), NOTHING_TO_MEASURE)
def test_what_is_set_for_an_evaluation_without_data_is_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        config_of(tmp_path, tmp_path / "a.jsonl", **changes)


def test_the_length_of_answers_that_nobody_asks_for_is_refused():
    with pytest.raises(ValueError, match=r"eval.max_new_tokens is for eval.generate"):
        evaluation.EvalConfig(max_new_tokens=5)


def test_a_changed_learning_rate_is_refused_and_more_steps_are_not(tmp_path, data):
    _, config = first_loss(tmp_path, data)
    faster = dataclasses.replace(config.optimizer, learning_rate=1.0)
    with pytest.raises(runs.RunError, match=r"optimizer.learning_rate: 0.003 -> 1.0"):
        sft.train(dataclasses.replace(config, optimizer=faster, steps=3))
    assert sft.train(dataclasses.replace(config, steps=3)) == 0
    assert len(values_of(config.run, "loss")) == 3


def test_more_steps_are_the_same_program(tmp_path, data):
    """So that the kept compiled one is found again."""
    texts = []
    for steps in (4, 9):
        cosine = optimizers.OptimizerConfig(warmup=2)
        config = config_of(tmp_path, data / "copy.jsonl", steps=steps, optimizer=cosine)
        policy, batch = start_of(config)
        optimizer, schedule = optimizers.make_optimizer(config.optimizer, steps)
        state = train_step.init_state(policy.params, optimizer)
        update = sft.make_update(config, policy)
        texts.append(update.lower(state, batch, jax.jit(schedule)(state.step)).as_text())
    assert texts[0] == texts[1]


def test_a_run_says_how_often_it_reads_its_data(tmp_path, caplog):
    logging.getLogger("jaxpost").propagate = True
    write(tmp_path / "two.jsonl", [{"prompt": "a", "completion": "b"}] * 2)
    config = config_of(
        tmp_path / "run", tmp_path / "two.jsonl", steps=1, batch_size=1, packing=False
    )
    assert sft.train(config) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "1 updates make about 0.5 passes over the data" in log
    assert "by heart" not in log
    with caplog.at_level("INFO", "jaxpost"):
        setup.tell_of_passes(0.5, 41)
    assert "41 updates make about 20.5 passes over the data" in caplog.text
    assert "by heart; steps=6 makes about 3" in caplog.text


def test_more_steps_tell_where_the_learning_rate_jumps(tmp_path, data):
    """Linear from 1e-3 to 0: after two of two steps 0, after two of four 5e-4."""
    for schedule, told in (("linear", 1), ("constant", 0)):
        config = config_of(
            tmp_path / schedule,
            data / "copy.jsonl",
            steps=2,
            optimizer=optimizers.OptimizerConfig(learning_rate=1e-3, schedule=schedule),
        )
        assert sft.train(config) == 0
        assert sft.train(dataclasses.replace(config, steps=4)) == 0
        log = (Path(config.run) / "log.txt").read_text().splitlines()
        said = [line for line in log if "learning rate follows" in line]
        assert len(said) == told
        if said:
            assert "went from 2 to 4: after step 2 it is 0.0005, where it would" in said[0]
            assert values_of(config.run, "learning_rate")[2] == pytest.approx(5e-4)


def test_devices_that_stay_idle_are_told(caplog):
    setup.check_devices()
    assert [f"one of {jax.device_count()} devices" in line for line in caplog.messages] == [True]


TWO_PROCESSES = """
import sys, jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jaxpost.recipes import grpo, pmd, ppo, sft
for recipe in (sft, grpo, ppo, pmd):
    try:
        recipe.train(None)
    except RuntimeError as error:
        print(error)
"""


def test_a_second_process_is_refused_before_anything_is_done():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for rank in (0, 1)
    ]
    for process in processes:
        lines = process.communicate(timeout=300)[0].splitlines()
        assert ["there are 2 processes" in line for line in lines] == [True] * 4


def test_another_run_of_the_same_configuration_is_the_same(tmp_path, data):
    _, config = first_loss(tmp_path / "one", data)
    _, again = first_loss(tmp_path / "two", data)
    same_run(config.run, again.run)
    _, other = first_loss(tmp_path / "three", data, seed=1)
    assert values_of(other.run, "loss") != values_of(config.run, "loss")


@pytest.mark.slow
def test_quickstart_goes_through_all_stages(tmp_path, capsys):
    assert quickstart.train(tmp_path / "quick", 0.01) == 0
    page = capsys.readouterr().out
    assert "1. pretraining on text" in page
    assert page.count("held-out questions right") == 2
    assert (tmp_path / "quick" / "grpo" / "model" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "quick" / "pretrain" / "checkpoints")  # not needed for a finished run
    assert quickstart.train(tmp_path / "quick", 0.01) == 0
