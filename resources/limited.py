"""A limit for the last words of a process: what it asks at its end, such as an engine that may have died or hang.

In: seconds. Out: TimeoutError within the block once they are over. It uses SIGALRM, so only the main thread can have a limit, which
is the one that runs exit functions; no thread can be started then (Python 3.12).
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError within the block after so many seconds."""

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
