"""Says that a process is waiting, if a block takes long.

In: a number of seconds, and a function that reports the wait.
Out: a context manager for the block. If the block takes longer than this, another thread calls the function, and the
block goes on.

Raises nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer


@contextmanager
def report_if_slow(seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """Call `report` once if the block takes longer than `seconds`."""
    timer = Timer(seconds, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
