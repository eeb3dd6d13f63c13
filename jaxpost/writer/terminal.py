"""What the terminal shows: a live line, or plain ones now and then."""

import math
from collections.abc import Callable
from typing import Any

from rich import console as rich_console
from rich import progress as rich_progress

from jaxpost.writer import settings


class _PlainLines:
    """Without a terminal: a line now and then, and for each evaluation and the last step."""

    def __init__(self, steps: int, seconds: float, console: rich_console.Console, clock: Any):
        self._steps, self._seconds, self._console, self._clock = steps, seconds, console, clock
        self._start, self._next = clock(), -math.inf
        self._latest: settings.Values = {}

    def write(self, step: int, values: settings.Values) -> None:
        self._latest = {**self._latest, **values}
        now = self._clock()
        if now < self._next and step != self._steps and not settings.has_eval(values):
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
        self._latest: settings.Values = {}
        self._progress = rich_progress.Progress(
            rich_progress.BarColumn(bar_width=20),
            rich_progress.TextColumn("{task.description}", markup=False),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(f"0/{steps}  compiling", total=steps)
        self._progress.start()

    def write(self, step: int, values: settings.Values) -> None:
        self._latest = {**self._latest, **values}
        parts = [f"{step}/{self._steps}", *_parts(self._latest)]
        left = _left(step, self._steps, self._latest)
        parts += [f"ETA {_duration(left)}"] if left is not None else []
        parts += [_duration(self._clock() - self._start)]
        self._progress.update(self._task, completed=step, description="  ".join(parts))
        if settings.has_eval(values):
            line = "  ".join([f"step {step}", *_evals(values)])
            self._progress.console.print(line, highlight=False, markup=False)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._progress.stop()


def open_terminal(
    config: settings.WriterConfig,
    steps: int,
    console: rich_console.Console | None,
    clock: Callable[[], float],
) -> _PlainLines | _ProgressLine:
    console = console or rich_console.Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return _ProgressLine(steps, console, clock)
    return _PlainLines(steps, config.terminal_seconds, console, clock)


def _parts(values: settings.Values) -> list[str]:
    """What a line says of the latest values, leaving out those that are not there."""
    forms = (
        ("loss", lambda x: f"loss {x:.4f}"),
        ("reward", lambda x: f"reward {x:.3f}"),
        ("learning_rate", lambda x: f"lr {x:.2e}"),
        ("tokens_per_second", lambda x: f"{x:,.0f} tokens/s"),
        ("mfu", lambda x: f"MFU {100 * x:.0f} %"),
    )
    shown = [form(values[name]) for name, form in forms if name in values]
    return [*shown, *_shares(values)]


def _shares(values: settings.Values) -> list[str]:
    """Where the time of the latest step went, in %."""
    spent = {
        name.removeprefix("time/"): seconds
        for name, seconds in values.items()
        if name.startswith("time/")
    }
    total = sum(spent.values())
    return [f"{name} {100 * seconds / total:.0f} %" for name, seconds in spent.items() if total]


def _evals(values: settings.Values) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in values.items() if name.startswith("eval/")]


def _left(step: int, steps: int, values: settings.Values) -> float | None:
    """Seconds to the end at the latest pace."""
    pace = values.get("step_time")
    return None if pace is None else pace * max(steps - step, 0)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
