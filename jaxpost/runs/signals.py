"""SIGTERM, SIGHUP and Ctrl-C: asked to stop, and made to."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import jax


@contextlib.contextmanager
def owned(ask: Callable[[signal.Signals], bool]) -> Iterator[None]:
    """Our handlers, unless JAX owns SIGTERM, or we are not in the main thread.

    `ask` asks the loop to stop, and says whether this was the first to do so.
    """
    elsewhere = threading.current_thread() is not threading.main_thread()
    if jax.distributed.is_initialized() or elsewhere:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if ask(signal.Signals(number)):
            # os.write: a handler must not enter the locks of print or logging.
            os.write(2, b"\nstopping: saving after this update (Ctrl-C again exits at once)\n")
        elif number == signal.SIGINT:
            _leave_at_once(number)

    with contextlib.ExitStack() as before:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            own = signal.getsignal(number)
            if own is not signal.SIG_IGN:  # nohup ignores SIGHUP: leave it so
                signal.signal(number, handle)
                before.callback(signal.signal, number, own or signal.SIG_DFL)
        yield


def _leave_at_once(number: int) -> None:
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the progress line had hidden the cursor
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
