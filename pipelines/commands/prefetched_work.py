"""Prefetches the work of steps, in order, while Dagster records the steps before.

In: the work of each step. Out: for each a function that waits for its result (`Done`). To record a step takes
Dagster as long as a small one works, in Python; most of the work waits for a server, or runs without Python's
lock. One thread does it. Where callers share jobs of Spark, some more wait for these, and still one works at a time: so
no more memory, and no more sessions of the publisher, are needed than without them. Raises nothing; each step raises
the error of its work.
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from typing import Generic, TypeVar

from pgsieve.assets.outcome import receiving_records, tell_step
from pgsieve.assets.steps.done import PREFETCH_LOG, Done
from pgsieve.assets.steps.log import Log
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.shared_jobs import shared_jobs
from pgsieve.resources.postgres.kept_sessions import kept_sessions
from pgsieve.resources.strands import Strand, TicketLock
from pgsieve.resources.work import Work, measured

#: How often the end of the work in progress is requested again.
_LOOK_SECONDS = 0.2

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


@contextmanager
def prefetched_work(lake: Lake, work: Mapping[Key, Callable[[Log], T]]) -> Iterator[Mapping[Key, Done[T]]]:
    """Do the work of each step, in this order; a single step does its own work, and so is not here.

    The threads end with the block. If the block fails, the work in progress is ended soon, and no further
    work begins.
    """
    if len(work) < 2:
        yield {}
        return
    lake.release_tables()
    threads, lock = lake.executors.callers if shared_jobs() is not None else 1, TicketLock()
    with receiving_records(_PrefetchedRecords()), ThreadPoolExecutor(threads, "pgsieve-work") as pool:
        done = {key: _Prefetched(pool, lake, act, Strand(lock)) for key, act in work.items()}
        try:
            yield done
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(not each.ended(_LOOK_SECONDS) for each in done.values()):
                # Repeated, as the work may just have been about to wait.
                lake.executors.stop()
                if (sessions := kept_sessions()) is not None:
                    sessions.cancel()
            raise


class _PrefetchedRecords(logging.Handler):
    """Keeps the log records of a step's work until the step runs, as meanwhile another step is running."""

    def emit(self, record: logging.LogRecord) -> None:
        if (keep := PREFETCH_LOG.get()) is not None:
            keep(record)


class _Prefetched(Generic[T]):
    """The work of one step, and its log until the step runs."""

    def __init__(self, pool: ThreadPoolExecutor, lake: Lake, act: Callable[[Log], T], strand: Strand) -> None:
        self._lines: list[str | logging.LogRecord] = []

        def work() -> tuple[T, Work]:
            PREFETCH_LOG.set(self._lines.append)
            try:
                with strand.going_on(), measured() as took:
                    result = act(self._lines.append)
                return result, took
            finally:
                lake.release_tables()

        self._result: Future[tuple[T, Work]] = pool.submit(copy_context().run, work)

    def ended(self, seconds: float) -> bool:
        """Whether the work has ended, or will not begin, within this many seconds."""
        return self._result.cancelled() or not wait([self._result], seconds).not_done

    def __call__(self, log: Log) -> tuple[T, Work]:
        try:
            return self._result.result()
        finally:
            for line in self._lines:
                if isinstance(line, str):
                    log(line)
                else:
                    tell_step(line)
