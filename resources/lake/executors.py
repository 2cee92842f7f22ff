"""Runners of functions on parts of data: Spark, the calling thread, or threads of this process.

In: the number of parts, and a function of a part's number. The function yields rows, usually one (`WRITTEN`)
per file that it writes. Out: the rows of all parts. Raises the function's errors; Spark wraps those of its
executors.

Spark runs work that is too much for one thread. On a machine without Java, threads replace it if the
configuration says so (`threads[N]`). The PostgreSQL driver, Arrow and the Parquet writer run without Python's
lock, so threads use several cores.
"""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from threading import Event, Thread, Timer
from typing import Protocol
from zipimport import zipimporter

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.parquet_files import WRITTEN
from pgsieve.resources.lake.shared_jobs import PartsOfMany, Request, shared_jobs, tasks_of
from pgsieve.resources.lake.stores.shared_reads import begin_part
from pgsieve.resources.parts import Part
from pgsieve.resources.strands import waiting
from pgsieve.resources.work import DRIVER, called, called_here, common_name, engine_of, named_here, note

#: The column with the numbers of parts in a Spark job.
_NUMBERS = pa.schema({"id": pa.int64()})
#: Called with the number of finished parts.
OnProgress = Callable[[int], None]


#: Spark splits a range of this many numbers among all cores; the plan shows the number of splits.
_MANY, _SPLITS = 1_000_000, re.compile(r"splits=(\d+)")
#: If a cluster has not ended the first job of a session after this many seconds, a warning is logged.
_SILENT_SECONDS = 20
_NO_EXECUTOR = (
    "Spark has run nothing for %d seconds: the cluster may have no free executor. The master's page shows which applications use"
    " its cores; spark.cores.max in `spark.conf` limits how many this one requests. This run waits."
)

_LOGGER = logging.getLogger(__name__)


def spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as Spark's."""
    # It imports pandas, which takes too long for commands without Spark.
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


