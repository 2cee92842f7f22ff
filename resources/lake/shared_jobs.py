"""Jobs of Spark that callers share: what they ask for while one runs, the next one does together.

In: parts of work, from several threads. Out: the rows of each caller's parts. A job has costs of its own, whatever it
does: its plan, its functions on their way to the workers, the start of tasks. Where many callers have little to do,
these cost more than the work. Raises CancelledError for what has not begun when all is to end.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Condition

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.resources.context import assigned
from pgsieve.resources.lake.stores.shared_reads import begin_part
from pgsieve.resources.parts import Guard, Part
from pgsieve.resources.work import Name

#: The columns that the rows of a shared job have besides: the caller that they are for, and whether one of its parts failed.
_CALLER, _FAILED = "caller", "failed"


@dataclass(frozen=True, eq=False)
class Request:
    """A caller's request: its parts, how many they are, and the name of a job. `rows` get their rows, or None where they fail."""

    part: Part
    parts: int
    name: Name | None
    rows: Future[pa.Table | None] = field(default_factory=Future)


#: Runs what some callers ask for in one job, and returns the rows of each.
Run = Callable[[Sequence[Request]], Sequence[pa.Table | None]]


class SharedJobs:
    """One job at a time, of all that is asked for when it begins."""

    def __init__(self) -> None:
        self._changed, self._waiting = Condition(), list[Request]()
        self._is_running = self._is_ending = False

    def rows(self, request: Request, run: Run) -> pa.Table | None:
        """The rows of what a caller asks for: by a job that its own thread runs, or another caller's."""
        if job := self._next(request):
            try:
                for each, rows in zip(job, run(job), strict=True):
                    each.rows.set_result(rows)
            finally:
                self._end(job)
        return request.rows.result()

    def _next(self, request: Request) -> Sequence[Request]:
        """The requests that the calling thread has to run: none where another thread runs `request`."""
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
        """Let the next job begin; requests without rows have failed."""
        for each in job:
            if not each.rows.done():
                each.rows.set_result(None)
        with self._changed:
            self._is_running = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Begin no job any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()


def tasks_of(job: Sequence[Request], parallelism: int) -> Sequence[Sequence[tuple[int, int]]]:
    """The tasks of a job: of each the parts that it runs, one after the other, as numbers of a caller and of its part.

    There are as many as the greatest caller has parts, and where that is less as are run at a time. Parts at the same place
    of their callers come together: these often read the same rows (`stores.shared_reads`).
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
class PartsOfMany:
    """Runs a task of a shared job. It is sent to executors. A part that fails ends its caller's, and no other's."""

    parts: Sequence[Part]
    tasks: Sequence[Sequence[tuple[int, int]]]
    schema: pa.Schema

    @property
    def written(self) -> pa.Schema:
        """What its rows have: those of the callers' parts, and whose they are."""
        return self.schema.append(pa.field(_CALLER, pa.int32())).append(pa.field(_FAILED, pa.bool_()))

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Run the parts of a task."""
        failed, last_part = set[int](), None
        for caller, part in self.tasks[number]:
            if caller in failed:
                continue
            if part != last_part:
                begin_part()
                last_part = part
            try:
                for rows in self.parts[caller](part, guard):
                    yield self._marked(rows, caller)
            except Exception:  # noqa: BLE001 - the caller has its parts run alone, and gets the error.
                failed.add(caller)
                yield pa.RecordBatch.from_pylist([{_CALLER: caller, _FAILED: True}], self.written)

    def _marked(self, rows: pa.RecordBatch, caller: int) -> pa.RecordBatch:
        marks = [
            pa.repeat(pa.scalar(caller, pa.int32()), rows.num_rows),
            pa.repeat(pa.scalar(False), rows.num_rows),
        ]
        return pa.RecordBatch.from_arrays([*rows.columns, *marks], schema=self.written)

    def of_callers(self, rows: pa.Table) -> list[pa.Table | None]:
        """The rows of each caller; None where one of its parts failed."""
        failed = set(rows.filter(rows[_FAILED])[_CALLER].to_pylist())
        return [
            None
            if caller in failed
            else rows.filter(pc.equal(rows[_CALLER], caller)).select(self.schema.names)
            for caller in range(len(self.parts))
        ]


_SHARED: ContextVar[SharedJobs | None] = ContextVar("jobs", default=None)


@contextmanager
def jobs_shared() -> Iterator[None]:
    """Within the block, and the threads of its work, callers share jobs."""
    with assigned(_SHARED, SharedJobs()):
        yield


def shared_jobs() -> SharedJobs | None:
    """The shared jobs of the enclosing block; None outside of one."""
    return _SHARED.get()
