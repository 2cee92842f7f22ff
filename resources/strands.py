"""Strands of work, such as subscriptions: one of them works at a time, and meanwhile others wait for Spark or a server.

In: a turn that the strands share. Out: blocks in which the calling thread works, or waits. Most work is Python's own, so
that strands side by side would not be faster; they would need more memory, and more sessions of the publisher. Raises
nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Condition, Lock

_STRAND: ContextVar["Strand | None"] = ContextVar("strand", default=None)


class Turn:
    """The turn to work: strands get it in the order in which they ask for it, so that the results come in order, too."""

    def __init__(self) -> None:
        self._changed, self._asked, self._given_back = Condition(), 0, 0

    @property
    def is_taken(self) -> bool:
        """Whether a strand has it."""
        return self._asked > self._given_back

    def take(self) -> None:
        """Wait until it is this caller's."""
        with self._changed:
            before, self._asked = self._asked, self._asked + 1
            self._changed.wait_for(lambda: self._given_back == before)

    def give_back(self) -> None:
        """Let the next one have it."""
        with self._changed:
            self._given_back += 1
            self._changed.notify_all()


class Strand:
    """Work of one thread or several, which has the turn as long as any of them works."""

    def __init__(self, turn: Turn) -> None:
        self._turn, self._working, self._counted = turn, 0, Lock()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Within the block the calling thread, and those that it starts, are of this strand."""
        token = _STRAND.set(self)
        try:
            with working():
                yield
        finally:
            _STRAND.reset(token)

    def begin(self) -> None:
        """One thread more works: the first waits for the turn."""
        with self._counted:
            if not self._working:
                self._turn.take()
            self._working += 1

    def end(self) -> None:
        """One thread works no more: the last gives the turn to another strand."""
        with self._counted:
            self._working -= 1
            if not self._working:
                self._turn.give_back()


@contextmanager
def working() -> Iterator[None]:
    """Within the block the calling thread works; it is one that its strand has started."""
    strand = _STRAND.get()
    if strand is not None:
        strand.begin()
    try:
        yield
    finally:
        if strand is not None:
            strand.end()


@contextmanager
def waiting() -> Iterator[None]:
    """Within the block the calling thread, which works, waits for something: others may work."""
    strand = _STRAND.get()
    if strand is not None:
        strand.end()
    try:
        yield
    finally:
        if strand is not None:
            strand.begin()
