"""Assigns a value to a context variable within a block: `with assign_within(variable, value): …`.

Within the block the variable has the value in the calling thread, and in threads that start with a copy of its
context. Raises nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextmanager
def assign_within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give the variable the value within the block, and its former value again afterwards."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
