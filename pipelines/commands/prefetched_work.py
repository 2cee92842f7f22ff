"""Does the work of steps in advance, in order, while Dagster records the steps before them.

In: the work of each step. Out: for each step a function (`PrefetchedWork`) that waits for the result of its work, or
raises its error.

Dagster takes as long to record a small step as the step works. Most of the work waits for a server, or runs
without Python's lock, so a second thread can do it at the same time. If subscriptions share jobs of Spark,
several threads wait for these jobs, but only one works at a time. So the memory and the number of the
publisher's sessions stay the same.
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

#: The time between two requests that the work in progress ends.
_POLL_SECONDS = 0.2

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


@contextmanager
def prefetched_work(
    lake: Lake, work: Mapping[Key, Callable[[Log], T]]
) -> Iterator[Mapping[Key, PrefetchedWork[T]]]:
    """Within the block, do the work of the steps in threads, in this order; yields their `PrefetchedWork`s.

    A single step has no `PrefetchedWork`: it does its work itself. If the block fails, the work in progress is asked to
    end, and no further work begins.
    """
    if len(work) < 2:
        yield {}
        return
    lake.release_tables()
    threads, lock = lake.executors.callers if current_shared_jobs() is not None else 1, TicketLock()
    with attached_handler(_PrefetchLogHandler()), ThreadPoolExecutor(threads, "pgsieve-work") as pool:
        done = {key: _PrefetchedStep(pool, lake, act, Strand(lock)) for key, act in work.items()}
        try:
            yield done
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(not each.ends_within(_POLL_SECONDS) for each in done.values()):
                # Repeated, as the work may start to wait after the first request.
                lake.executors.stop()
                if (sessions := current_pool()) is not None:
                    sessions.cancel()
            raise


class _PrefetchLogHandler(logging.Handler):
    """Keeps the log records of a step's work until the step runs; Dagster would add them to another step."""

    def emit(self, record: logging.LogRecord) -> None:
        if (keep := PREFETCH_LOG.get()) is not None:
            keep(record)


class _PrefetchedStep(Generic[T]):
    """The work of one step, and its log until the step runs."""

    def __init__(self, pool: ThreadPoolExecutor, lake: Lake, act: Callable[[Log], T], strand: Strand) -> None:
        self._lines: list[str | logging.LogRecord] = []

        def work() -> tuple[T, Work]:
            PREFETCH_LOG.set(self._lines.append)
            try:
                with strand.enter(), measure() as took:
                    result = act(self._lines.append)
                return result, took
            finally:
                lake.release_tables()

        self._result: Future[tuple[T, Work]] = pool.submit(copy_context().run, work)

    def ends_within(self, seconds: float) -> bool:
        """Whether the work ends within this many seconds, or will never begin."""
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
