"""Caches row groups (the units in which Parquet files are read), so that not every reader has to read them.

Each subscription of a slot reads the whole change log (the slot's raw messages), so the same row groups are needed
several times.

In: a function that reads a row group, and a key that identifies the row group.
Out: the batch that the function returns. It is cached if the cache has room for it.

A full cache keeps its first batches, because each reader begins with the same row groups. A Python worker of Spark
has its own cache. The readers of one task share this cache, and so do later tasks of the run. Raises the errors of
the function.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from uuid import uuid4

import pyarrow as pa

from pgsieve.resources.context import assign_within

#: The size in bytes of the cache of a run, and of the cache of a Python worker of Spark.
RUN_CACHE_BYTES, WORKER_CACHE_BYTES = 256 * 1024 * 1024, 64 * 1024 * 1024


class BatchCache:
    """A cache of batches by their keys, up to a total size in bytes.

    If it is sent to another process, that process gets its own cache with the same `name`.
    """

    def __init__(self, size: int = RUN_CACHE_BYTES, name: str | None = None) -> None:
        self._total_bytes, self._free_bytes, self._name = size, size, name
        self._batches: dict[Hashable, pa.RecordBatch] = {}
        self._lock = Lock()

    def get(self, key: Hashable, read_batch: Callable[[], pa.RecordBatch]) -> pa.RecordBatch:
        """The batch of a key. It comes from the cache, or else from `read_batch`."""
        with self._lock:
            cached_batch = self._batches.get(key)
        if cached_batch is not None:
            return cached_batch
        batch = read_batch()
        with self._lock:
            if batch.nbytes <= self._free_bytes and key not in self._batches:
                self._free_bytes -= batch.nbytes
                self._batches[key] = batch
        return batch

    def make_room(self) -> None:
        """Empty the cache if less than half of it is free. It is called when the next readers will read other row groups."""
        with self._lock:
            if self._free_bytes < self._total_bytes // 2:
                self._free_bytes = self._total_bytes
                self._batches.clear()

    def __reduce__(self) -> tuple[Callable[[str | None], "BatchCache"], tuple[str | None]]:
        return _get_worker_cache, (self._name,)


def _get_worker_cache(name: str | None) -> BatchCache:
    """The cache with this name in this process. A new name gets an empty cache, which replaces the former one."""
    if name is None:
        return BatchCache(0)
    if name not in _CACHE_BY_NAME:
        _CACHE_BY_NAME.clear()
        _CACHE_BY_NAME[name] = BatchCache(WORKER_CACHE_BYTES, name)
    return _CACHE_BY_NAME[name]


_CACHE_BY_NAME: dict[str, BatchCache] = {}


def make_room_for_next_part() -> None:
    """Make room in the caches of a Python worker. The next readers will read another part of the row groups."""
    for batch_cache in _CACHE_BY_NAME.values():
        batch_cache.make_room()


_CURRENT_CACHE: ContextVar[BatchCache | None] = ContextVar("batch_cache", default=None)


@contextmanager
def share_batch_cache() -> Iterator[None]:
    """Share a cache of row groups within the block. Threads that have a copy of the block's context share it, too."""
    with assign_within(_CURRENT_CACHE, BatchCache(name=uuid4().hex)):
        yield


def get_batch_cache() -> BatchCache:
    """The cache of the enclosing `share_batch_cache`. If there is none, a cache that holds nothing."""
    return _CURRENT_CACHE.get() or BatchCache(0)
