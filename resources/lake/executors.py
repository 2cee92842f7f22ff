"""Runners of functions on parts of data: Spark, the calling thread, or threads of this process.

In: the number of parts, and a function of a part's number. The function yields rows, usually a row (`FILE_SCHEMA`)
for each file that it writes. Out: the rows of all parts. Raises the function's errors; Spark wraps errors of
its executors.

Spark runs the work that is too much for one thread. With `threads[N]` in the configuration, threads replace
Spark, as on a machine without Java. The PostgreSQL driver, Arrow and the Parquet writer run without Python's
lock, so threads use several cores.
"""

import logging
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from threading import Event, Thread, Timer
from typing import Protocol
from zipimport import zipimporter

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.shared_jobs import Request, SharedParts, current_shared_jobs, tasks_of
from pgsieve.resources.lake.stores.shared_reads import begin_part
from pgsieve.resources.parts import MESSAGE_SCHEMA, Guard, Message, Part, Receivers, by_receiver
from pgsieve.resources.strands import release_strand
from pgsieve.resources.work import (
    DRIVER,
    add_costs,
    current_job_name,
    engine_of,
    joint_job_name,
    name_jobs,
    with_job_name,
)

#: The input of a Spark job: the numbers of the parts.
_NUMBERS = pa.schema({"id": pa.int64()})
#: Called with the number of finished parts.
OnProgress = Callable[[int], None]
#: A function that Spark runs on the batches of a task.
BatchFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


#: Spark splits a range of this length among all cores; the plan shows the number of splits.
_RANGE_LENGTH, _SPLITS = 1_000_000, re.compile(r"splits=(\d+)")
#: How many tasks of receivers there are for each core.
_TASKS_PER_CORE = 2
#: If the first job of a session takes longer, a warning is logged.
_SILENT_SECONDS = 20
_NO_EXECUTOR = (
    "Spark has run nothing for %d seconds: the cluster may have no free executor. The master's page shows which applications use"
    " its cores; spark.cores.max in `spark.conf` limits how many this one requests. This run waits."
)

_LOGGER = logging.getLogger(__name__)


def spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as a Spark schema."""
    # This imports pandas, which takes too long for commands without Spark.
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def arrow_schema(schema: StructType) -> pa.Schema:
    """A Spark schema as an Arrow schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema)


class Executors(Protocol):
    """The interface of a runner."""

    #: How many callers may call `run` in parallel, so that they share a job (`shared_jobs`).
    callers: int

    @property
    def number(self) -> int:
        """How many parts run at a time."""

    def run(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = FILE_SCHEMA
    ) -> pa.Table:
        """Run all parts, several at a time; return their rows. Runners other than Spark call `on_progress` after each part."""

    def exchange(self, part: Part, parts: int, receivers: Sequence[Receivers], schema: pa.Schema) -> pa.Table:
        """Run all parts. Their messages (`MESSAGE_SCHEMA`) go to the first receivers, whose messages go to the next ones.

        Returns the rows of the last receivers, which have this schema.
        """

    def prepare(self) -> None:
        """Begin to start the runner, without waiting, so that it is soon ready for parts."""

    def stop(self) -> None:
        """Make all running parts end soon, with an error."""


