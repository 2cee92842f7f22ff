"""Reading ahead: a thread makes the next items while the caller works with those that came before.

In: an iterator, and how many items may wait. Out: the same items in the same order. It pays where both sides spend their time without
Python's lock: what a database sends is received while what came before is written as Parquet.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from queue import Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")


class _End:
    """The last thing that is said: the items have ended, or what ended them."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


@contextmanager
def ahead(items: Iterable[T], most: int = 2, stop: Callable[[], None] | None = None) -> Iterator[Iterator[T]]:
    """The items, of which up to `most` are made before they are asked for; raises what making them raises.

    With the block the thread has ended: whoever leaves early waits for the item that is being made, and no other is. `stop` is
    called again and again meanwhile, to have it made no further.
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
            # What it holds open ends with the thread, and not when nobody knows of it any more.
            if isinstance(items, Generator):
                items.close()

    def taken() -> Iterator[T]:
        while not isinstance(item := made.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    thread = Thread(target=copy_context().run, args=(make,), name="pgsieve-ahead", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        left.set()
        while thread.is_alive():
            # It may wait for room.
            while not made.empty():
                made.get()
            thread.join(0.01)
            if stop is not None and thread.is_alive():
                stop()
                thread.join(0.1)
