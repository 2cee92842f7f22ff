"""Wording of messages: numbers with a noun (`1 table`, `2 tables`), and long expressions. Raises nothing."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun, which gets an `s` unless there is one of it."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


#: A message shows this much of an expression.
_SHOWN = 200


def shortened(expression: str) -> str:
    """The expression, or the beginning of a long one."""
    return expression if len(expression) <= _SHOWN else f"{expression[:_SHOWN]}…"
