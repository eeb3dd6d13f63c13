"""Speed: wall-clock time to tokens/s and model FLOP utilisation (MFU)."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

log = logging.getLogger(__name__)

# Lowering and compiling; tracing is left out, whose events lie within one another.
_COMPILING = tuple(
    f"/jax/core/compile/{part}_duration" for part in ("jaxpr_to_mlir_module", "backend_compile")
)


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
