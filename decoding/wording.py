"""Wording of messages: numbers with a noun (`1 table`, `2 tables`), and long expressions. Raises nothing."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun; the noun gets an `s` unless the number is 1."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


#: A message shows this many characters of an expression.
_SHOWN = 200


def shortened(expression: str) -> str:
    """The expression, or the beginning of a long one."""
    return expression if len(expression) <= _SHOWN else f"{expression[:_SHOWN]}…"