@contextmanager
def _warn_after(seconds: int) -> Iterator[None]:
    """Log a warning if the block, a session's first job, takes longer: Spark may be waiting for an executor."""
    timer = Timer(seconds, _LOGGER.warning, [_NO_EXECUTOR, seconds])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _pass_through(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def forget_archives() -> None:
    """Remove archives from a Python worker's cache of import finders; the next import adds them again.

    Before each task Spark makes Python reread all archives in this cache, once for each package in them
    (`setup_spark_files` of pyspark/worker_util.py; zipimporter.invalidate_caches). That takes longer than a
    small task.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]


def _run_parts(part: Part) -> BatchFunction:
    """A function of Spark's batches of part numbers that runs the parts."""

    def run(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        forget_archives()
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                begin_part()
                yield from part(number, iter)

    return run


def _run_receivers(receivers: Receivers) -> BatchFunction:
    """A function of Spark's batches of messages, in the order of their receivers, that runs the receivers."""

    def run(sent: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        forget_archives()
        for number, messages in by_receiver(sent):
            yield from receivers.receive(number, messages, iter)

    return run


def _exchange_in_memory(
    runner: "Executors", part: Part, parts: int, receivers: Sequence[Receivers], schema: pa.Schema
) -> pa.Table:
    """As in `Executors`, with the messages in memory."""
    sent = runner.run(part, parts, schema=MESSAGE_SCHEMA)
    for place, each in enumerate(receivers, 1):
        messages_by_receiver = defaultdict[int, list[Message]](list)
        for receiver_number, messages in by_receiver(sent.to_batches()):
            messages_by_receiver[receiver_number] += messages
        columns = schema if place == len(receivers) else MESSAGE_SCHEMA
        sent = runner.run(
            partial(_receive, each, list(messages_by_receiver.items())),
            len(messages_by_receiver),
            schema=columns,
        )
    return sent


def _receive(
    receivers: Receivers,
    messages_by_receiver: Sequence[tuple[int, Sequence[Message]]],
    number: int,
    guard: Guard,
) -> Iterable[pa.RecordBatch]:
    return receivers.receive(*messages_by_receiver[number], guard)


def run_first_job(session: SparkSession, parts: int) -> None:
    """Run a job without work, which starts a session's Python workers."""
    numbers = session.range(0, parts, 1, parts)
    numbers.mapInArrow(_pass_through, spark_schema(_NUMBERS)).toArrow()


class SparkExecutors:
    """Spark's executors, perhaps on other machines. Spark itself ends interrupted work.

    `cores` is the session's number of cores; None if its master does not show it.
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
            with _warn_after(_SILENT_SECONDS):
                session.range(1).collect()
            self._has_begun = True
        (plan,) = session.sql(f"explain select id from range({_RANGE_LENGTH})").collect()
        splits = _SPLITS.search(plan[0])
        return int(splits[1]) if splits else 1

    def run(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = FILE_SCHEMA
    ) -> pa.Table:
        """As in `Executors`; only Spark's UI shows the progress."""
        del on_progress
        if not parts:
            return schema.empty_table()
        with release_strand():
            rows = self._run_shared(part, parts) if schema.equals(FILE_SCHEMA) else None
            if rows is None:
                rows = self._run(part, parts, schema)
        return with_costs(engine_of(self._session()), parts, rows)

    def exchange(self, part: Part, parts: int, receivers: Sequence[Receivers], schema: pa.Schema) -> pa.Table:
        """As in `Executors`: one job, in which Spark's shuffle carries the messages.

        A task works for several receivers, since its start takes longer than most of them.
        """
        with release_strand():
            tasks = [min(each.number, _TASKS_PER_CORE * self.number) for each in receivers]
            session = with_job_name(self._session())
            sent = session.range(0, parts, 1, parts).mapInArrow(
                _run_parts(part), spark_schema(MESSAGE_SCHEMA)
            )
            for place, (each, number) in enumerate(zip(receivers, tasks, strict=True), 1):
                columns = schema if place == len(receivers) else MESSAGE_SCHEMA
                ordered = sent.repartition(number, "to").sortWithinPartitions("to")
                sent = ordered.mapInArrow(_run_receivers(each), spark_schema(columns))
            rows = sent.toArrow()
        return with_costs(engine_of(session), parts + sum(tasks), rows)

    def _run(self, part: Part, parts: int, schema: pa.Schema) -> pa.Table:
        """Run parts as a job with a task per part."""
        session = with_job_name(self._session())
        return session.range(0, parts, 1, parts).mapInArrow(_run_parts(part), spark_schema(schema)).toArrow()

    def _run_shared(self, part: Part, parts: int) -> pa.Table | None:
        """Run parts in a job that callers share; None if no jobs are shared, or the shared job has failed."""
        jobs = current_shared_jobs()
        return jobs and jobs.rows(Request(part, parts, current_job_name()), self._run_requests)

    def _run_requests(self, job: Sequence[Request]) -> Sequence[pa.Table | None]:
        """Run the parts of some callers as one job; return each caller's rows.

        If the job of several callers fails, each gets None, and then runs its parts alone. A single caller
        gets the error.
        """
        if len(job) == 1:
            return [self._run(job[0].part, job[0].parts, FILE_SCHEMA)]
        shared = SharedParts([request.part for request in job], tasks_of(job, self.number), FILE_SCHEMA)
        names = [request.name for request in job if request.name is not None]
        with name_jobs(*joint_job_name(names)) if names else nullcontext():
            try:
                rows = self._run(shared, len(shared.tasks), shared.row_schema)
            except Exception as error:  # noqa: BLE001 - each caller runs its parts alone, and gets its error.
                _LOGGER.debug("%d callers share no job: %s", len(job), error)
                return [None] * len(job)
        return shared.rows_by_caller(rows)

    def prepare(self) -> None:
        """As in `Executors`: start the session, and its first job."""
        if not self._is_preparing:
            self._is_preparing = True
            Thread(target=self._start, name="pgsieve-spark", daemon=True).start()

    def _start(self) -> None:
        # The next caller that needs the session gets the error.
        with suppress(Exception):
            run_first_job(self._session(), self.number)

    def stop(self) -> None:
        """As in `Executors`; Spark itself ends the running jobs. No further shared job begins."""
        if (jobs := current_shared_jobs()) is not None:
            jobs.stop()


class Threads:
    """Threads of this process; `number` for all callers together."""

    callers = 1

    def __init__(self, number: int) -> None:
        self.number = number
        self._running: set[Event] = set()

    def run(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = FILE_SCHEMA
    ) -> pa.Table:
        """As in `Executors`; if a part fails, the others end at their next batch."""
        is_over = Event()

        def until_over(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                if is_over.is_set():
                    raise CancelledError
                yield batch

        def write(number: int) -> list[pa.RecordBatch]:
            return list(part(number, until_over))

        self._running.add(is_over)
        writing = [_pool(self.number).submit(write, number) for number in range(parts)]
        rows: list[pa.RecordBatch] = []
        try:
            for count, each in enumerate(as_completed(writing), 1):
                rows += each.result()
                if on_progress is not None:
                    on_progress(count)
        finally:
            is_over.set()
            # After the return no thread may write, or read a snapshot.
            wait([each for each in writing if not each.cancel()])
            self._running.discard(is_over)
        return with_costs("threads", parts, pa.Table.from_batches(rows, schema))

    exchange = _exchange_in_memory

    def prepare(self) -> None:
        """As in `Executors`; threads need no preparation."""

    def stop(self) -> None:
        """As in `Executors`."""
        for is_over in tuple(self._running):
            is_over.set()


class _Inline:
    """The calling thread, for small work: one part after the other."""

    callers = number = 1

    def run(
        self, part: Part, parts: int, on_progress: OnProgress | None = None, schema: pa.Schema = FILE_SCHEMA
    ) -> pa.Table:
        """As in `Executors`."""
        rows: list[pa.RecordBatch] = []
        for number in range(parts):
            rows += part(number, iter)
            if on_progress is not None:
                on_progress(number + 1)
        return with_costs(DRIVER, parts, pa.Table.from_batches(rows, schema))

    exchange = _exchange_in_memory

    def prepare(self) -> None:
        """As in `Executors`; the thread needs no preparation."""

    def stop(self) -> None:
        """As in `Executors`; small work ends soon by itself."""


#: Runs small work.
INLINE: Executors = _Inline()


def with_costs(engine: str, parts: int | None, rows: pa.Table) -> pa.Table:
    """Add the costs of rows to the step's `Work`; return the rows.

    If the rows describe files (`FILE_SCHEMA`), the bytes of the files count. `parts` is the number of tasks; None
    means one per row.
    """
    describes_files = set(FILE_SCHEMA.names) <= set(rows.column_names)
    size = pc.sum(rows["size"]).as_py() or 0 if describes_files else rows.nbytes
    add_costs(engine, rows.num_rows if parts is None else parts, size)
    return rows


@cache
def _pool(number: int) -> ThreadPoolExecutor:
    """The pool of this number of threads, which all callers share."""
    return ThreadPoolExecutor(number, "pgsieve-executor")
