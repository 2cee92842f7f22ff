"""The interface of runners, which run functions on parts of data, and the runner that is Spark.

In: the number of parts, and a function (`Part`). A part is what one task or thread does at a time. The function gets
    the number of a part, and a guard, which ends the part once its result is not needed (`resources.parts`). It yields
    rows. If it writes files, it yields a row for each file (`FILE_SCHEMA`).
Out: the rows of all parts.

Raises the errors of the function. Spark wraps the errors of its executors.

Spark runs the work that is too much for one thread. The other runners are in
`pgsieve.resources.lake.in_process_runners`.
"""

import gc
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from functools import partial
from threading import Lock, Thread
from typing import Any, Protocol
from weakref import WeakSet
from zipimport import zipimporter

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA
from pgsieve.resources.lake.shared_jobs import Request, SharedParts, divide_into_tasks, get_shared_jobs
from pgsieve.resources.lake.stores.batch_cache import make_room_for_next_part
from pgsieve.resources.parts import MESSAGE_SCHEMA, Part, Receivers, group_by_receiver
from pgsieve.resources.slow_block import report_if_slow
from pgsieve.resources.strands import count_as_waiting
from pgsieve.resources.work import (
    add_costs,
    cancel_jobs,
    get_job_name,
    join_job_names,
    name_engine,
    name_jobs,
    with_job_name,
)

#: The columns of the input of a Spark job: the numbers of the parts.
_PART_NUMBER_SCHEMA = pa.schema({"id": pa.int64()})
#: The output of a Spark job: batches of rows, as bytes. Spark passes bytes on as they are. Spark would convert other
#: columns row by row.
_PACKED_SCHEMA = pa.schema({"batch": pa.binary()})
#: A function that is called with the number of parts that have finished.
OnProgress = Callable[[int], None]
#: A function that Spark runs on the batches of a task.
BatchFunction = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


#: Spark divides a range of this length into as many splits as it has cores. The text of the plan shows their number.
_RANGE_LENGTH, _SPLITS = 1_000_000, re.compile(r"splits=(\d+)")
#: Receivers (functions that get messages from parts) run in at most this many tasks for each core of Spark.
_TASKS_PER_CORE = 2
#: The number of cores of a cluster is read again after this many seconds.
_PARALLELISM_SECONDS = 5
#: A runner is told to stop, and told again each time this many seconds have passed.
_STOP_INTERVAL_SECONDS = 0.1
#: If the first job of a session takes longer than this, a warning is logged.
_SILENT_SECONDS = 20
_NO_EXECUTOR = (
    "Spark has run nothing for %d seconds: the cluster may have no free executor. The master's page shows which applications use"
    " its cores; spark.cores.max in `spark.conf` limits how many this one requests. This run waits."
)

_LOGGER = logging.getLogger(__name__)


def to_spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as a Spark schema."""
    # This import imports pandas, too, which takes too long for commands that do not need Spark.
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """A Spark schema as an Arrow schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema)


class Runner(Protocol):
    """The interface of a runner."""

    #: How many callers should call `run` at the same time, so that their parts share a job (`shared_jobs`).
    max_callers: int

    @property
    def parallelism(self) -> int:
        """The number of parts that run at the same time."""

    def run(
        self,
        part: Part,
        part_count: int,
        on_progress: OnProgress | None = None,
        schema: pa.Schema = FILE_SCHEMA,
    ) -> pa.Table:
        """Call `part` for each of the `part_count` parts, several at the same time. Return the rows of all parts.

        Runners other than Spark call `on_progress` after each part.
        """

    def exchange(
        self, part: Part, part_count: int, receivers: Sequence[Receivers], schema: pa.Schema
    ) -> pa.Table:
        """Run all parts, and then several groups of receivers, one group after the other.

        A receiver is a function that continues the work with the messages that were sent to it. The parts yield messages
        (`MESSAGE_SCHEMA`) to the first group, and each group yields messages to the next.

        Returns the rows that the last group yields. These rows have the columns of `schema`.
        """

    def prepare(self) -> None:
        """Begin to start the runner, and do not wait for it. It will be ready sooner when `run` is called."""

    def stop(self, *, cancels_jobs: bool) -> None:
        """Make the parts that are running end soon, with an error. But small work goes on.

        Jobs of Spark go on, too, unless `cancels_jobs` is true. All callers may share them.
        """


