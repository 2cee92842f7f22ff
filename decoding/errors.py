"""The base of every error pgsieve raises on purpose, and the errors of this package.

A message names the object, what is wrong and what to do; it never holds a cell value or a password.
"""

from __future__ import annotations

from collections.abc import Mapping


class PgsieveError(Exception):
    """Something a user can act on.

    `message` says what is wrong with which object, `hint` what to do, `sqlstate` is PostgreSQL's own
    code where it has one for this (PostgreSQL documentation, appendix A).
    """

    def __init__(self, message: str, *, hint: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.sqlstate = sqlstate

    def __str__(self) -> str:
        code = f" [{self.sqlstate}]" if self.sqlstate else ""
        hint = f"\nHINT: {self.hint}" if self.hint else ""
        return f"{self.message}{code}{hint}"


class ProtocolError(PgsieveError):
    """The publisher's bytes are not the logical replication protocol (section 54.5)."""


class UnsupportedFilterError(PgsieveError):
    """A row filter that Spark cannot evaluate exactly as PostgreSQL does."""


class UnsupportedTypeError(PgsieveError):
    """A type override that the column's PostgreSQL type does not allow."""


class UnsupportedBinaryError(PgsieveError):
    """A value in binary format of a type whose text cannot be had from that; names the column, never the value."""


class ValueNotRepresentableError(PgsieveError):
    """A value that its column's Spark type cannot hold; names the column, never the value.

    `row` is its place among the values that were converted.
    """

    def __init__(self, message: str, *, hint: str | None = None, row: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.row = row

    def in_row(self, key: Mapping[str, object]) -> ValueNotRepresentableError:
        """Name the row by its key, as PostgreSQL does; keys may be shown, other values not."""
        if not key:
            return self
        columns, values = ", ".join(key), ", ".join(map(str, key.values()))
        message = f"{self.message}, in the row with key ({columns})=({values})"
        return ValueNotRepresentableError(message, hint=self.hint, row=self.row)


class RowFilterSyntaxError(PgsieveError):
    """A row filter that PostgreSQL would not accept either: no expression, or not of these types."""


class UndefinedColumnError(PgsieveError):
    """A row filter or column list names a column that the relation does not have."""
