"""Checkpoints: what comes back is what went in, or it is not accepted at all."""

import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpost import checkpoint
from jaxpost.checkpoint import layout


class State(NamedTuple):
    step: Any
    params: Any
    opt_state: Any
    ema: Any


def make_state(seed: int = 0) -> State:
    key = jax.random.key(seed)
    params = {
        "embedding": jax.random.normal(key, (7, 4)),
        "layers": {"q_proj": {"kernel": jax.random.normal(key, (2, 4, 6)).astype(jnp.bfloat16)}},
    }
    mask = {"embedding": True, "layers": {"q_proj": {"kernel": False}}}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.adamw(1e-3, mu_dtype=jnp.bfloat16), mask),
        optax.scale_by_schedule(optax.constant_schedule(1.0)),
    )
    return State(jnp.asarray(seed, jnp.int32), params, optimizer.init(params), None)


def shapes_of(state: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def save_steps(folder: Path, *steps: int, config: checkpoint.CheckpointConfig | None = None):
    with checkpoint.Checkpointer(folder, config) as saver:
        for step in steps:
            saver.save(step, make_state(step), {"row": step * 10}, {"seed": step})


def test_a_state_comes_back_bit_for_bit(tmp_path):
    state = make_state(3)
    with checkpoint.Checkpointer(tmp_path / "checkpoints") as saver:
        saver.save(5, state, {"row": 17, "grain": {"a": [1]}}, {"lr": 1e-5}, {"eval/loss": 0.25})
        restored = saver.restore(shapes_of(state))
    assert restored is not None
    assert_same(restored.state, state)
    assert (restored.step, restored.position) == (5, {"row": 17, "grain": {"a": [1]}})
    assert (restored.config, restored.metrics) == ({"lr": 1e-5}, {"eval/loss": 0.25})


def test_nothing_saved_is_none(tmp_path):
    with checkpoint.Checkpointer(tmp_path / "checkpoints") as saver:
        assert saver.restore(make_state()) is None


def test_training_may_go_on_with_donated_buffers_during_a_save(tmp_path):
    rows = 200_000  # large enough that the write is still running when the buffers are reused
    state = {
        "w": jnp.arange(rows * 4, dtype=jnp.float32).reshape(rows, 4),
        "host": np.ones(3, np.float32),
    }
    before = np.array(state["w"])
    update = jax.jit(lambda w: w * 2 + 1, donate_argnums=0)
    with checkpoint.Checkpointer(tmp_path) as saver:
        saver.save(1, state, {}, {})
        state["host"][:] = -1
        w = state["w"]
        for _ in range(5):
            w = update(w)
        jax.block_until_ready(w)
        saver.wait()
        restored = saver.restore(
            {
                "w": jax.ShapeDtypeStruct((rows, 4), jnp.float32),
                "host": np.zeros(3, np.float32),
            }
        )
    assert restored is not None
    assert np.asarray(restored.state["w"]).tobytes() == before.tobytes()
    assert restored.state["host"].tolist() == [1, 1, 1]


def test_the_same_step_twice_is_saved_once(tmp_path):
    save_steps(tmp_path, 1)
    stamp = (tmp_path / "step_00000001" / "COMMITTED").stat().st_mtime_ns
    save_steps(tmp_path, 1)
    assert (tmp_path / "step_00000001" / "COMMITTED").stat().st_mtime_ns == stamp


# Damage ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save_steps(folder, 1, 2)
    return folder


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = int(np.random.default_rng(len(data)).integers(len(data) * 8))
    data[place // 8] ^= 1 << (place % 8)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b'{"garbage": [' * 9)


DAMAGES = (flip_a_bit, truncate, empty, garbage, Path.unlink)


def falls_back(folder: Path, caplog) -> None:
    """The newest step (2) is damaged: step 1 is restored whole, and a warning says so."""
    caplog.clear()
    with checkpoint.Checkpointer(folder) as saver, caplog.at_level(logging.WARNING):
        restored = saver.restore(make_state())
    assert restored is not None
    assert restored.step == 1
    assert_same(restored.state, make_state(1))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("checkpoint step 2 is damaged" in text for text in warnings), warnings
    assert (folder / "bad.step_00000002").is_dir()


@pytest.mark.parametrize("harm", DAMAGES)
def test_any_damaged_file_makes_the_run_fall_back(two_steps, tmp_path, caplog, harm):
    newest = two_steps / "step_00000002"
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert len(files) >= 12
    for count, name in enumerate(files):
        folder = tmp_path / str(count)
        shutil.copytree(two_steps, folder)
        if (folder / "step_00000002" / name).stat().st_size == 0 and harm is not Path.unlink:
            continue
        harm(folder / "step_00000002" / name)
        falls_back(folder, caplog)


def test_a_hundred_random_bits(two_steps, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps / "step_00000002", folder / "step_00000002")
    path = folder / "step_00000002"
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.stat().st_size]
    rng = np.random.default_rng(0)
    for _ in range(100):
        file = files[rng.integers(len(files))]
        whole = file.read_bytes()
        place = int(rng.integers(len(whole) * 8))
        harmed = bytearray(whole)
        harmed[place // 8] ^= 1 << (place % 8)
        file.write_bytes(harmed)
        assert checkpoint.damage(path) is not None, (file, place)
        file.write_bytes(whole)
    assert checkpoint.damage(path) is None


def test_swapped_files_strange_files_and_swapped_steps_are_damage(two_steps, tmp_path, caplog):
    cases = []
    for name in ("swap", "extra", "stepless", "other_step"):
        shutil.copytree(two_steps, tmp_path / name)
        cases.append(tmp_path / name / "step_00000002")
    swap, extra, stepless, other_step = cases

    data = sorted((swap / "state" / "ocdbt.process_0" / "d").iterdir())[:2]
    data[0].rename(swap / "aside")
    data[1].rename(data[0])
    (swap / "aside").rename(data[1])
    falls_back(swap.parent, caplog)

    (extra / "state" / "d" / "unknown").write_text("x")
    falls_back(extra.parent, caplog)

    shutil.rmtree(stepless)
    stepless.mkdir()
    falls_back(stepless.parent, caplog)

    shutil.rmtree(other_step)
    shutil.copytree(other_step.parent / "step_00000001", other_step)
    falls_back(other_step.parent, caplog)


def test_strict_stops_instead_and_changes_nothing(two_steps, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps, folder)
    flip_a_bit(folder / "step_00000002" / "config.json")
    with (
        checkpoint.Checkpointer(folder, checkpoint.CheckpointConfig(strict=True)) as saver,
        pytest.raises(checkpoint.CheckpointError, match=r"step 2 .*config\.json.*strict=false"),
    ):
        saver.restore(make_state())
    assert checkpoint.list_steps(folder) == [1, 2]


def test_when_every_step_is_damaged_the_error_lists_them_and_nothing_is_lost(two_steps, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps, folder)
    for step in (1, 2):
        truncate(folder / f"step_0000000{step}" / "manifest.json")
    for _ in range(2):  # the second start must not take the folder for an empty one
        with (
            checkpoint.Checkpointer(folder) as saver,
            pytest.raises(checkpoint.CheckpointError) as error,
        ):
            saver.restore(make_state())
        assert "bad.step_00000001, bad.step_00000002" in str(error.value)
        assert f"mv {folder}" in str(error.value)
    assert (folder / "bad.step_00000002" / "state").is_dir()


def test_what_an_unfinished_save_left_is_removed_and_never_restored(two_steps, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps, folder)
    (folder / "step_00000002").rename(folder / "tmp.step_00000002.1")
    with checkpoint.Checkpointer(folder) as saver:
        assert not list(folder.glob("tmp.*"))
        restored = saver.restore(make_state())
    assert restored is not None
    assert restored.step == 1


def test_deleting_the_newest_step_by_hand_resumes_from_the_one_before(two_steps, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps, folder)
    with checkpoint.Checkpointer(folder) as saver:
        shutil.rmtree(folder / "step_00000002")
        restored = saver.restore(make_state())
    assert restored is not None
    assert restored.step == 1


def test_another_shape_type_or_name_is_refused_by_name(two_steps):
    state = make_state()
    other = state._replace(
        params={
            "embedding": jnp.zeros((8, 4)),
            "layers": {"q_proj": {"kernel": jnp.zeros((2, 4, 6), jnp.float32)}},
            "lm_head": jnp.zeros(3),
        }
    )
    with (
        checkpoint.Checkpointer(two_steps) as saver,
        pytest.raises(checkpoint.CheckpointError) as error,
    ):
        saver.restore(other)
    text = str(error.value)
    assert "params/lm_head is not in it" in text
    assert "params/embedding is float32[7, 4] there and float32[8, 4] here" in text
    assert "params/layers/q_proj/kernel is bfloat16[2, 4, 6] there and float32" in text
    assert checkpoint.list_steps(two_steps) == [1, 2]


def test_other_versions_are_said(two_steps, tmp_path, caplog):
    folder = tmp_path / "copy"
    shutil.copytree(two_steps, folder)
    path = folder / "step_00000002"
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["made_by"]["jax"] = "0.0.1"
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "COMMITTED").write_bytes(layout.marker(path))
    with checkpoint.Checkpointer(folder) as saver, caplog.at_level(logging.WARNING):
        assert saver.restore(make_state()) is not None
    assert f"jax 0.0.1 -> {jax.__version__}" in caplog.text


# Keeping ---------------------------------------------------------------------------------------


def test_to_keep_by_hand():
    scored = [(1, 0.5), (2, 0.3), (3, None), (4, 0.3), (5, 0.9)]
    config = checkpoint.CheckpointConfig
    assert checkpoint.to_keep(scored, config(keep_last=2)) == {4, 5}
    assert checkpoint.to_keep(scored, config(keep_last=1, keep_best=1)) == {4, 5}  # of equals: 4
    assert checkpoint.to_keep(scored, config(keep_last=1, keep_best=2)) == {2, 4, 5}
    assert checkpoint.to_keep(scored, config(keep_last=1, keep_best=2, mode="max")) == {1, 5}
    assert checkpoint.to_keep(scored, config(keep_last=9)) == {1, 2, 3, 4, 5}


def test_the_newest_and_the_best_stay(tmp_path, caplog):
    losses = {1: 0.5, 2: 0.2, 3: float("nan"), 4: 0.4, 5: 0.9}
    config = checkpoint.CheckpointConfig(keep_last=1, keep_best=1)
    with checkpoint.Checkpointer(tmp_path, config) as saver:
        for step, loss in losses.items():
            saver.save(step, make_state(step), {}, {}, {"eval/loss": loss})
        with caplog.at_level(logging.WARNING):
            saver.save(6, make_state(6), {}, {}, {"loss": 0.0})
    assert checkpoint.list_steps(tmp_path) == [2, 6]
    assert "eval/loss is not among the metrics of step 6 (loss)" in caplog.text
    assert checkpoint.find_checkpoint(tmp_path, "best").name == "step_00000002"
    assert checkpoint.find_checkpoint(tmp_path).name == "step_00000006"


def test_due_and_settings_that_cannot_be():
    saver = checkpoint.Checkpointer("unused", checkpoint.CheckpointConfig(every=3))
    assert [step for step in range(8) if saver.due(step)] == [3, 6]
    saver.close()
    assert not Path("unused").exists()
    for wrong in ({"every": -1}, {"keep_last": 0}, {"keep_best": -1}):
        with pytest.raises(ValueError, match="checkpoint"):
            checkpoint.CheckpointConfig(**wrong)
    # Where types are checked, as in these tests, the annotation refuses it first.
    with pytest.raises((ValueError, TypeError), match="mode"):
        checkpoint.CheckpointConfig(mode="least")
    with pytest.raises(checkpoint.CheckpointError, match="mount the bucket"):
        checkpoint.Checkpointer("gs://bucket/run")


# Reading for use -------------------------------------------------------------------------------


def test_params_alone(two_steps, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(two_steps, run / "checkpoints")
    state = make_state(2)
    abstract = shapes_of(state.params)
    assert_same(checkpoint.load_params(run, abstract), state.params)
    first = checkpoint.find_checkpoint(run, 1)
    assert_same(checkpoint.load_params(first, abstract), make_state(1).params)
    assert checkpoint.read_config(run) == {"seed": 2}
    with pytest.raises(checkpoint.CheckpointError, match=r"ema/embedding is not in it"):
        checkpoint.load_params(run, abstract, field="ema")
    with pytest.raises(checkpoint.CheckpointError, match=r"no step 7; it has \[1, 2\]"):
        checkpoint.find_checkpoint(run, 7)
    with pytest.raises(checkpoint.CheckpointError, match=r"has the metric eval/loss"):
        checkpoint.find_checkpoint(run, "best")
    with pytest.raises(checkpoint.CheckpointError, match="holds no checkpoint"):
        checkpoint.find_checkpoint(tmp_path)
    flip_a_bit(first.with_name("step_00000002") / "state" / "_METADATA")
    with pytest.raises(checkpoint.CheckpointError, match=r"_METADATA has changed.*steps.*\[1\]"):
        checkpoint.load_params(run, abstract)
    assert checkpoint.list_steps(run / "checkpoints") == [1, 2]


def test_positions_belong_to_processes():
    restored = checkpoint.Restored(4, None, ({"row": 1}, {"row": 2}), {}, {})
    with pytest.raises(checkpoint.CheckpointError, match="2 processes and this run has 1"):
        _ = restored.position


def test_what_is_not_json_is_refused_at_once_and_leaves_nothing(tmp_path):
    with (
        checkpoint.Checkpointer(tmp_path) as saver,
        pytest.raises(checkpoint.CheckpointError, match=r"position\.0\.json must hold plain JSON"),
    ):
        saver.save(1, make_state(), {"row": object()}, {})
    assert not list(tmp_path.iterdir())


# The disk --------------------------------------------------------------------------------------


def next_steps(saver: checkpoint.Checkpointer) -> None:
    """The steps of a loop after a save: the error must come there, not at the end."""
    for _ in range(2000):
        saver.check()
        time.sleep(0.005)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_one_clear_line_and_older_steps_stay(small_disk, caplog):
    state = {"w": jnp.arange(500_000, dtype=jnp.float32)}  # 2 MB
    with checkpoint.Checkpointer(small_disk / "c") as saver:
        saver.save(1, state, {}, {})
        saver.wait()
        (small_disk / "ballast").write_bytes(b"x" * 5_000_000)
        with caplog.at_level(logging.WARNING, "jaxpost"):
            saver.save(2, state, {}, {})
        assert "checkpoint step 2 needs 2.0 MB and" in caplog.text
        with pytest.raises(checkpoint.CheckpointError) as error:
            next_steps(saver)
        text = str(error.value)
        assert "\n" not in text
        assert "step 2" in text
        assert "the disk is full" in text
        assert "the newest saved is step 1" in text
        assert checkpoint.list_steps(small_disk / "c") == [1]
        assert not list((small_disk / "c").glob("tmp.*"))
        restored = saver.restore(state)
        assert restored is not None
        assert restored.step == 1
        assert_same(restored.state, state)

        (small_disk / "ballast").unlink()
        saver.save(2, state, {}, {})
        saver.wait()
        assert checkpoint.list_steps(small_disk / "c") == [1, 2]


# Orbax's event loop is closed while TensorStore still reports further failed writes to it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_under_way_is_not_replaced_by_that_of_a_save(small_disk):
    def train():
        with checkpoint.Checkpointer(small_disk) as saver:
            saver.save(1, {"w": jnp.arange(500_000, dtype=jnp.float32)}, {}, {})
            raise KeyError("mine")

    (small_disk / "ballast").write_bytes(b"x" * 7_500_000)
    with pytest.raises(KeyError, match="mine"):
        train()
    assert checkpoint.list_steps(small_disk) == []


# Devices ---------------------------------------------------------------------------------------


def run_python(code: str, devices: int) -> str:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_restored_onto_other_meshes(tmp_path):
    code = f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jaxpost import checkpoint

        def sharding(rows, columns, *spec):
            devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
            return NamedSharding(Mesh(devices, ("data", "model")), P(*spec))

        whole = np.arange(64, dtype=np.float32).reshape(8, 8)
        state = {{"w": jax.device_put(whole, sharding(4, 2, "data", "model")),
                 "n": jax.device_put(jnp.int32(3), sharding(4, 2))}}
        update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
        with checkpoint.Checkpointer({str(tmp_path)!r}) as saver:
            saver.save(1, state, {{}}, {{}})
            update(state)
            for rows, columns, spec in [(2, 2, ("model", "data")), (1, 1, ()), (4, 2, ()),
                                        (1, 8, (None, "model"))]:
                wanted = sharding(rows, columns, *spec)
                abstract = {{"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=wanted),
                            "n": jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding(1, 1))}}
                got = saver.restore(abstract).state
                assert got["w"].sharding == wanted, got["w"].sharding
                assert (np.asarray(got["w"]) == whole).all()
                assert int(got["n"]) == 3
        print("same")
    """
    assert run_python(code, devices=8).strip() == "same"
