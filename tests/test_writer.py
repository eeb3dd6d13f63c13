"""Metrics out: what stands in the file, on the terminal, and how speed is reckoned."""

import io
import json
import re
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxpost import writer
from jaxpost.models.model import LoRA, TransformerConfig


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_writer(folder: Path, steps: int = 10, clock=None, **options) -> writer.Writer:
    console = Console(file=io.StringIO(), width=200)
    config = writer.WriterConfig(**options)
    if clock is None:
        return writer.Writer(folder, config, steps=steps, console=console)
    return writer.Writer(folder, config, steps=steps, console=console, clock=clock)


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


# metrics.jsonl ---------------------------------------------------------------------------------


def test_a_record_is_exact_and_its_names_are_in_order(tmp_path):
    loss = np.float32(0.1)
    with make_writer(tmp_path) as out:
        out.write(1, {"num_tokens": 2**40, "loss": jnp.asarray(loss), "b": jnp.bfloat16(1.5)})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert (
        text == '{"step": 1, "b": 1.5, "loss": 0.10000000149011612, "num_tokens": 1099511627776}\n'
    )
    assert np.float32(json.loads(text)["loss"]).tobytes() == loss.tobytes()


def test_a_step_without_metrics_leaves_no_line(tmp_path):
    with make_writer(tmp_path) as out:
        out.write(0, {})
        out.write(1, {"loss": 1.0})
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_what_is_not_finite_is_null_in_the_file_and_itself_for_the_caller(tmp_path):
    with make_writer(tmp_path) as out:
        out.write(1, {"loss": jnp.nan, "grad_norm": jnp.inf})
        [(step, values)] = out.flush()
    assert step == 1
    assert np.isnan(values["loss"])
    assert values["grad_norm"] == np.inf
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 1, "grad_norm": None, "loss": None}]


def test_a_step_is_fetched_when_the_next_comes_and_flush_brings_the_file_up_to_date(tmp_path):
    with make_writer(tmp_path) as out:
        assert out.write(1, {"loss": jnp.float32(4)}) == []
        assert not (tmp_path / "metrics.jsonl").exists()
        assert out.write(2, {"loss": jnp.float32(3)}) == [(1, {"loss": 4.0})]
        assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1]
        assert out.flush() == [(2, {"loss": 3.0})]
        assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]
        assert out.flush() == []


def test_records_of_one_step_become_one_line_even_after_a_flush_and_a_restart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with make_writer(tmp_path) as out:
        out.write(1, {"loss": 1.0})
        out.write(2, {"loss": 2.0})
        out.write(2, {"learning_rate": 0.5})
        out.flush()
        out.write(2, {"eval/loss": 3.0})
    with make_writer(tmp_path) as out:
        out.write(2, {"eval/loss": 0.25})
        out.write(3, {"loss": 4.0})
    assert lines_of(path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "eval/loss": 0.25, "learning_rate": 0.5, "loss": 2.0},
        {"step": 3, "loss": 4.0},
    ]


def test_a_line_cut_by_a_kill_is_written_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    with make_writer(tmp_path) as out:
        out.write(2, {"loss": 2.0})
    assert lines_of(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    path.write_text('{"step": 1')
    with make_writer(tmp_path) as out:
        out.write(1, {"loss": 1.0})
    assert lines_of(path) == [{"step": 1, "loss": 1.0}]


def test_the_file_may_be_replaced_between_opening_the_writer_and_the_first_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n')
    with make_writer(tmp_path) as out:
        (tmp_path / "new").write_text('{"step": 1, "loss": 1.0}\n')
        (tmp_path / "new").replace(path)
        out.write(2, {"loss": 5.0})
    assert lines_of(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 5.0}]


def test_steps_do_not_go_back_and_values_are_scalars(tmp_path):
    with make_writer(tmp_path) as out:
        out.write(2, {"loss": 1.0})
        with pytest.raises(ValueError, match="step 1 come after those of 2"):
            out.write(1, {"loss": 1.0})
        with pytest.raises(ValueError, match=r"metric logps has shape \(2,\)"):
            out.write(2, {"logps": jnp.zeros(2)})
    with make_writer(tmp_path) as out:
        out.write(1, {"loss": 1.0})
        with pytest.raises(ValueError, match="cut the file first"):
            out.flush()


def test_every_so_many_but_all_are_returned(tmp_path):
    with make_writer(tmp_path, steps=7, every=3) as out:
        seen = [done for step in range(1, 8) for done in out.write(step, {"loss": float(step)})]
        seen += out.flush()
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 3, 6, 7]
    with pytest.raises(ValueError, match=r"log\.every is 0"):
        writer.WriterConfig(every=0)


def test_an_error_in_the_loop_is_not_replaced_and_what_was_there_is_written(tmp_path):
    def train():
        with make_writer(tmp_path) as out:
            out.write(1, {"loss": 1.0})
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert lines_of(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 1.0}]


