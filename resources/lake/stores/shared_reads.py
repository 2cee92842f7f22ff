"""Shares reads of row groups among readers that follow each other: each subscription reads the whole change log.

In: a reading, by a key with all that it depends on. Out: its result, computed once as long as there is room.
The first results are kept, as later readers read in the same order. Raises the reading's errors. A Python
worker of Spark keeps its own results, for the readers of the same part, and for the next task of the same run.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from uuid import uuid4

import pyarrow as pa

from pgsieve.resources.context import assigned

#: This many bytes are kept by a run, and by each of Spark's Python workers.
BYTES, WORKER_BYTES = 256 * 1024 * 1024, 64 * 1024 * 1024


class SharedReads:
    """Batches by their keys, up to a total size.

    Where it is sent by `name`, the receiving process has one of its own of that name.
    """

    def __init__(self, room: int = BYTES, name: str | None = None) -> None:
        self._whole, self._room, self._name = room, room, name
        self._kept: dict[Hashable, pa.RecordBatch] = {}
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
        """The batch of a key: the kept one, or a new one."""
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None:
            return kept
        made = make()
        with self._lock:
            if made.nbytes <= self._room and key not in self._kept:
                self._room -= made.nbytes
                self._kept[key] = made
        return made

    def make_room(self) -> None:
        """Let everything go where less than half of the room is left: from now on others are read."""
        with self._lock:
            if self._room < self._whole // 2:
                self._room = self._whole
                self._kept.clear()

    def __reduce__(self) -> tuple[Callable[[str | None], "SharedReads"], tuple[str | None]]:
        return _of_worker, (self._name,)


def _of_worker(name: str | None) -> SharedReads:
    """Shared reads of a name in the calling process; those of the name before are let go."""
    if name is None:
        return SharedReads(0)
    if name not in _BY_NAME:
        _BY_NAME.clear()
        _BY_NAME[name] = SharedReads(WORKER_BYTES, name)
    return _BY_NAME[name]


_BY_NAME: dict[str, SharedReads] = {}


def begin_part() -> None:
    """Make room in a Python worker, whose next readers read another part of the row groups."""
    for reads in _BY_NAME.values():
        reads.make_room()


_SHARED: ContextVar[SharedReads | None] = ContextVar("reads", default=None)


@contextmanager
def reads_shared() -> Iterator[None]:
    """Within the block, and the same thread of work, row groups that are read are kept for the next reader."""
    with assigned(_SHARED, SharedReads(name=uuid4().hex)):
        yield


def shared_reads() -> SharedReads:
    """The shared reads of the enclosing block; outside of one nothing is kept."""
    return _SHARED.get() or SharedReads(0)
