"""Speed: wall-clock time to tokens/s and model FLOP utilisation (MFU)."""

import collections
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

log = logging.getLogger(__name__)

WINDOW = 10  # updates that a speed is the mean of: single ones jump about

# Lowering and compiling; tracing is left out, whose events lie within one another.
_COMPILING = tuple(
    f"/jax/core/compile/{part}_duration" for part in ("jaxpr_to_mlir_module", "backend_compile")
)


class _Running(NamedTuple):
    """An update that JAX computes in the background: its size, and arrays to wait for."""

    tokens: int
    examples: int
    result: Any


class Meter:
    """Turns the time between completed updates into `step_time`, `tokens_per_second` and `mfu`.

    JAX computes in the background, so an update is timed when its arrays are there, at the next
    call: a step's speed is that of the (up to ten) updates completed before. The first update of
    a job holds the compilation, so it gives `compile_time` and no speed, and a line of the log says
    how much of it was compiling. Time spent under `pause()` (evaluation, saving) does not count.
    `num_tokens` and `epoch` go on over a restart if `state()` is saved and given back as
    `counters`.

    Args:
      flops_per_token: of a training step, as `train_flops_per_token` gives, or a function of the
        mean length of an update's examples; None: no `mfu`.
      peak: what the device can do, FLOP/s, as `measure_matmul_peak` gives.
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
        self._running: _Running | None = None
        self._done: collections.deque[tuple[float, _Running]] = collections.deque(maxlen=WINDOW)
        self._compiling = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        self._since = clock()

    def update(self, tokens: int, examples: int = 0, result: Any = None) -> dict[str, float | int]:
        """The metrics of an update over so many tokens and examples.

        Give its arrays as `result` if they are still computed; without, it is over.
        """
        self._tokens += int(tokens)
        self._examples += int(examples)
        metrics: dict[str, float | int] = {"num_tokens": self._tokens}
        if self._per_epoch is not None:
            metrics["epoch"] = self._examples / self._per_epoch
        if self._first:
            return {**metrics, "compile_time": self._first_update(result)}
        self._complete()
        self._running = _Running(int(tokens), int(examples), result)
        if result is None:
            self._complete()
        return {**metrics, **self._speed()}

    def _first_update(self, result: Any) -> float:
        jax.block_until_ready(result)
        self._first = False
        now = self._clock()
        elapsed, self._since = now - self._since, now
        jax.monitoring.unregister_event_duration_listener(self._compiled)
        log.info("first update after %.1f s, of which %.1f s compiling", elapsed, self._compiling)
        return elapsed

    def _complete(self) -> None:
        """Waits for the update that is computed, and takes its time."""
        if self._running is None:
            return
        jax.block_until_ready(self._running.result)
        now = self._clock()
        # Without its arrays, which hold on to the device's memory.
        self._done.append((now - self._since, self._running._replace(result=None)))
        self._since, self._running = now, None

    def _speed(self) -> dict[str, float]:
        """The mean over the last completed updates."""
        elapsed = sum(seconds for seconds, _ in self._done)
        if elapsed <= 0:
            return {}
        tokens = sum(update.tokens for _, update in self._done)
        examples = sum(update.examples for _, update in self._done)
        speed = tokens / elapsed
        metrics = {"step_time": elapsed / len(self._done), "tokens_per_second": speed}
        if self._flops is not None and self._peak is not None:
            flops = self._flops
            flops = flops(tokens / max(examples, 1)) if callable(flops) else flops
            metrics["mfu"] = speed * flops / self._peak
        return metrics

    @contextlib.contextmanager
    def pause(self, after: Any = None) -> Iterator[None]:
        """Leave out the time spent in the body, once the arrays of `after` are computed.

        Give the update's arrays as `after` where the body would wait for them: that is training
        time all the same.
        """
        if after is not None:
            jax.block_until_ready(after)
            self._complete()
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
