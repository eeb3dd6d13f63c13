"""Where the time of a step goes."""

import contextlib
import time
from collections.abc import Callable, Iterator

PARTS: tuple[str, ...] = ("sample", "reward", "logps", "update")


class Stopwatch:
    """Seconds spent in named parts of a step, and in none of them.

    JAX computes in the background: whoever times a part waits for its arrays before it ends.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._since = clock, clock()
        self._spent = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time of the body as one of PARTS."""
        start = self._clock()
        try:
            yield
        finally:
            self._spent[name] += self._clock() - start

    def lap(self) -> dict[str, float]:
        """`time/<part>` in seconds since the last lap, `time/other` the rest; starts anew."""
        now = self._clock()
        spent, self._spent = self._spent, dict.fromkeys(PARTS, 0.0)
        rest = max(now - self._since - sum(spent.values()), 0.0)
        self._since = now
        return {f"time/{name}": seconds for name, seconds in (*spent.items(), ("other", rest))}
