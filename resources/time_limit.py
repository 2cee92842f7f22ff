"""Limits the time of a request that a process makes at its exit, to an engine that may hang or have died.

In: seconds. Out: a block that raises TimeoutError after them. SIGALRM works only in the main thread, in which
exit functions run; Python 3.12 lets these start no other thread.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise TimeoutError within the block after `seconds`."""

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    former_handler = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former_handler)