def test_samples(tmp_path):
    with make_writer(tmp_path) as out:
        out.samples(3, [{"prompt": "2+2?", "completion": "4 ✓", "reward": 1.0}, {"prompt": "…"}])
    assert lines_of(tmp_path / "samples.jsonl") == [
        {"step": 3, "prompt": "2+2?", "completion": "4 ✓", "reward": 1.0},
        {"step": 3, "prompt": "…"},
    ]


# The terminal ----------------------------------------------------------------------------------

RECORD = {"loss": 2.5, "tokens_per_second": 3512.4, "mfu": 0.417, "step_time": 2.0}


def test_without_a_terminal_lines_are_plain_and_rare(tmp_path):
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=False)
    config = writer.WriterConfig(terminal_seconds=5)
    with writer.Writer(tmp_path, config, steps=100, console=console, clock=clock) as out:
        for step in range(1, 101):
            clock.now += 1
            out.write(step, RECORD | ({"eval/loss": 1.25} if step == 50 else {}))
    lines = file.getvalue().splitlines()
    # Step 1, then each fifth second, the evaluation, and the last step.
    assert 20 <= len(lines) <= 24
    assert lines[0].startswith("step 1/100  loss 2.5000  3,512 tokens/s  MFU 42 %  ETA 3m18s")
    assert lines[-1].startswith("step 100/100  loss 2.5000  3,512 tokens/s  MFU 42 %  ETA 0s")
    assert sum("eval/loss 1.2500" in line for line in lines) == 1
    assert "\x1b" not in file.getvalue()


def test_on_a_terminal_one_live_line_and_prints_stay_whole(tmp_path, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    console = Console(force_terminal=True, width=100)
    with writer.Writer(tmp_path, steps=4, console=console) as out:
        out.write(1, RECORD)
        print("a line of someone else")
        out.write(2, RECORD | {"eval/loss": 1.25})
        out.write(3, RECORD)
        out.write(4, RECORD)
        out.flush()
    text = file.getvalue()
    assert "a line of someone else\n" in text
    assert "step 2  eval/loss 1.2500\n" in text
    assert "4/4  loss 2.5000  3,512 tokens/s  MFU 42 %  ETA 0s" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back


def test_a_narrow_terminal_keeps_to_one_line(tmp_path):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=50)
    with writer.Writer(tmp_path, steps=4, console=console) as out:
        for step in range(1, 5):
            out.write(step, RECORD)
    assert all(len(line) < 120 for line in file.getvalue().split("\n"))
    assert "\x1b[1A" not in file.getvalue()  # never two lines high


# TensorBoard and W&B ---------------------------------------------------------------------------


