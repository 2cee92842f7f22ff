"""Does the work of steps in advance, in order, while Dagster records the steps before them.

In: the work of each step, as a function
Out: for each step a function (`PrefetchedWork`) that waits for the result of the work. It returns the result, or raises
     the error of the work.

Dagster takes about as long to record a small step as the step itself takes. Most of a step's work waits for a server,
or runs without holding Python's lock, so a second thread can do it while Dagster records. If one Spark job does the work
of several steps (`shared_jobs`), several threads wait for it. Still only one thread works at a time, so that the memory
and the number of sessions on the publisher do not grow.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar

from pgsieve.assets.outcome import attach_handler, log_to_step
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.prefetched import PREFETCH_LOG, PrefetchedWork
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.runners import stop_until_done
from pgsieve.resources.lake.shared_jobs import get_shared_jobs
from pgsieve.resources.postgres.session_pool import get_session_pool
from pgsieve.resources.strands import Strand, TicketLock
from pgsieve.resources.work import Work, measure_work

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


@contextmanager
def prefetch_work(
    lake: Lake, work_by_key: Mapping[Key, Callable[[Log], Result]]
) -> Iterator[Mapping[Key, PrefetchedWork[Result]]]:
    """Within the block, threads do the work of the steps, in the order of `work_by_key`; yields a function for each step.

    `work_by_key` maps the key of each step to its work. If there is only one step, it does its work itself, and no
    function is yielded. If the block fails, the work in progress is asked to end, and no further work begins.
    """
    if len(work_by_key) < 2:
        yield {}
        return
    lake.release_tables()
    thread_count, lock = lake.runner.max_callers if get_shared_jobs() is not None else 1, TicketLock()
    with (
        attach_handler(_PrefetchLogHandler()),
        ThreadPoolExecutor(thread_count, "pgsieve-work") as thread_pool,
    ):
        steps_by_key = {
            key: _PrefetchedStep(thread_pool, lake, step_work, Strand(lock))
            for key, step_work in work_by_key.items()
        }
        try:
            yield steps_by_key
        except BaseException as error:
            futures = [step.future for step in steps_by_key.values()]
            stop_until_done(lake.runner, futures, error, _cancel_statements)
            raise


def _cancel_statements() -> None:
    """Cancel the statements that sessions of the pool are running."""
    if (session_pool := get_session_pool()) is not None:
        session_pool.cancel_statements()


class _PrefetchLogHandler(logging.Handler):
    """Keeps the log records of a step's work until Dagster runs the step.

    Dagster would otherwise add them to the log of the step that it records at that time.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if (keep_record := PREFETCH_LOG.get()) is not None:
            keep_record(record)


class _PrefetchedStep(Generic[Result]):
    """The work of one step. The lines that it logs are kept until Dagster runs the step."""

    def __init__(
        self, thread_pool: ThreadPoolExecutor, lake: Lake, step_work: Callable[[Log], Result], strand: Strand
    ) -> None:
        self._lines: list[str | logging.LogRecord] = []

        def run_work() -> tuple[Result, Work]:
            PREFETCH_LOG.set(self._lines.append)
            try:
                with strand.enter(), measure_work() as cost:
                    result = step_work(self._lines.append)
                return result, cost
            finally:
                lake.release_tables()

        self.future: Future[tuple[Result, Work]] = thread_pool.submit(copy_context().run, run_work)

    def __call__(self, log: Log) -> tuple[Result, Work]:
        try:
            return self.future.result()
        finally:
            for line in self._lines:
                if isinstance(line, str):
                    log(line)
                else:
                    log_to_step(line)
