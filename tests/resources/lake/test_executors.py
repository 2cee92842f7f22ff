"""Threads that write files: all parts, so many at a time, and none that goes on once another has failed. No JVM."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from os import cpu_count

import pyarrow as pa
import pytest

from pgsieve.resources.lake.delta.parquet_files import WRITTEN
from pgsieve.resources.lake.executors import Guard, Threads, cores_of

_WAIT_SECONDS = 30.0


def row(name: str) -> pa.RecordBatch:
    """The row of a file."""
    return pa.RecordBatch.from_pylist([{"path": name}], WRITTEN)


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[*]", cpu_count()),
        ("local[*,4]", cpu_count()),
        ("local[2, 4]", 2),
        ("local-cluster[2,1,1024]", None),
        ("spark://localhost:7077", None),
        ("sc://localhost", None),
        ("yarn", None),
    ],
)
def test_cores_of_this_machine_that_a_master_means(master: str, cores: int | None) -> None:
    assert cores_of(master) == cores


def test_all_parts_are_written_so_many_at_a_time() -> None:
    working = threading.Semaphore(2)

    def part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        assert working.acquire(blocking=False), "too many at a time"
        try:
            for each in range(number):
                yield from guard([row(f"{number}.{each}")])
        finally:
            working.release()

    threads = Threads(2)
    with ThreadPoolExecutor(2) as pool:  # Two tables, which share the threads.
        tables = list(pool.map(lambda parts: threads.written(part, parts), (9, 5)))
    for table, parts in zip(tables, (9, 5), strict=True):
        names = {f"{number}.{each}" for number in range(parts) for each in range(number)}
        assert set(table["path"].to_pylist()) == names
        assert table.schema == WRITTEN
    assert threads.written(part, 0).num_rows == 0


def endless(begun: threading.Event) -> Iterator[pa.RecordBatch]:
    """Rows without an end."""
    while True:
        begun.set()
        yield row("")


def test_a_part_that_fails_ends_the_others_and_what_it_raised_is_raised() -> None:
    begun, parts = threading.Event(), []

    def part(number: int, guard: Guard) -> Iterable[pa.RecordBatch]:
        parts.append(number)
        if number:
            return guard(endless(begun))
        assert begun.wait(_WAIT_SECONDS)
        raise OSError(28, "No space left on device")

    threads = Threads(2)
    with pytest.raises(OSError, match="No space left") as raised:
        threads.written(part, 6)
    assert raised.value.errno == 28
    assert set(parts) <= {0, 1, 2}, "parts were begun after one had failed"
    assert threads.written(lambda number, _: [row(str(number))], 2).num_rows == 2


def test_what_is_stopped_ends_with_its_next_batch() -> None:
    begun, threads = threading.Event(), Threads(2)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(threads.written, lambda _, guard: guard(endless(begun)), 5)
        assert begun.wait(_WAIT_SECONDS)
        threads.stop()
        with pytest.raises(CancelledError):
            writing.result(_WAIT_SECONDS)


def test_how_many_parts_are_written_is_told() -> None:
    heard: list[int] = []
    Threads(2).written(lambda number, _: [row(str(number))], 3, heard.append)
    assert heard == [1, 2, 3]
