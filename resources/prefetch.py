"""Prefetching: a thread makes the next items while the caller works with earlier ones.

In: an iterator, and how many items may wait. Out: the same items in the same order. It saves time if both
threads mostly run without Python's lock, such as one that receives a database's data and one that writes
Parquet.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from queue import Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")


class _End:
    """The last entry of the queue: the items have ended, or failed with an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


@contextmanager
def prefetched(
    items: Iterable[T], most: int = 2, stop: Callable[[], None] | None = None
) -> Iterator[Iterator[T]]:
    """The items; a thread makes up to `most` of them in advance. Raises the errors of `items`.

    The thread ends with the block. If the caller leaves the block early, the item in progress is the last
    one. The caller waits for it, and calls `stop` repeatedly to cancel it.
    """
    made, left = Queue[T | _End](most), Event()

    def make() -> None:
        try:
            for item in items:
                made.put(item)
                if left.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - the caller's to handle
            made.put(_End(error))
        else:
            made.put(_End())
        finally:
            # Close its open resources now, not at some garbage collection.
            if isinstance(items, Generator):
                items.close()

    def taken() -> Iterator[T]:
        while not isinstance(item := made.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = Thread(target=copy_context().run, args=(make,), name="pgsieve-prefetch", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        left.set()
        while thread.is_alive():
            # The thread may be waiting for room in the queue.
            while not made.empty():
                made.get()
            thread.join(0.01)
            if stop is not None and thread.is_alive():
                stop()
                thread.join(0.1)
