"""Does the work of steps in advance, in order, while Dagster records the steps before them.

In: the work of each step, as a function
Out: for each step a function (`PrefetchedWork`) that waits for the result of the work. It returns the result, or raises
     the error of the work.

Dagster takes about as long to record a small step as the step itself takes. Most of a step's work waits for a server,
or runs without holding Python's lock, so a second thread can do it while Dagster records. If several subscriptions
share jobs of Spark, several threads wait for these jobs. Only one of the threads works at a time, so that the memory
and the number of sessions on the publisher do not grow.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar

from pgsieve.assets.outcome import attached_handler, log_to_step
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.prefetched import PREFETCH_LOG, PrefetchedWork
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.shared_jobs import current_shared_jobs
from pgsieve.resources.postgres.session_pool import current_pool
from pgsieve.resources.strands import Strand, TicketLock
from pgsieve.resources.work import Work, measure

#: After an error, the work in progress is asked to end. It is asked again after this time, until it has ended.
_POLL_SECONDS = 0.2

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


@contextmanager
def prefetched_work(
    lake: Lake, work: Mapping[Key, Callable[[Log], T]]
) -> Iterator[Mapping[Key, PrefetchedWork[T]]]:
    """Within the block, threads do the work of the steps, in this order; yields the function for each step.

    `work` maps the key of each step to its work. If there is only one step, nothing is yielded for it, and it does its
    work itself. If the block fails, the work in progress is asked to end, and no further work begins.
    """
    if len(work) < 2:
        yield {}
        return
    lake.release_tables()
    threads, lock = lake.executors.max_callers if current_shared_jobs() is not None else 1, TicketLock()
    with attached_handler(_PrefetchLogHandler()), ThreadPoolExecutor(threads, "pgsieve-work") as pool:
        steps = {key: _PrefetchedStep(pool, lake, function, Strand(lock)) for key, function in work.items()}
        try:
            yield steps
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(not step.ends_within(_POLL_SECONDS) for step in steps.values()):
                # A request ends only what the work waits for at that moment. The work may begin to wait for something
                # else after it, so the request is repeated.
                lake.executors.stop()
                if (sessions := current_pool()) is not None:
                    sessions.cancel_statements()
            raise


class _PrefetchLogHandler(logging.Handler):
    """Keeps the log records of a step's work until the step runs.

    Dagster would otherwise add them to the log of the step that it records at that time.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if (keep := PREFETCH_LOG.get()) is not None:
            keep(record)


class _PrefetchedStep(Generic[T]):
    """The work of one step, and the lines that the work logs, which are kept until the step runs."""

    def __init__(
        self, pool: ThreadPoolExecutor, lake: Lake, function: Callable[[Log], T], strand: Strand
    ) -> None:
        self._lines: list[str | logging.LogRecord] = []

        def work() -> tuple[T, Work]:
            PREFETCH_LOG.set(self._lines.append)
            try:
                with strand.enter(), measure() as cost:
                    result = function(self._lines.append)
                return result, cost
            finally:
                lake.release_tables()

        self._result: Future[tuple[T, Work]] = pool.submit(copy_context().run, work)

    def ends_within(self, seconds: float) -> bool:
        """True if the work ends within this many seconds, or will never begin."""
        return self._result.cancelled() or not wait([self._result], seconds).not_done

    def __call__(self, log: Log) -> tuple[T, Work]:
        try:
            return self._result.result()
        finally:
            for line in self._lines:
                if isinstance(line, str):
                    log(line)
                else:
                    log_to_step(line)
