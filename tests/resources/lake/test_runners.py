"""The choice of a runner, and its threads: they run all parts, a limited number at a time, and stop after an error. No JVM."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from os import cpu_count
from pathlib import Path

import pyarrow as pa
import pytest

from pgsieve.resources.lake.byte_limits import SMALL_BYTES_SETTING
from pgsieve.resources.lake.delta.errors import SparkUnavailableError
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD, ThreadRunner
from pgsieve.resources.lake.masters import parse_core_count, parse_thread_count
from pgsieve.resources.lake.resource import LakeResource
from pgsieve.resources.lake.runners import Runner, SparkRunner
from pgsieve.resources.lake.session import SparkEngine
from pgsieve.resources.parts import Guard, Message, Receivers, make_message
from tests.fixtures.pgsieve_replica import engine

_WAIT_SECONDS = 30.0


def row(name: str) -> pa.RecordBatch:
    """A row of a file."""
    return pa.RecordBatch.from_pylist([{"path": name}], FILE_SCHEMA)


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
        ("threads[2]", None),
        ("yarn", None),
    ],
)
def test_cores_of_this_machine_that_a_master_means(master: str, cores: int | None) -> None:
    assert parse_core_count(master) == cores


@pytest.mark.parametrize(
    ("master", "threads"),
    [("threads[2]", 2), ("threads[*]", cpu_count()), ("local[2]", None), ("sc://localhost", None)],
)
def test_threads_replace_spark_if_the_configuration_says_so(master: str, threads: int | None) -> None:
    engine = SparkEngine(master=master)
    assert (parse_thread_count(master), engine.threads) == (threads, threads)
    # Work that only Spark can do uses Spark on this machine.
    assert engine.spark_master == (f"local[{threads}]" if threads else master)


def test_spark_runs_parts_unless_threads_replace_it(tmp_path: Path) -> None:
    def runner(small: int, size: int | None, master: str) -> Runner:
        conf = {SMALL_BYTES_SETTING: str(small)}
        engine = SparkEngine(master=master, spark_config=conf)
        return LakeResource(uri=str(tmp_path), engine=engine).open().policy.choose_runner(size)

    many, few = 2**23 + 1, 2**23
    for master in ("local[*]", "local[2]", "spark://localhost:7077", "sc://localhost"):
        assert isinstance(runner(few, many, master), SparkRunner), master
        assert isinstance(runner(few, None, master), SparkRunner), master
        assert isinstance(runner(-1, 0, master), SparkRunner), master
        assert runner(few, few, master) is CALLING_THREAD
    assert isinstance(runner(few, many, "threads[2]"), ThreadRunner)
    assert runner(few, few, "threads[2]") is CALLING_THREAD


def test_without_java_both_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(SparkUnavailableError, match="Spark needs Java") as refused:
        SparkEngine().check_java()
    hint = refused.value.hint or ""
    assert "install a JDK or JRE 17 or 21" in hint
    assert 'spark: {master: "threads[' in hint
    SparkEngine(master="sc://localhost").check_java()
    with pytest.raises(SparkUnavailableError) as refused:
        SparkEngine(master="threads[2]").check_java()
    assert "threads" not in (refused.value.hint or "")


def test_all_parts_are_written_with_limited_parallelism() -> None:
    working = threading.Semaphore(2)

    def part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        assert working.acquire(blocking=False), "too many parts at a time"
        try:
            for each in range(number):
                yield from guard([row(f"{number}.{each}")])
        finally:
            working.release()

    threads = ThreadRunner(2)
    with ThreadPoolExecutor(2) as pool:  # two tables, which share the threads
        tables = list(pool.map(lambda parts: threads.run(part, parts), (9, 5)))
    for table, parts in zip(tables, (9, 5), strict=True):
        names = {f"{number}.{each}" for number in range(parts) for each in range(number)}
        assert set(table["path"].to_pylist()) == names
        assert table.schema == FILE_SCHEMA
    assert threads.run(part, 0).num_rows == 0


_SUMS = pa.schema([("receiver", pa.int64()), ("sum", pa.int64())])


def _sends(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
    """Send each number below 10, as often as the part's number says, to the receiver of its last two bits."""
    yield from guard(make_message(to % 4, number, bytes([to])) for to in range(10) for _ in range(number))


def _adds(receiver: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
    """Send the sum on."""
    total = sum(content.to_pybytes()[0] for _, content in messages)
    yield from guard([make_message(receiver % 2, receiver, total.to_bytes(8, "little"))])


def _sums(receiver: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
    total = sum(int.from_bytes(content.to_pybytes(), "little") for _, content in messages)
    yield from guard([pa.RecordBatch.from_pylist([{"receiver": receiver, "sum": total}], _SUMS)])


@pytest.mark.parametrize(
    "runner",
    [
        CALLING_THREAD,
        ThreadRunner(2),
        pytest.param(SparkRunner(lambda: engine().session, 2), marks=pytest.mark.spark),
    ],
    ids=["driver", "threads", "spark"],
)
def test_receivers_get_all_messages_of_all_parts(runner: Runner) -> None:
    """It may start Spark's session, which takes most of its time."""
    sums = runner.exchange(_sends, 4, [Receivers(4, _adds), Receivers(2, _sums)], _SUMS)
    every = (0 + 1 + 2 + 3) * sum(range(10))
    even = (0 + 1 + 2 + 3) * sum(number for number in range(10) if number % 2 == 0)
    assert sorted(tuple(row.values()) for row in sums.to_pylist()) == [(0, even), (1, every - even)]
    assert sums.schema.equals(_SUMS)
    assert runner.exchange(_sends, 1, [Receivers(4, _adds), Receivers(2, _sums)], _SUMS).num_rows == 0


def endless(begun: threading.Event) -> Iterator[pa.RecordBatch]:
    """Rows without end."""
    while True:
        begun.set()
        yield row("")


def test_a_failing_part_ends_the_others_and_its_error_is_raised() -> None:
    begun, parts = threading.Event(), []

    def part(number: int, guard: Guard) -> Iterable[pa.RecordBatch]:
        parts.append(number)
        if number:
            return guard(endless(begun))
        assert begun.wait(_WAIT_SECONDS)
        raise OSError(28, "No space left on device")

    threads = ThreadRunner(2)
    with pytest.raises(OSError, match="No space left") as raised:
        threads.run(part, 6)
    assert raised.value.errno == 28
    assert set(parts) <= {0, 1, 2}, "a part began after another had failed"
    assert threads.run(lambda number, _: [row(str(number))], 2).num_rows == 2


def test_a_stopped_part_ends_with_its_next_batch() -> None:
    begun, threads = threading.Event(), ThreadRunner(2)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(threads.run, lambda _, guard: guard(endless(begun)), 5)
        assert begun.wait(_WAIT_SECONDS)
        threads.stop(cancels_jobs=False)
        with pytest.raises(CancelledError):
            writing.result(_WAIT_SECONDS)


def test_the_number_of_written_parts_is_reported() -> None:
    received: list[int] = []
    ThreadRunner(2).run(lambda number, _: [row(str(number))], 3, received.append)
    assert received == [1, 2, 3]
