"""Work that a command does before the step that reports it. The step gets the result of the work, and its log lines.

Such work is a function (`PrefetchedWork`).

In: the log of the step, which gets the lines
Out: the result and the cost of the work. Raises the error of the work.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from pgsieve.assets.steps.log import Log
from pgsieve.resources.work import Work

Result = TypeVar("Result")

PrefetchedWork = Callable[[Log], tuple[Result, Work]]

#: The function that receives the log records while work is done for a later step; None while a step does its own work.
PREFETCH_LOG: ContextVar[Callable[[logging.LogRecord], None] | None] = ContextVar(
    "prefetch_log", default=None
)


def make_finished_work(result: Result) -> PrefetchedWork[Result]:
    """Make a `PrefetchedWork` of a result. The lines of the work were already written to the log."""
    return lambda _: (result, Work())
