"""Metrics out: `metrics.jsonl` always, the terminal, TensorBoard and W&B where asked for.

One line of `metrics.jsonl` a step, `{"step": 12, "grad_norm": 0.91, "loss": 2.31, …}`: names in
order, numbers so exact that reading them back gives the same bits, and `null` for what is not
finite (JSON has no NaN). Values may be arrays on the device. A step's values are fetched when the
next step's arrive, so that the loop never waits for the device; `flush` fetches what is left, and
must come before a checkpoint, so that the file is complete up to it.

Also here: the meter that turns wall-clock time into tokens/s and model FLOP utilisation (MFU).
"""

import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import console as rich_console
from rich import progress as rich_progress

from jaxpost.models import transformer
from jaxpost.models.model import TransformerConfig
from jaxpost.options import check_ranges, option

# Names of metrics that two equal runs need not share.
WALL_CLOCK = ("step_time", "tokens_per_second", "mfu", "compile_time", "elapsed")

Values = dict[str, float | int]

log = logging.getLogger(__name__)
# Lowering and compiling; tracing is left out, whose events lie within one another.
_COMPILING = tuple(
    f"/jax/core/compile/{part}_duration" for part in ("jaxpr_to_mlir_module", "backend_compile")
)


@dataclasses.dataclass(frozen=True)
class WriterConfig:
    """How often to log, and where besides `metrics.jsonl`."""

    every: int = option(1, "log the metrics of each so-many-th update", "updates", least=1)
    terminal_seconds: float = option(
        5.0, "without a terminal, a plain line at most this often", "s", least=0
    )
    tensorboard: bool = option(False, "also write TensorBoard files into the run's folder")
    wandb_project: str | None = option(None, "also send metrics to this Weights & Biases project")

    def __post_init__(self):
        check_ranges(self, "log.")


class Writer:
    """Writes one run's metrics and samples; a context manager. Only process 0 writes anything.

    Args:
      folder: the run's folder.
      config: what to write besides the file, and how often.
      steps: updates in the whole run, for the progress line.
      name: what W&B calls the run; by default the folder's name.
      console: where the progress line goes; by default stdout.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        config: WriterConfig | None = None,
        *,
        steps: int,
        name: str | None = None,
        console: rich_console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config = config or WriterConfig()
        self._steps = steps
        self._waiting: tuple[int, dict[str, Any]] | None = None
        self._outputs: list[Any] = []
        if jax.process_index() != 0:
            return
        folder = Path(folder).absolute()
        self._samples = folder / "samples.jsonl"
        self._outputs = _open_outputs(self._config, folder, steps, name, console, clock)

    def write(self, step: int, metrics: Mapping[str, Any]) -> list[tuple[int, Values]]:
        """Take a step's metrics; returns the steps completed by this, with plain values.

        Several calls with one step make one record. Steps never go back. What is returned is the
        same on all processes and for every step, `log.every` or not: check it for finite values.

        Raises:
          ValueError: a value is not a scalar, or the step is one before the last.
        """
        done = []
        if self._waiting is not None and self._waiting[0] != step:
            if step < self._waiting[0]:
                raise ValueError(f"metrics of step {step} come after those of {self._waiting[0]}")
            done = self._finish()
        for name, value in metrics.items():
            if np.ndim(value) != 0:
                raise ValueError(f"metric {name} has shape {np.shape(value)}; it must be a scalar")
            if isinstance(value, jax.Array):
                value.copy_to_host_async()
        earlier = self._waiting[1] if self._waiting else {}
        self._waiting = step, {**earlier, **metrics}
        return done

    def flush(self) -> list[tuple[int, Values]]:
        """Write what is waiting, down to the disk; returns it as `write` does."""
        done = self._finish()
        for output in self._outputs:
            output.flush()
        return done

    def samples(self, step: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Append what the model wrote to `samples.jsonl`, one line a record, `step` first."""
        if not self._outputs:
            return
        lines = [json.dumps({"step": step, **record}, ensure_ascii=False) for record in records]
        with _named(self._samples), self._samples.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))

    def close(self) -> None:
        """Flush, and give the terminal back."""
        try:
            self.flush()
        finally:
            for output in self._outputs:
                output.close()
            self._outputs = []

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After an error the device may not give its values any more; the first error says more.
        with contextlib.suppress(*[Exception] if kind else []):
            self.close()

    def _finish(self) -> list[tuple[int, Values]]:
        if self._waiting is None:
            return []
        step, metrics = self._waiting
        self._waiting = None
        values = {name: _number(value) for name, value in metrics.items()}
        due = step % self._config.every == 0 or step in (1, self._steps) or _has_eval(values)
        if values and due:
            for output in self._outputs:
                output.write(step, values)
        return [(step, values)]


