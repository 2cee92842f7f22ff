"""Assigns a context variable within a block: `with assign_within(variable, value): …`.

The value reaches the calling thread, and threads that start with a copy of its context. Raises nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def assign_within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give the variable the value within the block, and its former value afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
