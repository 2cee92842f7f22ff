"""What runs a function of pgsieve's part by part: Spark, the thread that asks, or threads of this process.

In: a function of a part's number, which yields rows, as a rule one (`WRITTEN`) for each file that it writes, and how many parts there
are. Out: the rows of all parts. Raises what the function raises; of Spark's executors as Spark tells it.

Spark runs what is more than a thread should hold. Threads stand in for it on a machine without Java, where the configuration says so
(`threads[N]`). The driver of PostgreSQL, Arrow and the writer of Parquet work without Python's lock, so they keep as many cores busy.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from functools import cache
from threading import Event, Thread
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.parquet_files import WRITTEN
from pgsieve.resources.work import DRIVER, engine_of, named_here, note

#: Passes batches on as long as somebody waits for what becomes of them.
Guard = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
#: What a session numbers parts by.
_NUMBERS = pa.schema({"id": pa.int64()})
#: Hears how many parts are written.
Hear = Callable[[int], None]
#: Reads a part, whose rows it guards; yields what it makes of it: of files that it writes a row (`WRITTEN`) each.
Part = Callable[[int, Guard], Iterable[pa.RecordBatch]]


#: A range of so many numbers Spark splits among all cores; its plan says into how many parts.
_MANY, _SPLITS = 1_000_000, re.compile(r"splits=(\d+)")


def spark_schema(schema: pa.Schema) -> StructType:
    """The same columns as Spark has them."""
    # It draws in pandas, which commands without Spark have no time for.
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


class Executors(Protocol):
    """Those who write files of a lake."""

    @property
    def number(self) -> int:
        """How many parts are run at a time."""

    def written(
        self, part: Part, parts: int, hear: Hear | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """Have so many parts made, several at a time; the rows of all of them. `hear` is called where it is known."""

    def prepare(self) -> None:
        """Have what takes long to start be there when parts are given, without waiting for it."""

    def stop(self) -> None:
        """Have all that is being written end soon, with an error to who waits for it."""


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def begin(session: SparkSession, parts: int) -> None:
    """Have a session run its first job: with it come the processes of Python that run functions."""
    numbers = session.range(0, parts, 1, parts)
    numbers.mapInArrow(_same, spark_schema(_NUMBERS)).toArrow()


class SparkExecutors:
    """Spark's, who may be on other machines; what is interrupted Spark ends itself.

    `cores` are those of the session where its master names them; else the session is asked.
    """

    def __init__(self, session: Callable[[], SparkSession], cores: int | None = None) -> None:
        self._session, self._cores = session, cores
        self._has_begun = self._is_preparing = False

    @property
    def number(self) -> int:
        """As in `Executors`: a cluster may get more of them, or lose some."""
        if self._cores is not None:
            return self._cores
        session = self._session()
        if not self._has_begun:
            # Executors come once there is a job.
            session.range(1).collect()
            self._has_begun = True
        (plan,) = session.sql(f"explain select id from range({_MANY})").collect()
        splits = _SPLITS.search(plan[0])
        return int(splits[1]) if splits else 1

    def written(
        self, part: Part, parts: int, hear: Hear | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """As in `Executors`; what becomes of a part only Spark knows before all are written."""
        del hear

        def write(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    yield from part(number, iter)

        if not parts:
            return schema.empty_table()
        session = named_here(self._session())
        rows = session.range(0, parts, 1, parts).mapInArrow(write, spark_schema(schema)).toArrow()
        return noted(engine_of(session), parts, rows)

    def prepare(self) -> None:
        """As in `Executors`: the session, and its first job."""
        if not self._is_preparing:
            self._is_preparing = True
            Thread(target=self._start, name="pgsieve-spark", daemon=True).start()

    def _start(self) -> None:
        # Whoever needs the session is told why there is none.
        with suppress(Exception):
            begin(self._session(), self.number)

    def stop(self) -> None:
        """As in `Executors`."""


class Threads:
    """Threads of this process, so many at a time, whoever has something to write."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._waiting: set[Event] = set()

    def written(
        self, part: Part, parts: int, hear: Hear | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """As in `Executors`; where a part fails the others end with their next batch."""
        ended = Event()

        def guarded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                if ended.is_set():
                    raise CancelledError
                yield batch

        def write(number: int) -> list[pa.RecordBatch]:
            return list(part(number, guarded))

        self._waiting.add(ended)
        writing = [_pool(self.number).submit(write, number) for number in range(parts)]
        rows: list[pa.RecordBatch] = []
        try:
            for done, each in enumerate(as_completed(writing), 1):
                rows += each.result()
                if hear is not None:
                    hear(done)
        finally:
            ended.set()
            # Nobody writes any more, or reads a snapshot, once this has returned.
            wait([each for each in writing if not each.cancel()])
            self._waiting.discard(ended)
        return noted("threads", parts, pa.Table.from_batches(rows, schema))

    def prepare(self) -> None:
        """As in `Executors`; threads are there."""

    def stop(self) -> None:
        """As in `Executors`."""
        for ended in tuple(self._waiting):
            ended.set()


class _Inline:
    """The thread that asks, for what is few: one part after the other."""

    number = 1

    def written(
        self, part: Part, parts: int, hear: Hear | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """As in `Executors`."""
        rows: list[pa.RecordBatch] = []
        for number in range(parts):
            rows += part(number, iter)
            if hear is not None:
                hear(number + 1)
        return noted(DRIVER, parts, pa.Table.from_batches(rows, schema))

    def prepare(self) -> None:
        """As in `Executors`; the thread that asks is there."""

    def stop(self) -> None:
        """As in `Executors`; few rows have no end to wait for."""


#: Runs what is few.
INLINE: Executors = _Inline()


def noted(engine: str, parts: int | None, rows: pa.Table) -> pa.Table:
    """The rows, which are counted to the work of the step: bytes of files, or of themselves; without `parts` a task a file."""
    size = pc.sum(rows["size"]).as_py() or 0 if rows.schema.equals(WRITTEN) else rows.nbytes
    note(engine, rows.num_rows if parts is None else parts, size)
    return rows


@cache
def _pool(number: int) -> ThreadPoolExecutor:
    """The threads of this process that write for everybody."""
    return ThreadPoolExecutor(number, "pgsieve-executor")