def _open_outputs(
    config: WriterConfig,
    folder: Path,
    steps: int,
    name: str | None,
    console: rich_console.Console | None,
    clock: Callable[[], float],
) -> list[Any]:
    # Packages first: what is missing should be said before anything is written.
    tensorboard = _optional("tensorboardX", "tensorboard") if config.tensorboard else None
    wandb = _optional("wandb", "wandb") if config.wandb_project is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    outputs: list[Any] = [_Lines(folder / "metrics.jsonl")]
    if tensorboard is not None:
        outputs.append(_TensorBoard(tensorboard, folder))
    if wandb is not None:
        outputs.append(_WeightsAndBiases(wandb, folder, config.wandb_project, name))
    return [*outputs, _terminal(config, steps, console, clock)]


class _Lines:
    """`metrics.jsonl`. A further record of the last step in the file replaces it, merged.

    Opened at the first record, since resuming a run may put a shortened file in its place before.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: int | None = None
        self._end = 0
        self._last: tuple[int, int, dict[str, Any]] | None = None

    def write(self, step: int, values: Values) -> None:
        file = self._open()
        record: dict[str, Any] = {name: _finite(value) for name, value in values.items()}
        start = self._end
        if self._last is not None:
            last_step, last_start, last_record = self._last
            if step < last_step:
                raise ValueError(
                    f"metrics of step {step} come after those of step {last_step} in {self._path}; "
                    "cut the file first, as resuming a run does"
                )
            if step == last_step:
                start, record = last_start, {**last_record, **record}
        line = json.dumps({"step": step, **{key: record[key] for key in sorted(record)}}) + "\n"
        # One write at its place: a kill leaves the old line, the new one, or a cut last line.
        data = line.encode()
        with _named(self._path):
            done = os.pwrite(file, data, start)
            while done < len(data):  # a disk that is getting full takes a part, then none
                done += os.pwrite(file, data[done:], start + done)
            os.ftruncate(file, start + len(data))
        self._end, self._last = start + len(data), (step, start, record)

    def flush(self) -> None:
        if self._file is not None:
            with _named(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            self._end, self._last = _last_record(self._file)
        return self._file


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the operating system say which file it was, and what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{error.strerror}; put that right and run the same command again"
        raise OSError(error.errno, reason, str(path)) from error


def _last_record(file: int) -> tuple[int, tuple[int, int, dict[str, Any]] | None]:
    """End of the whole lines, and (step, start, record) of the last: a cut one is overwritten."""
    data = os.pread(file, os.fstat(file).st_size, 0)
    end = data.rfind(b"\n") + 1
    if end == 0:
        return 0, None
    start = data.rfind(b"\n", 0, end - 1) + 1
    record = json.loads(data[start:end])
    return end, (int(record.pop("step")), start, record)


class _TensorBoard:
    def __init__(self, module: Any, folder: Path):
        self._module, self._folder = module, folder
        self._writer: Any = None

    def write(self, step: int, values: Values) -> None:
        if self._writer is None:
            # From here on: what a killed job wrote of these steps is hidden, not shown twice.
            folder = str(self._folder / "tensorboard")
            self._writer = self._module.SummaryWriter(logdir=folder, purge_step=step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _WeightsAndBiases:
    """A run of the same folder goes on in the same W&B run."""

    def __init__(self, module: Any, folder: Path, project: str | None, name: str | None):
        mark = folder / "wandb_id.txt"
        if not mark.exists():
            mark.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        self._run = module.init(
            project=project,
            name=name or folder.name,
            id=mark.read_text(encoding="utf-8").strip(),
            dir=str(folder),
            resume="allow",
        )

    def write(self, step: int, values: Values) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class _PlainLines:
    """Without a terminal: a line now and then, and for each evaluation and the last step."""

    def __init__(self, steps: int, seconds: float, console: rich_console.Console, clock: Any):
        self._steps, self._seconds, self._console, self._clock = steps, seconds, console, clock
        self._start, self._next = clock(), -math.inf
        self._latest: Values = {}

    def write(self, step: int, values: Values) -> None:
        self._latest = {**self._latest, **values}
        now = self._clock()
        if now < self._next and step != self._steps and not _has_eval(values):
            return
        self._next = now + self._seconds
        parts = [f"step {step}/{self._steps}", *_parts(self._latest), *_evals(values)]
        left = _left(step, self._steps, self._latest)
        parts += [f"ETA {_duration(left)}"] if left is not None else []
        parts += [f"elapsed {_duration(now - self._start)}"]
        self._console.print("  ".join(parts), soft_wrap=True, highlight=False, markup=False)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _ProgressLine:
    """On a terminal: one live line; rich keeps what others print above it."""

    def __init__(self, steps: int, console: rich_console.Console, clock: Any):
        self._steps, self._clock, self._start = steps, clock, clock()
        self._latest: Values = {}
        self._progress = rich_progress.Progress(
            rich_progress.BarColumn(bar_width=20),
            rich_progress.TextColumn("{task.description}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(f"0/{steps}  compiling", total=steps)
        self._progress.start()

    def write(self, step: int, values: Values) -> None:
        self._latest = {**self._latest, **values}
        parts = [f"{step}/{self._steps}", *_parts(self._latest)]
        left = _left(step, self._steps, self._latest)
        parts += [f"ETA {_duration(left)}"] if left is not None else []
        parts += [_duration(self._clock() - self._start)]
        self._progress.update(self._task, completed=step, description="  ".join(parts))
        if _has_eval(values):
            line = "  ".join([f"step {step}", *_evals(values)])
            self._progress.console.print(line, highlight=False, markup=False)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._progress.stop()


def _terminal(
    config: WriterConfig,
    steps: int,
    console: rich_console.Console | None,
    clock: Callable[[], float],
) -> _PlainLines | _ProgressLine:
    console = console or rich_console.Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return _ProgressLine(steps, console, clock)
    return _PlainLines(steps, config.terminal_seconds, console, clock)


def _parts(values: Values) -> list[str]:
    """What a line says of the latest values, leaving out those that are not there."""
    forms = (
        ("loss", lambda x: f"loss {x:.4f}"),
        ("learning_rate", lambda x: f"lr {x:.2e}"),
        ("tokens_per_second", lambda x: f"{x:,.0f} tokens/s"),
        ("mfu", lambda x: f"MFU {100 * x:.0f} %"),
    )
    return [form(values[name]) for name, form in forms if name in values]


def _evals(values: Values) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("eval/")]


def _has_eval(values: Values) -> bool:
    return any(name.startswith("eval/") for name in values)


def _left(step: int, steps: int, values: Values) -> float | None:
    """Seconds to the end at the latest pace."""
    pace = values.get("step_time")
    return None if pace is None else pace * max(steps - step, 0)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def _number(value: Any) -> float | int:
    """A scalar of Python, NumPy or JAX (any float type) as a plain number."""
    plain = np.asarray(value)
    if plain.dtype == bool or np.issubdtype(plain.dtype, np.integer):
        return int(plain)
    return float(plain)


def _finite(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None


def _optional(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"log.{extra} needs the package {module}: pip install 'jaxpost[{extra}]'"
        ) from error


# Speed ---------------------------------------------------------------------------------------


class Meter:
    """Turns the time between updates into `step_time`, `tokens_per_second` and `mfu`.

    The first update of a job holds the compilation, so it gives `compile_time` and no speed, and a
    line of the log says how much of it was compiling. Time spent under `pause()` (evaluation,
    saving) does not count. `num_tokens` and `epoch` go on over a restart if `state()` is saved and
    given back as `counters`.

    Args:
      flops_per_token: of a training step, as `train_flops_per_token` gives, or a function of the
        mean length of an update's examples; None: no `mfu`.
      peak: what the devices can do together, FLOP/s, as `measure_matmul_peak` gives.
      examples_per_epoch: None: no `epoch`.
      counters: `state()` of the job before.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        flops_per_token: float | Callable[[float], float] | None = None,
        peak: float | None = None,
        examples_per_epoch: int | None = None,
        counters: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._flops, self._peak, self._clock = flops_per_token, peak, clock
        self._per_epoch = examples_per_epoch
        self._tokens = int(counters["num_tokens"]) if counters else 0
        self._examples = int(counters["num_examples"]) if counters else 0
        self._first = True
        self._compiling = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        self._since = clock()

    def update(self, tokens: int, examples: int = 0, first: Any = None) -> dict[str, float | int]:
        """The metrics of the update that just ended, over so many tokens and examples.

        Of a job's first one, which JAX still computes, the arrays of `first` are waited for.
        """
        if self._first:
            jax.block_until_ready(first)
        now = self._clock()
        elapsed, self._since = now - self._since, now
        self._tokens += int(tokens)
        self._examples += int(examples)
        metrics: dict[str, float | int] = {"num_tokens": self._tokens}
        if self._per_epoch is not None:
            metrics["epoch"] = self._examples / self._per_epoch
        if self._first:
            self._first = False
            jax.monitoring.unregister_event_duration_listener(self._compiled)
            log.info(
                "first update after %.1f s, of which %.1f s compiling", elapsed, self._compiling
            )
            return {**metrics, "compile_time": elapsed}
        speed = tokens / elapsed if elapsed > 0 else 0.0
        metrics |= {"step_time": elapsed, "tokens_per_second": speed}
        if self._flops is not None and self._peak is not None:
            flops = self._flops
            flops = flops(tokens / max(examples, 1)) if callable(flops) else flops
            metrics["mfu"] = speed * flops / self._peak
        return metrics

    @contextlib.contextmanager
    def pause(self, after: Any = None) -> Iterator[None]:
        """Leave out the time spent in the body, once the arrays of `after` are computed.

        Give the state as `after`: JAX computes in the background, and an update that the body would
        have waited for is training time all the same.
        """
        jax.block_until_ready(after)
        start, compiling = self._clock(), self._compiling
        try:
            yield
        finally:
            self._compiling = compiling
            self._since += self._clock() - start

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in _COMPILING:
            self._compiling += duration_secs

    def state(self) -> dict[str, int]:
        """The counters, to save with the data position."""
        return {"num_tokens": self._tokens, "num_examples": self._examples}