def test_tensorboard_files_hold_the_values(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    with make_writer(tmp_path, tensorboard=True) as out:
        out.write(1, {"loss": 2.5})
        out.write(2, {"loss": 1.5})
    [path] = (tmp_path / "tensorboard").iterdir()
    data, found = path.read_bytes(), []
    while data:  # length, its checksum, the event, its checksum
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    assert found == [(1, "loss", 2.5), (2, "loss", 1.5)]


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [
        ("tensorboardX", {"tensorboard": True}, "tensorboard"),
        ("wandb", {"wandb_project": "mine"}, "wandb"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path, monkeypatch, module, options, extra
):
    monkeypatch.setitem(sys.modules, module, None)  # Python's own way to make an import fail
    with pytest.raises(ImportError, match=rf"pip install 'jaxpost\[{extra}\]'"):
        make_writer(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_takes_no_more_is_named_and_leaves_whole_lines(tmp_path):
    """The limit on the size of files stands for the disk: part of a line fits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    out = make_writer(tmp_path)
    try:
        out.write(1, {"loss": 1.0})
        out.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))
        out.write(2, {"loss": 2.0})
        with pytest.raises(OSError, match=r"too large; put that right and run.*metrics\.jsonl"):
            out.flush()
        with pytest.raises(OSError, match=r"too large; put that right and run.*samples\.jsonl"):
            out.samples(2, [{"completion": "x" * 50}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    data = (tmp_path / "metrics.jsonl").read_bytes()
    assert data.startswith(b'{"step": 1, "loss": 1.0}\n{"step": 2')
    assert b"\x00" not in data
    with make_writer(tmp_path) as out:
        out.write(2, {"loss": 2.0})
    assert [line["step"] for line in lines_of(tmp_path / "metrics.jsonl")] == [1, 2]


# Speed -----------------------------------------------------------------------------------------


def test_the_meter_by_hand():
    clock = Clock()
    meter = writer.Meter(flops_per_token=100, peak=1000, examples_per_epoch=8, clock=clock)
    clock.now = 30.0
    first = meter.update(tokens=20, examples=4)
    assert first == {"num_tokens": 20, "epoch": 0.5, "compile_time": 30.0}
    clock.now = 31.0
    with meter.pause():
        clock.now = 100.0
    clock.now = 103.0
    assert meter.update(tokens=20, examples=6) == {
        "num_tokens": 40,
        "epoch": 1.25,
        "step_time": 4.0,
        "tokens_per_second": 5.0,
        "mfu": 0.5,
    }
    again = writer.Meter(counters=meter.state(), clock=clock)
    assert again.update(tokens=2)["num_tokens"] == 42
    assert set(first) - {"num_tokens", "epoch"} <= set(writer.WALL_CLOCK)


def test_an_update_that_is_still_computed_is_timed_when_its_arrays_are_there():
    """A loop that dispatches far quicker than the device computes, as training does."""
    sized = jnp.ones((1000, 1000)) / 1000
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 8, lambda _, y: y @ x, x))
    jax.block_until_ready(work(sized))
    start = time.perf_counter()
    jax.block_until_ready(work(sized))
    alone = time.perf_counter() - start
    meter, speeds = writer.Meter(), []
    for _ in range(6):
        sized = work(sized)
        speeds.append(meter.update(1, result=sized))
    times = [speed["step_time"] for speed in speeds if "step_time" in speed]
    assert len(times) == 4  # the first compiles, the second is still computed
    assert min(times) > alone / 10


def test_speeds_are_means_over_the_last_ten_updates():
    clock = Clock()
    meter = writer.Meter(clock=clock)
    speed = meter.update(1)
    for seconds in (100.0, *[1.0] * 9):
        clock.now += seconds
        speed = meter.update(5)
    assert speed["step_time"] == pytest.approx(10.9)
    assert speed["tokens_per_second"] == pytest.approx(50 / 109)
    clock.now += 1.0
    assert meter.update(5)["step_time"] == pytest.approx(1.0)


def test_a_pause_does_not_swallow_the_update_before_it():
    sized = jnp.ones((1200, 1200))
    work = jax.jit(lambda x: x @ x @ x @ x / 1e9)
    jax.block_until_ready(work(sized))
    meter = writer.Meter()
    meter.update(1)
    start = time.perf_counter()
    result = work(sized)  # still running when the pause starts
    assert "step_time" not in meter.update(1, result=result)
    with meter.pause(result):
        waited = time.perf_counter() - start
    assert meter.update(1, result=result)["step_time"] >= waited / 2


def small(**changes) -> TransformerConfig:
    sizes = {"vocab_size": 11, "width": 4, "layers": 2, "heads": 3, "kv_heads": 1}
    return TransformerConfig(
        **{**sizes, "head_dim": 5, "mlp_width": 7, "query_scale": 1.0, **changes}
    )


def test_flops_by_hand():
    # q 4x15, k and v 4x5, o 15x4, three 4x7 = 244 a layer; head 11x4.
    assert writer.matmul_params(small()) == (2 * 244 + 44, 0)
    # One query sees 2 of 3 positions on average; 12 flops x 15 x 2 in each of two layers.
    assert writer.train_flops_per_token(small(), 3) == 6 * 532 + 12 * 15 * (2 + 2)
    local = small(local_layers=(True, False), window=2)
    assert writer.train_flops_per_token(local, 3) == 6 * 532 + 12 * 15 * (5 / 3 + 2)


def test_flops_with_lora_by_hand():
    lora = small(lora=LoRA(rank=2, targets=("q_proj", "down_proj"), ranks=(("down_proj", 3),)))
    adapters = 2 * (2 * (4 + 15) + 3 * (7 + 4))
    assert writer.matmul_params(lora) == (532, adapters)
    flops = writer.train_flops_per_token(lora, 3, adapters_only=True)
    assert flops == 4 * 532 + 6 * adapters + 12 * 15 * 4


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (7, 7), (7, 9)])
def test_mean_context_by_counting(length, window):
    position = np.arange(length)
    sees = position[:, None] >= position
    if window is not None:
        sees &= position[:, None] - position < window
    assert writer.mean_context(length, window) == pytest.approx(sees.sum() / length)


def test_flops_agree_with_those_that_xla_counts():
    def forward(x, kernel):
        return jnp.sum(jnp.square(x @ kernel))

    x, kernel = jnp.ones((8, 16)), jnp.ones((16, 32))
    compiled = jax.jit(jax.grad(forward, argnums=(0, 1))).lower(x, kernel).compile()
    counted = compiled.cost_analysis()["flops"]
    assert counted == pytest.approx(6 * 8 * 16 * 32, rel=0.1)  # 6 N a row


def test_the_peak_is_a_rate():
    peak = writer.measure_matmul_peak(sizes=(128, 64), seconds=0.01)
    assert 1e8 < peak < 1e15


def test_the_first_update_is_waited_for_and_its_compiling_told(caplog):
    def slow(x):
        return jax.lax.fori_loop(0, 40, lambda _, y: jnp.tanh(y @ x), x)

    x = jnp.ones((300, 300)) / 300
    meter = writer.Meter()
    with meter.pause():
        jax.jit(lambda y: jnp.sin(slow(y)))(x)  # an evaluation's program is not counted
    with caplog.at_level("INFO", "jaxpost.writer"):
        result = jax.jit(slow)(x)
        first = meter.update(20, 2, result)
        assert result.is_ready()
        meter.update(20, 2)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("first update after ")
    after, compiling = (float(word) for word in re.findall(r"(\d+\.\d) s", line))
    assert after == pytest.approx(first["compile_time"], abs=0.06)
    assert 0 <= compiling <= after
