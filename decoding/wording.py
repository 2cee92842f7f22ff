"""Numbers of things as a message says them: a number and a noun in, `1 table` or `2 tables` out. Raises nothing."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun, which gets an `s` unless there is one of it."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
