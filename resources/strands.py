"""Lets one strand work at a time, while other strands wait for Spark or a server.

A strand is work that one or more threads do, such as the work for one subscription. Most of the work is done by
Python's own code, and only one thread at a time can run Python code. So parallel strands would not be faster, but
would need more memory and more sessions of the publisher.

In: a lock that the strands share.
Out: context managers; within their blocks, the calling thread counts as working or as waiting.

Raises nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Condition, Lock

from pgsieve.resources.context import assign_within

_CURRENT_STRAND: ContextVar["Strand | None"] = ContextVar("strand", default=None)


class TicketLock:
    """A lock that strands get in the order in which they ask for it. So their results come in this order, too."""

    def __init__(self) -> None:
        self._condition, self._request_count, self._release_count = Condition(), 0, 0

    @property
    def is_taken(self) -> bool:
        """True if a strand has the lock."""
        return self._request_count > self._release_count

    def acquire(self) -> None:
        """Wait until the caller has the lock."""
        with self._condition:
            ticket, self._request_count = self._request_count, self._request_count + 1
            self._condition.wait_for(lambda: self._release_count == ticket)

    def release(self) -> None:
        """Pass the lock to the next strand."""
        with self._condition:
            self._release_count += 1
            self._condition.notify_all()


class Strand:
    """The work of one or more threads. The strand has the lock as long as at least one of its threads works."""

    def __init__(self, lock: TicketLock) -> None:
        self._lock, self._working_thread_count, self._count_lock = lock, 0, Lock()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Make the calling thread a thread of this strand for the block.

        A thread that runs in a copy of this thread's context belongs to the strand, too.
        """
        with assign_within(_CURRENT_STRAND, self), count_as_working():
            yield

    def begin_work(self) -> None:
        """Count this thread as working. If no other thread of the strand works, wait for the lock first."""
        with self._count_lock:
            if not self._working_thread_count:
                self._lock.acquire()
            self._working_thread_count += 1

    def end_work(self) -> None:
        """Count one thread less that works. If it was the last one, it releases the lock."""
        with self._count_lock:
            self._working_thread_count -= 1
            if not self._working_thread_count:
                self._lock.release()


@contextmanager
def count_as_working() -> Iterator[None]:
    """Count the calling thread as working within the block. If need be, it waits until its strand has the lock."""
    strand = _CURRENT_STRAND.get()
    if strand is not None:
        strand.begin_work()
    try:
        yield
    finally:
        if strand is not None:
            strand.end_work()


@contextmanager
def count_as_waiting() -> Iterator[None]:
    """Count the calling thread as waiting within the block, so that another strand can work."""
    strand = _CURRENT_STRAND.get()
    if strand is not None:
        strand.end_work()
    try:
        yield
    finally:
        if strand is not None:
            strand.begin_work()
