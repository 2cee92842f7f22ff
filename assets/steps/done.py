"""What a step has to tell that is done outside of it: before, or by a thread that works ahead.

In: where to say what was done, a line at a time. Out: the result, and what it took. Raises what doing it raised.
"""

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from pgsieve.assets.steps.log import Log
from pgsieve.resources.work import Work

T = TypeVar("T")

Done = Callable[[Log], tuple[T, Work]]

#: Hears what loggers say in work for a step that comes later; None in the step that is running.
AHEAD: ContextVar[Callable[[logging.LogRecord], None] | None] = ContextVar("ahead", default=None)


def done_before(result: T) -> Done[T]:
    """What was done long ago, and said then."""
    return lambda _: (result, Work())
