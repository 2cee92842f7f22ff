"""Prefetches items of an iterator: a thread makes the next items while the caller works with earlier ones.

In: an iterator, and the number of items that may wait. Out: the same items in the same order. Prefetching
saves time if both threads mostly run without Python's lock, as when one receives data and one writes Parquet.
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
def prefetch(
    items: Iterable[T], max_waiting: int = 2, stop: Callable[[], None] | None = None
) -> Iterator[Iterator[T]]:
    """Yield an iterator of the items, which a thread makes up to `max_waiting` in advance. Raises the errors of `items`.

    The thread ends with the block. If the caller leaves the block early, the thread still makes the item in
    progress. The end of the block waits for that, and calls `stop` repeatedly to cancel it.
    """
    queue, is_abandoned = Queue[T | _End](max_waiting), Event()

    def make() -> None:
        try:
            for item in items:
                queue.put(item)
                if is_abandoned.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 - the caller's to handle
            queue.put(_End(error))
        else:
            queue.put(_End())
        finally:
            # Close the generator's resources now, not at some garbage collection.
            if isinstance(items, Generator):
                items.close()

    def take() -> Iterator[T]:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = Thread(target=copy_context().run, args=(make,), name="pgsieve-prefetch", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        is_abandoned.set()
        while thread.is_alive():
            # The thread may be waiting for room in the queue.
            while not queue.empty():
                queue.get()
            thread.join(0.01)
            if stop is not None and thread.is_alive():
                stop()
                thread.join(0.1)
