"""Strands of work, such as subscriptions: one strand works at a time, while others wait for Spark or a server.

In: a lock that the strands share. Out: blocks in which the calling thread works, or waits. Python's own code
does most of the work, so parallel strands would not be faster, but would need more memory and more sessions of
the publisher. Raises nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Condition, Lock

from pgsieve.resources.context import assign_within

_STRAND: ContextVar["Strand | None"] = ContextVar("strand", default=None)


class TicketLock:
    """A lock that strands get in the order of their requests, so that their results come in that order, too."""

    def __init__(self) -> None:
        self._changed, self._requested, self._released = Condition(), 0, 0

    @property
    def is_taken(self) -> bool:
        """Whether a strand has the lock."""
        return self._requested > self._released

    def acquire(self) -> None:
        """Wait until the caller has the lock."""
        with self._changed:
            former_request, self._requested = self._requested, self._requested + 1
            self._changed.wait_for(lambda: self._released == former_request)

    def release(self) -> None:
        """Pass the lock to the next strand."""
        with self._changed:
            self._released += 1
            self._changed.notify_all()


class Strand:
    """The work of one or more threads. The strand has the lock while one of them works."""

    def __init__(self, lock: TicketLock) -> None:
        self._lock, self._working, self._counted = lock, 0, Lock()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Within the block the calling thread belongs to this strand, and so do threads with a copy of its context."""
        with assign_within(_STRAND, self), take_strand():
            yield

    def begin(self) -> None:
        """Count a thread that works; the first one waits for the lock."""
        with self._counted:
            if not self._working:
                self._lock.acquire()
            self._working += 1

    def end(self) -> None:
        """Count a thread that no longer works; the last one releases the lock."""
        with self._counted:
            self._working -= 1
            if not self._working:
                self._lock.release()


@contextmanager
def take_strand() -> Iterator[None]:
    """Count the calling thread as working within the block: it waits for the strand's lock if need be."""
    strand = _STRAND.get()
    if strand is not None:
        strand.begin()
    try:
        yield
    finally:
        if strand is not None:
            strand.end()


@contextmanager
def release_strand() -> Iterator[None]:
    """Count the calling thread as waiting within the block, so that another strand may work."""
    strand = _STRAND.get()
    if strand is not None:
        strand.end()
    try:
        yield
    finally:
        if strand is not None:
            strand.begin()