def _pass_through(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the batches unchanged."""
    yield from batches


def prepare_worker() -> None:
    """Make the tasks of a Python worker start and end faster. Each task calls this function.

    Python's cache of import finders has a finder for each package in an archive. Before each task Spark makes each finder
    read its archive again (`setup_spark_files` of pyspark/worker_util.py; zipimporter.invalidate_caches). This takes
    longer than a small task. So the finders of archives are removed from the cache. The next import adds them again.

    After each task the worker collects garbage, and visits all objects of all imported modules, although these stay until
    the worker ends. So the first task excludes them from all collections.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter):
            del sys.path_importer_cache[path]
    if not gc.get_freeze_count():
        gc.freeze()


def _make_row_packer(run_batches: BatchFunction, schema: pa.Schema) -> BatchFunction:
    """Return a function that Spark calls with batches. It packs the rows of this schema that `run_batches` yields."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for rows in run_batches(batches):
            octets = rows.select(schema.names).cast(schema).serialize()
            offsets = pa.array([0, octets.size], pa.int32()).buffers()[1]
            column = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, octets])
            yield pa.RecordBatch.from_arrays([column], schema=_PACKED_SCHEMA)

    return run


def _unpack_rows(packed_rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows that `_make_row_packer` has packed."""
    buffers = (packed_batch.as_buffer() for packed_batch in packed_rows["batch"])
    return pa.Table.from_batches([pa.ipc.read_record_batch(buffer, schema) for buffer in buffers], schema)


