"""A result with its log lines, for work that was done before its step began.

In: a function that receives the log lines, one at a time. Out: the result, and the time it took. Raises the
error of the work.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from pgsieve.assets.steps.log import Log
from pgsieve.resources.work import Work

T = TypeVar("T")

Done = Callable[[Log], tuple[T, Work]]

#: Receives log records of work that is done for a later step; None in the step that is running.
PREFETCH_LOG: ContextVar[Callable[[logging.LogRecord], None] | None] = ContextVar(
    "prefetch_log", default=None
)


def done_before(result: T) -> Done[T]:
    """A result of earlier work, whose log lines were written at that time."""
    return lambda _: (result, Work())