class Executors(Protocol):
    """The interface of a runner that writes files of a lake."""

    #: How many callers may wait for rows at a time, so that one job serves them all (`shared_jobs`).
    callers: int

    @property
    def number(self) -> int:
        """How many parts run at a time."""

    def written(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """Run all parts, several at a time; return their rows.

        Except by Spark, `on_progress` is called after each part.
        """

    def prepare(self) -> None:
        """Begin to start the runner, without waiting, so that it is ready for the first parts."""

    def stop(self) -> None:
        """Make all running parts end soon; their callers get an error."""


@contextmanager
def _warned_after(seconds: int) -> Iterator[None]:
    """Log a warning if the block, a session's first job, takes longer, since Spark may be waiting for an executor."""
    waiting = Timer(seconds, _LOGGER.warning, [_NO_EXECUTOR, seconds])
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def _same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def forget_archives() -> None:
    """Empty a Python worker's cache of finders of archives; the next import fills it again.

    Before each task Spark has Python reread all archives in that cache, once for each package in them, which
    takes longer than a small task (`setup_spark_files` of pyspark/worker_util.py;
    zipimporter.invalidate_caches).
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]


def begin(session: SparkSession, parts: int) -> None:
    """Run a session's first job, which starts the Python processes that run functions."""
    numbers = session.range(0, parts, 1, parts)
    numbers.mapInArrow(_same, spark_schema(_NUMBERS)).toArrow()


class SparkExecutors:
    """Spark's executors, perhaps on other machines; Spark itself ends interrupted work.

    `cores` is the session's number of cores, if its master names it; otherwise the session is asked.
    """

    callers = 16

    def __init__(self, session: Callable[[], SparkSession], cores: int | None = None) -> None:
        self._session, self._cores = session, cores
        self._has_begun = self._is_preparing = False

    @property
    def number(self) -> int:
        """As in `Executors`; on a cluster it may change."""
        if self._cores is not None:
            return self._cores
        session = self._session()
        if not self._has_begun:
            # Executors start with the first job.
            with _warned_after(_SILENT_SECONDS):
                session.range(1).collect()
            self._has_begun = True
        (plan,) = session.sql(f"explain select id from range({_MANY})").collect()
        splits = _SPLITS.search(plan[0])
        return int(splits[1]) if splits else 1

    def written(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """As in `Executors`; Spark reports its progress only in its own UI."""
        del on_progress
        if not parts:
            return schema.empty_table()
        with waiting():
            rows = self._shared(part, parts) if schema.equals(WRITTEN) else None
            if rows is None:
                rows = self._run(part, parts, schema)
        return noted(engine_of(self._session()), parts, rows)

    def _run(self, part: Part, parts: int, schema: pa.Schema) -> pa.Table:
        """Run parts as a job with a task per part."""

        def write(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            forget_archives()
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    begin_part()
                    yield from part(number, iter)

        session = named_here(self._session())
        return session.range(0, parts, 1, parts).mapInArrow(write, spark_schema(schema)).toArrow()

    def _shared(self, part: Part, parts: int) -> pa.Table | None:
        """Run parts in a job that callers share.

        None if no job is shared, or if the shared job has failed.
        """
        jobs = shared_jobs()
        return jobs and jobs.rows(Request(part, parts, called_here()), self._run_together)

    def _run_together(self, job: Sequence[Request]) -> Sequence[pa.Table | None]:
        """Run the parts of some callers as one job.

        If the job of several callers fails, each gets None, and runs its parts alone. A single caller gets
        the error.
        """
        if len(job) == 1:
            return [self._run(job[0].part, job[0].parts, WRITTEN)]
        together = PartsOfMany([request.part for request in job], tasks_of(job, self.number), WRITTEN)
        names = [request.name for request in job if request.name is not None]
        with called(*common_name(names)) if names else nullcontext():
            try:
                rows = self._run(together, len(together.tasks), together.written)
            except Exception as error:  # noqa: BLE001 - each caller runs its parts alone, and gets its own error.
                _LOGGER.debug("%d callers share no job: %s", len(job), error)
                return [None] * len(job)
        return together.of_callers(rows)

    def prepare(self) -> None:
        """As in `Executors`: start the session, and its first job."""
        if not self._is_preparing:
            self._is_preparing = True
            Thread(target=self._start, name="pgsieve-spark", daemon=True).start()

    def _start(self) -> None:
        # The next caller that needs the session gets the error.
        with suppress(Exception):
            begin(self._session(), self.number)

    def stop(self) -> None:
        """As in `Executors`; Spark itself ends the running jobs, and callers begin no further shared job."""
        if (jobs := shared_jobs()) is not None:
            jobs.stop()


class Threads:
    """Threads of this process, a fixed number for all callers together."""

    callers = 1

    def __init__(self, number: int) -> None:
        self.number = number
        self._waiting: set[Event] = set()

    def written(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """As in `Executors`; if a part fails, the others end at their next batch."""
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
                if on_progress is not None:
                    on_progress(done)
        finally:
            ended.set()
            # After the return no thread may still write, or read a snapshot.
            wait([each for each in writing if not each.cancel()])
            self._waiting.discard(ended)
        return noted("threads", parts, pa.Table.from_batches(rows, schema))

    def prepare(self) -> None:
        """As in `Executors`; threads need no preparation."""

    def stop(self) -> None:
        """As in `Executors`."""
        for ended in tuple(self._waiting):
            ended.set()


class _Inline:
    """The calling thread, for small work: one part after the other."""

    callers = number = 1

    def written(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = WRITTEN
    ) -> pa.Table:
        """As in `Executors`."""
        rows: list[pa.RecordBatch] = []
        for number in range(parts):
            rows += part(number, iter)
            if on_progress is not None:
                on_progress(number + 1)
        return noted(DRIVER, parts, pa.Table.from_batches(rows, schema))

    def prepare(self) -> None:
        """As in `Executors`; nothing has to be started."""

    def stop(self) -> None:
        """As in `Executors`; small work ends soon by itself."""


#: Runs small work.
INLINE: Executors = _Inline()


def noted(engine: str, parts: int | None, rows: pa.Table) -> pa.Table:
    """Add rows to the step's `Work`, and return them.

    If they describe files (`WRITTEN`), the files' bytes count. `parts` is the number of tasks; None means one
    per row.
    """
    size = pc.sum(rows["size"]).as_py() or 0 if rows.schema.equals(WRITTEN) else rows.nbytes
    note(engine, rows.num_rows if parts is None else parts, size)
    return rows


@cache
def _pool(number: int) -> ThreadPoolExecutor:
    """The threads of this process, shared by all callers."""
    return ThreadPoolExecutor(number, "pgsieve-executor")
