"""A time limit from inside, for code that runs Python and so can be interrupted."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class OverrunError(BaseException):
    """The time is over. No Exception, for what is interrupted catches those."""


@contextlib.contextmanager
def seconds(limit: float) -> Iterator[None]:
    """Raises OverrunError in what runs within it for longer, and again every 0.1 s if swallowed.

    Raises RuntimeError outside of the main thread, where no signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "jaxpost.rewards.math limits its time by a signal, which reaches the main thread only; "
            "call it through rewards.Scorer"
        )

    def over(*_: object) -> None:
        raise OverrunError

    before = signal.signal(signal.SIGALRM, over)
    try:
        signal.setitimer(signal.ITIMER_REAL, limit, 0.1)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