def matmul_params(config: TransformerConfig) -> tuple[int, int]:
    """Weights that each token is multiplied with: (of the model, of its LoRA adapters).

    Attention and MLP projections and the output head count, tied or not; the embedding look-up,
    norms and biases do no matrix product.
    """
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears = {
        "q_proj": (config.width, heads),
        "k_proj": (config.width, kv),
        "v_proj": (config.width, kv),
        "o_proj": (heads, config.width),
        "gate_proj": (config.width, config.mlp_width),
        "up_proj": (config.width, config.mlp_width),
        "down_proj": (config.mlp_width, config.width),
    }
    model = adapters = 0
    for name, (rows, columns) in linears.items():
        model += config.layers * rows * columns
        adapter = transformer.lora_rank_and_scale(config.lora, name)
        adapters += config.layers * adapter[0] * (rows + columns) if adapter is not None else 0
    return model + config.vocab_size * config.width, adapters


def mean_context(length: float, window: int | None = None) -> float:
    """Positions that causal attention sees, itself included, averaged over a row of this length.

    (T + 1) / 2 without a window; with a window w < T, (w (w + 1) / 2 + (T - w) w) / T.
    """
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def train_flops_per_token(
    config: TransformerConfig, length: float, *, adapters_only: bool = False
) -> float:
    """FLOPs of forward and backward for one token of a row of `length`, without recomputation.

    6 N + 12 · heads · head_dim · (sum over layers of the mean context): a product with N weights is
    2 N forward, 2 N for the gradient of its input and 2 N for that of the weights; scores and their
    product with the values are 2 · 2 · heads · head_dim · context forward and twice that backward.
    With `adapters_only` (LoRA) the model's own weights need no gradient: 4 N + 6 N_lora.
    A packed row counts as the length of its segments, so give their mean length.
    """
    model, adapters = matmul_params(config)
    local = sum(config.local_layers)
    context = (config.layers - local) * mean_context(length) + local * mean_context(
        length, config.window
    )
    products = (4 if adapters_only else 6) * model + 6 * adapters
    return products + 12 * config.heads * config.head_dim * context


def measure_matmul_peak(
    dtype: str = "float32", *, size: int | None = None, seconds: float = 0.3
) -> float:
    """FLOP/s of a square matrix product, the best of those that fit in `seconds` (at least 3).

    `size` is 2048 on CPUs and 8192 on accelerators, whose number multiplies the figure (devices of
    a CPU share its cores). Products of `float32` use JAX's default precision, as training does.
    """
    accelerated = jax.default_backend() != "cpu"
    size = size or (8192 if accelerated else 2048)
    product = jax.jit(jnp.matmul)
    left = jnp.full((size, size), 0.5, dtype)
    jax.block_until_ready(product(left, left))
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        jax.block_until_ready(product(left, left))
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times) * (jax.device_count() if accelerated else 1)
