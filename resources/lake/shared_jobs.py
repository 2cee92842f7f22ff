"""Shares Spark jobs among callers: the next job runs all requests that arrive during the present one.

In: parts of work, from several threads. Out: the rows of each caller's parts. Each job has fixed costs: its
plan, the transfer of its functions to the workers, the start of tasks. These exceed the costs of little work.
After `stop`, requests whose job has not begun raise CancelledError.
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
from pgsieve.resources.lake.stores.shared_reads import begin_part
from pgsieve.resources.parts import Guard, Part
from pgsieve.resources.work import Name

#: The additional columns of a shared job's rows: the number of the caller, and whether one of its parts failed.
_CALLER, _FAILED = "caller", "failed"


@dataclass(frozen=True, eq=False)
class Request:
    """A caller's request: the function of its parts, their number, and the name of the job.

    `rows` gets the rows of the parts, or None if one fails.
    """

    part: Part
    parts: int
    name: Name | None
    rows: Future[pa.Table | None] = field(default_factory=Future)


#: Runs the requests of some callers in one job, and returns the rows of each.
Run = Callable[[Sequence[Request]], Sequence[pa.Table | None]]


class SharedJobs:
    """Runs one job at a time, with all requests that are waiting when it begins."""

    def __init__(self) -> None:
        self._changed, self._waiting = Condition(), list[Request]()
        self._is_running = self._is_ending = False

    def rows(self, request: Request, run: Run) -> pa.Table | None:
        """The rows of a request, from a job that this thread runs, or the thread of another caller."""
        if job := self._next(request):
            try:
                for each, rows in zip(job, run(job), strict=True):
                    each.rows.set_result(rows)
            finally:
                self._end(job)
        return request.rows.result()

    def _next(self, request: Request) -> Sequence[Request]:
        """The requests that the calling thread has to run; none if another thread has run `request`."""
        with self._changed:
            self._waiting.append(request)
            self._changed.wait_for(
                lambda: not self._is_running or request not in self._waiting or self._is_ending
            )
            if self._is_ending:
                raise CancelledError
            if request not in self._waiting:
                return ()
            job, self._waiting, self._is_running = self._waiting, [], True
            return job

    def _end(self, job: Sequence[Request]) -> None:
        """Let the next job begin; give None to requests without rows."""
        for each in job:
            if not each.rows.done():
                each.rows.set_result(None)
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no further job."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()


def tasks_of(job: Sequence[Request], parallelism: int) -> Sequence[Sequence[tuple[int, int]]]:
    """The tasks of a job. Each is a sequence of parts, as pairs of a caller's number and the number of its part.

    There are as many tasks as the largest request has parts, and at least as many as run at a time. Parts at
    the same place of their requests are in the same task, because they often read the same rows
    (`stores.shared_reads`).
    """
    parts = sorted(
        (number / request.parts, caller, number)
        for caller, request in enumerate(job)
        for number in range(request.parts)
    )
    number = max(min(parallelism, len(parts)), *(request.parts for request in job))
    tasks: list[list[tuple[int, int]]] = [[] for _ in range(number)]
    for place, (_, caller, part) in enumerate(parts):
        tasks[place * number // len(parts)].append((caller, part))
    return tasks


@dataclass(frozen=True)
class SharedParts:
    """The parts of a shared job, as a function of a task's number that executors run.

    If a part fails, its caller's later parts in the task do not run. Other callers' parts do.
    """

    parts: Sequence[Part]
    tasks: Sequence[Sequence[tuple[int, int]]]
    schema: pa.Schema

    @property
    def row_schema(self) -> pa.Schema:
        """The columns of a task's rows: the columns of the parts' rows, and the additional ones."""
        return self.schema.append(pa.field(_CALLER, pa.int32())).append(pa.field(_FAILED, pa.bool_()))

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Run the parts of the task with this number."""
        failed, last_part = set[int](), None
        for caller, part in self.tasks[number]:
            if caller in failed:
                continue
            if part != last_part:
                begin_part()
                last_part = part
            try:
                for rows in self.parts[caller](part, guard):
                    yield self._with_caller(rows, caller)
            except Exception:  # noqa: BLE001 - the caller runs its parts again alone, and gets the error.
                failed.add(caller)
                yield pa.RecordBatch.from_pylist([{_CALLER: caller, _FAILED: True}], self.row_schema)

    def _with_caller(self, rows: pa.RecordBatch, caller: int) -> pa.RecordBatch:
        marks = [
            pa.repeat(pa.scalar(caller, pa.int32()), rows.num_rows),
            pa.repeat(pa.scalar(False), rows.num_rows),
        ]
        return pa.RecordBatch.from_arrays([*rows.columns, *marks], schema=self.row_schema)

    def rows_by_caller(self, rows: pa.Table) -> list[pa.Table | None]:
        """The rows of each caller; None if one of the caller's parts failed."""
        failed = set(rows.filter(rows[_FAILED])[_CALLER].to_pylist())
        return [
            None
            if caller in failed
            else rows.filter(pc.equal(rows[_CALLER], caller)).select(self.schema.names)
            for caller in range(len(self.parts))
        ]


_SHARED: ContextVar[SharedJobs | None] = ContextVar("jobs", default=None)


@contextmanager
def share_jobs() -> Iterator[None]:
    """Share jobs within the block, and in threads with a copy of its context."""
    with assign_within(_SHARED, SharedJobs()):
        yield


def current_shared_jobs() -> SharedJobs | None:
    """The shared jobs of the enclosing `share_jobs`; None outside of one."""
    return _SHARED.get()