def _make_part_runner(part: Part) -> BatchFunction:
    """Return a function that Spark calls with batches of the numbers of parts. It runs these parts."""

    def run(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for batch in numbers:
            for number in batch.column(0).to_pylist():
                make_room_for_next_part()
                yield from part(number, iter)

    return run


def _make_receiver_runner(receivers: Receivers) -> BatchFunction:
    """Return a function that Spark calls with batches of messages, ordered by receiver. It runs these receivers."""

    def run(message_rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        prepare_worker()
        for number, messages in group_by_receiver(message_rows):
            yield from receivers.receive(number, messages, iter)

    return run


def stop_until_done(
    runner: Runner,
    futures: Sequence[Future[Any]],
    reason: BaseException,
    stop_others: Callable[[], None] = lambda: None,
) -> None:
    """Let no further one of `futures` begin, and tell the runner to stop until all of them are done.

    If the reason is an interruption (Ctrl-C), Spark's jobs are cancelled. `stop_others` stops what else the futures may wait
    for. A request ends only what runs at that moment. Afterwards a future may begin something else, so the request is
    repeated.
    """
    running_futures = [future for future in futures if not future.cancel()]
    while wait(running_futures, _STOP_INTERVAL_SECONDS).not_done:
        runner.stop(cancels_jobs=is_interruption(reason))
        stop_others()


def is_interruption(error: BaseException) -> bool:
    """True if an error is an interruption: KeyboardInterrupt, or Dagster's error for it."""
    return not isinstance(error, Exception)


#: The sessions that have run a job. Spark starts executors only for the first job of a session.
_started_sessions: WeakSet[SparkSession] = WeakSet()
#: Several runners may prepare the same session. The first one runs the first job with this lock.
_FIRST_JOB_LOCK = Lock()


def run_first_job(session: SparkSession, part_count: int) -> None:
    """Run a job that does nothing. It starts the Python workers of a session."""
    part_numbers = session.range(0, part_count, 1, part_count)
    part_numbers.mapInArrow(_pass_through, to_spark_schema(_PART_NUMBER_SCHEMA)).toArrow()


def make_part_frame(
    session: SparkSession, part: Part, part_count: int, schema: StructType | str
) -> DataFrame:
    """The rows of parts as a DataFrame with these columns. A task of Spark runs a part."""
    return _map_part_numbers(session, part_count, _make_part_runner(part), schema)


def _map_part_numbers(
    session: SparkSession, part_count: int, run: BatchFunction, schema: StructType | str
) -> DataFrame:
    return session.range(0, part_count, 1, part_count).mapInArrow(run, schema)


class SparkRunner:
    """The runner that uses Spark's executors, which may be on other machines.

    `cores` is the number of cores of the session; None if the address of Spark's master does not show it.
    """

    max_callers = 16

    def __init__(self, get_session: Callable[[], SparkSession], cores: int | None = None) -> None:
        self._get_own_session, self._cores = get_session, cores
        self._session: SparkSession | None = None
        self._is_preparing = False
        self._read_parallelism, self._read_at = 1, -math.inf

    @property
    def parallelism(self) -> int:
        """The number of parts that run at the same time. On a cluster it may change, so it is read again every few seconds."""
        if self._cores is not None:
            return self._cores
        if time.monotonic() - self._read_at >= _PARALLELISM_SECONDS:
            self._read_parallelism, self._read_at = self._find_parallelism(), time.monotonic()
        return self._read_parallelism

    def _get_session(self) -> SparkSession:
        self._session = self._get_own_session()
        return self._session

    def _find_parallelism(self) -> int:
        """Find out how many cores the session has now. The answer takes Spark up to a tenth of a second."""
        session = self._get_session()
        if session not in _started_sessions:
            # If this job does not begin, Spark may be waiting for an executor of the cluster.
            with report_if_slow(_SILENT_SECONDS, partial(_LOGGER.warning, _NO_EXECUTOR, _SILENT_SECONDS)):
                session.range(1).collect()
            _started_sessions.add(session)
        (plan,) = session.sql(f"explain select id from range({_RANGE_LENGTH})").collect()
        splits = _SPLITS.search(plan[0])
        return int(splits[1]) if splits else 1

    def run(
        self,
        part: Part,
        part_count: int,
        on_progress: OnProgress | None = None,
        schema: pa.Schema = FILE_SCHEMA,
    ) -> pa.Table:
        """Run all parts, as `Runner` describes. Only Spark's UI shows the progress."""
        del on_progress
        if not part_count:
            return schema.empty_table()
        with count_as_waiting():
            rows = self._run_shared(part, part_count) if schema.equals(FILE_SCHEMA) else None
            if rows is None:
                rows = self._run_job(part, part_count, schema)
        return record_costs(name_engine(self._get_session()), part_count, rows)

    def exchange(
        self, part: Part, part_count: int, receivers: Sequence[Receivers], schema: pa.Schema
    ) -> pa.Table:
        """Exchange messages, as `Runner` describes. This is a single job, in which Spark's shuffle carries the messages.

        A task runs several receivers, because starting a task takes longer than running most receivers.
        """
        with count_as_waiting():
            task_counts = [
                min(stage_receivers.count, _TASKS_PER_CORE * self.parallelism)
                for stage_receivers in receivers
            ]
            session = with_job_name(self._get_session())
            frame = session.range(0, part_count, 1, part_count).mapInArrow(
                _make_part_runner(part), to_spark_schema(MESSAGE_SCHEMA)
            )
            for stage, (stage_receivers, task_count) in enumerate(
                zip(receivers, task_counts, strict=True), 1
            ):
                ordered_messages = frame.repartition(task_count, "to").sortWithinPartitions("to")
                receive = _make_receiver_runner(stage_receivers)
                if stage < len(receivers):
                    frame = ordered_messages.mapInArrow(receive, to_spark_schema(MESSAGE_SCHEMA))
                else:
                    frame = ordered_messages.mapInArrow(
                        _make_row_packer(receive, schema), to_spark_schema(_PACKED_SCHEMA)
                    )
            rows = _unpack_rows(frame.toArrow(), schema)
        return record_costs(name_engine(session), part_count + sum(task_counts), rows)

    def _run_job(self, part: Part, part_count: int, schema: pa.Schema) -> pa.Table:
        """Run parts as one job, with a task for each part."""
        session, run = with_job_name(self._get_session()), _make_row_packer(_make_part_runner(part), schema)
        packed_rows = _map_part_numbers(session, part_count, run, to_spark_schema(_PACKED_SCHEMA))
        return _unpack_rows(packed_rows.toArrow(), schema)

    def _run_shared(self, part: Part, part_count: int) -> pa.Table | None:
        """Run parts in a job that several callers share. None if no jobs are shared, or if the shared job has failed."""
        jobs = get_shared_jobs()
        return jobs and jobs.run_request(Request(part, part_count, get_job_name()), self._run_requests)

    def _run_requests(self, job: Sequence[Request]) -> Sequence[pa.Table | None]:
        """Run the parts of some callers as one job. Return the rows of each caller.

        If a job for several callers fails, each caller gets None, and then runs its parts alone. If there is only
        one caller, it gets the error.
        """
        if len(job) == 1:
            return [self._run_job(job[0].run_part, job[0].part_count, FILE_SCHEMA)]
        shared_parts = SharedParts(
            [request.run_part for request in job], divide_into_tasks(job, self.parallelism), FILE_SCHEMA
        )
        names = [request.name for request in job if request.name is not None]
        with name_jobs(*join_job_names(names)) if names else nullcontext():
            try:
                rows = self._run_job(shared_parts, len(shared_parts.tasks), shared_parts.row_schema)
            except Exception as error:  # noqa: BLE001 - each caller runs its parts alone, and gets its error.
                _LOGGER.debug("a job of %d callers failed, so each runs its parts alone: %s", len(job), error)
                return [None] * len(job)
        return shared_parts.divide_rows_by_caller(rows)

    def prepare(self) -> None:
        """Begin to start the session and its first job, as `Runner` describes."""
        if not self._is_preparing:
            self._is_preparing = True
            Thread(target=self._start_session, name="pgsieve-spark", daemon=True).start()

    def _start_session(self) -> None:
        """Start the session and its first job.

        Errors are ignored, because the next caller that needs the session gets them.
        """
        with suppress(Exception):
            session = self._get_session()
            with _FIRST_JOB_LOCK:
                if session not in _started_sessions:
                    run_first_job(session, self.parallelism)
                    _started_sessions.add(session)

    def stop(self, *, cancels_jobs: bool) -> None:
        """Begin no further shared job. With `cancels_jobs`, cancel the jobs of the session that are running.

        pyspark itself cancels jobs only on SIGINT, and only if the main thread has started the session.
        """
        if (jobs := get_shared_jobs()) is not None:
            jobs.stop()
        if cancels_jobs and (session := self._session) is not None:
            # The session may be lost. Then its jobs end without this request.
            with suppress(Exception):
                cancel_jobs(session)


def record_costs(engine: str, task_count: int | None, rows: pa.Table) -> pa.Table:
    """Count what it cost to make rows: the engine, the tasks and the bytes (`resources.work`). Return the rows.

    If the rows describe files (`FILE_SCHEMA`), the bytes of these files are counted. `task_count` is the number of
    tasks; None means one task per row.
    """
    describes_files = set(FILE_SCHEMA.names) <= set(rows.column_names)
    size = pc.sum(rows["size"]).as_py() or 0 if describes_files else rows.nbytes
    add_costs(engine, rows.num_rows if task_count is None else task_count, size)
    return rows
