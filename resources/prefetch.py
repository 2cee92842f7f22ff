"""Makes the next items of an iterator in a thread, while the caller works with earlier items.

This saves time if both threads mostly run without Python's global interpreter lock. For example, one thread
receives data and the other writes Parquet.

In: an iterator, and the number of items that may wait for the caller.
Out: the same items in the same order.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from queue import Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")


class _End:
    """The last entry of the queue: there are no more items, or an error has ended them."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


@contextmanager
def prefetch(
    items: Iterable[T], max_waiting: int = 2, cancel_item: Callable[[], None] | None = None
) -> Iterator[Iterator[T]]:
    """Yield an iterator of the items. A thread makes items in advance.

    Up to `max_waiting` items wait in a queue for the caller, and one more may wait for room in the queue.

    The iterator raises the errors of `items`. The thread ends with the block. If the caller leaves the block
    early, the end of the block waits for the item that the thread is making. Meanwhile it calls `cancel_item`
    again and again, to cancel this item.
    """
    queue, is_abandoned = Queue[T | _End](max_waiting), Event()

    def fill_queue() -> None:
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
            # Without this, the resources of the generator would stay open until Python's garbage collector runs.
            if isinstance(items, Generator):
                items.close()

    def take_items() -> Iterator[T]:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = Thread(target=copy_context().run, args=(fill_queue,), name="pgsieve-prefetch", daemon=True)
    thread.start()
    try:
        yield take_items()
    finally:
        is_abandoned.set()
        while thread.is_alive():
            # The thread may be waiting for room in the queue, so make room.
            while not queue.empty():
                queue.get()
            thread.join(0.01)
            if cancel_item is not None and thread.is_alive():
                cancel_item()
                thread.join(0.1)
