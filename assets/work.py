"""What a step does, apart from what it tells of it: done in the step, or before it by somebody else.

In: how the log is kept. Out: what was done, and the seconds that it took. Raises what the work raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from pgsieve.assets.steps.log import Log

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Done(Generic[T_co]):
    """What was done, and how many seconds it took."""

    result: T_co
    seconds: float


#: Does a step's work, and logs it.
Work = Callable[[Log], Done[T]]


def timed(work: Callable[[], T]) -> Done[T]:
    """Do it, and take the time."""
    began = monotonic()
    return Done(work(), monotonic() - began)


def done(result: T) -> Work[T]:
    """The work of a step that is done already: nothing is left but to tell of it."""
    return lambda _log: Done(result, 0.0)
