"""Lets several threads share Spark jobs, because many small jobs cost more than one.

Each Spark job has fixed costs: Spark makes a plan, sends the functions to its workers, and starts tasks. For little
work these costs are larger than the work. So only one job runs at a time. All requests that arrive while a job is
running wait, and the next job does the work of all of them.

In: requests of several threads. Each request has a function, and the number of parts for which Spark calls it.
Out: the rows that the function of each request yields.

After `stop` is called, no further job begins. All waiting threads get CancelledError, even if the running job does the
work of their requests.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Condition

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.resources.context import assign_within
from pgsieve.resources.lake.stores.batch_cache import make_room_for_next_part
from pgsieve.resources.parts import Guard, Part
from pgsieve.resources.work import JobName

#: A shared job adds two columns to the rows. The first has the number of the caller that gets the row. The second is
#: true if the row only says that one of this caller's parts has failed.
_CALLER_COLUMN, _FAILED_COLUMN = "caller", "failed"


@dataclass(frozen=True, eq=False)
class Request:
    """The work that one caller requests.

    - `run_part`: the function that does one part of the work; it gets the number of the part
    - `part_count`: the number of parts
    - `name`: the name for the job in Spark's web interface
    - `rows_future`: receives the rows of all parts. If a part failed, and the job had other callers, too, it receives
      None. Then the caller runs its parts again in a job of its own.
    """

    run_part: Part
    part_count: int
    name: JobName | None
    rows_future: Future[pa.Table | None] = field(default_factory=Future)


#: Runs several requests in one Spark job, and returns the rows of each request in the same order.
RunRequests = Callable[[Sequence[Request]], Sequence[pa.Table | None]]


class SharedJobs:
    """Runs one job at a time. A job does the work of all requests that are waiting when it begins."""

    def __init__(self) -> None:
        self._condition, self._waiting_requests = Condition(), list[Request]()
        self._is_running = self._is_ending = False

    def run_request(self, request: Request, run_requests: RunRequests) -> pa.Table | None:
        """Wait until a job has run a request, and return its rows; None if it failed in a job with other callers.

        The job is run by this thread, or by the thread of another caller with a request in the same job. The thread
        that runs the job calls `run_requests`.
        """
        if job := self._wait_for_turn(request):
            try:
                for job_request, rows in zip(job, run_requests(job), strict=True):
                    job_request.rows_future.set_result(rows)
            finally:
                self._end_job(job)
        return request.rows_future.result()

    def _wait_for_turn(self, request: Request) -> Sequence[Request]:
        """Wait for a turn; returns the requests that the calling thread has to run as one job.

        Returns no requests if the thread of another caller has taken `request` into its job. The thread that gets the
        turn takes all waiting requests.
        """
        with self._condition:
            self._waiting_requests.append(request)
            self._condition.wait_for(
                lambda: not self._is_running or request not in self._waiting_requests or self._is_ending
            )
            if self._is_ending:
                raise CancelledError
            if request not in self._waiting_requests:
                return ()
            job, self._waiting_requests, self._is_running = self._waiting_requests, [], True
            return job

    def _end_job(self, job: Sequence[Request]) -> None:
        """Let the next job begin. Requests of `job` that got no rows get None, so that their callers stop waiting."""
        for request in job:
            if not request.rows_future.done():
                request.rows_future.set_result(None)
        with self._condition:
            self._is_running = False
            self._condition.notify_all()

    def stop(self) -> None:
        """Let no further job begin. A thread that runs a job goes on; all waiting threads get CancelledError."""
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()


def divide_into_tasks(job: Sequence[Request], parallelism: int) -> Sequence[Sequence[tuple[int, int]]]:
    """Divide the parts of a job into tasks, which Spark runs in parallel.

    Each task is a sequence of parts. A part is a pair of numbers: the number of its caller, and the number of the part
    among the caller's parts.

    The number of tasks is the number of parts of the largest request, or `parallelism` if this is greater. But there are
    never more tasks than parts. Parts with the same relative place in their requests come into the same task, for
    example all first parts. Such parts often read the same rows, which the task then reads only once
    (`stores.batch_cache`).
    """
    parts = sorted(
        (part / request.part_count, caller, part)
        for caller, request in enumerate(job)
        for part in range(request.part_count)
    )
    task_count = max(min(parallelism, len(parts)), *(request.part_count for request in job))
    tasks: list[list[tuple[int, int]]] = [[] for _ in range(task_count)]
    for rank, (_, caller, part) in enumerate(parts):
        tasks[rank * task_count // len(parts)].append((caller, part))
    return tasks


@dataclass(frozen=True)
class SharedParts:
    """The work of a shared job: a function that Spark's executors call with the number of a task.

    - `part_by_caller`: for each caller the function that does one of the caller's parts
    - `tasks`: the tasks of the job, as `divide_into_tasks` returns them
    - `schema`: the columns of the rows that the parts yield

    If a part fails, later parts of its caller in the same task do not run. The parts of other callers still run.
    """

    part_by_caller: Sequence[Part]
    tasks: Sequence[Sequence[tuple[int, int]]]
    schema: pa.Schema

    @property
    def row_schema(self) -> pa.Schema:
        """The columns of a task's rows: `schema`, and the two columns that shared jobs add."""
        return self.schema.append(pa.field(_CALLER_COLUMN, pa.int32())).append(
            pa.field(_FAILED_COLUMN, pa.bool_())
        )

    def __call__(self, task_number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Run the parts of the task with this number one after the other, and yield their rows."""
        failed_callers, last_part = set[int](), None
        for caller, part in self.tasks[task_number]:
            if caller in failed_callers:
                continue
            if part != last_part:
                make_room_for_next_part()
                last_part = part
            try:
                for rows in self.part_by_caller[caller](part, guard):
                    yield self._add_caller_columns(rows, caller)
            except Exception:  # noqa: BLE001 - the caller runs its parts again in a job of its own, and gets the error.
                failed_callers.add(caller)
                yield pa.RecordBatch.from_pylist(
                    [{_CALLER_COLUMN: caller, _FAILED_COLUMN: True}], self.row_schema
                )

    def _add_caller_columns(self, rows: pa.RecordBatch, caller: int) -> pa.RecordBatch:
        added_columns = [
            pa.repeat(pa.scalar(caller, pa.int32()), rows.num_rows),
            pa.repeat(pa.scalar(False), rows.num_rows),
        ]
        return pa.RecordBatch.from_arrays([*rows.columns, *added_columns], schema=self.row_schema)

    def divide_rows_by_caller(self, rows: pa.Table) -> list[pa.Table | None]:
        """Divide the rows of a job by caller. If a part of a caller has failed, the caller has None instead of rows."""
        failed_callers = set(rows.filter(rows[_FAILED_COLUMN])[_CALLER_COLUMN].to_pylist())
        return [
            None
            if caller in failed_callers
            else rows.filter(pc.equal(rows[_CALLER_COLUMN], caller)).select(self.schema.names)
            for caller in range(len(self.part_by_caller))
        ]


_CURRENT_JOBS: ContextVar[SharedJobs | None] = ContextVar("jobs", default=None)


@contextmanager
def share_jobs() -> Iterator[None]:
    """Within the block, Spark jobs are shared by all threads that run in a copy of the block's context (contextvars)."""
    with assign_within(_CURRENT_JOBS, SharedJobs()):
        yield


def get_shared_jobs() -> SharedJobs | None:
    """The jobs that the enclosing block of `share_jobs` shares; None outside of such a block."""
    return _CURRENT_JOBS.get()
