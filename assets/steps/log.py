"""Where a step says what it does: a line at a time, to whoever runs it."""

from collections.abc import Callable

Log = Callable[[str], None]


def quiet(_: str) -> None:
    """Nobody reads the lines."""
