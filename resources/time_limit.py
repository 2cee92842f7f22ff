"""Limits the time of a request that a process makes while it ends, to a JVM or server that may hang or be gone.

In: a number of seconds.
Out: a block that raises TimeoutError after this time.

The time is limited by the signal SIGALRM, which works only in the main thread. Python runs exit functions in this
thread, and from Python 3.12 on they cannot start another thread.
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
