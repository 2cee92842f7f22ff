"""Work that a command does before the step that reports it: its result and its log lines reach that step.

The work is a function. In: the step's log, which receives the lines. Out: the result, and the costs. Raises the error
of the work.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from pgsieve.assets.steps.log import Log
from pgsieve.resources.work import Work

T = TypeVar("T")

PrefetchedWork = Callable[[Log], tuple[T, Work]]

#: Receives the log records of work for a later step; None for the work of the step that is running.
PREFETCH_LOG: ContextVar[Callable[[logging.LogRecord], None] | None] = ContextVar(
    "prefetch_log", default=None
)


def finished_work(result: T) -> PrefetchedWork[T]:
    """The result of work that has written its log lines itself."""
    return lambda _: (result, Work())
