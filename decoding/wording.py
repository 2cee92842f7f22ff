"""Wording of messages: numbers with a noun, and long expressions."""

from __future__ import annotations


def quantity(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 table` or `2 tables`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


#: The greatest number of characters of an expression in a message.
_MAX_EXPRESSION_CHARACTERS = 200


def shorten(expression: str) -> str:
    """Return the expression; a long expression is cut, and ends with `…`."""
    return (
        expression
        if len(expression) <= _MAX_EXPRESSION_CHARACTERS
        else f"{expression[:_MAX_EXPRESSION_CHARACTERS]}…"
    )
