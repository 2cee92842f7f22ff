"""The log of a step: a function that receives one line at a time."""

from collections.abc import Callable

Log = Callable[[str], None]


def no_log(_: str) -> None:
    """A log that ignores its lines."""
