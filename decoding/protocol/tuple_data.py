"""TupleData: the columns of one row as pgoutput sends them.

In: bytes at a cursor. Out: a tuple with a Null, Unchanged, Text or Binary for each column. The `write_` functions
do the reverse. Raises ProtocolError for an unknown kind of value, and for a count or a length that goes beyond the
end of the message.

PostgreSQL documentation, Logical Replication Message Formats, TupleData; logicalrep_read_tuple() in proto.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.binary.writer import Writer

KIND_NULL = ord("n")
KIND_UNCHANGED = ord("u")
KIND_TEXT = ord("t")
KIND_BINARY = ord("b")

NEW_TUPLE = ord("N")
OLD_KEY = ord("K")
OLD_ROW = ord("O")


@dataclass(frozen=True, slots=True)
class Null:
    """SQL NULL. In an old key, each column outside the key is also Null, whatever its value is."""


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Stands for a TOASTed value that an UPDATE did not change; the server does not send this value."""


@dataclass(frozen=True, slots=True)
class Text:
    """A value in text format: the result of the type's output function, in the client encoding."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Binary:
    """A value in binary format: the result of the type's send function."""

    content: bytes


ColumnValue: TypeAlias = Null | Unchanged | Text | Binary
TupleData: TypeAlias = tuple[ColumnValue, ...]

NULL = Null()
UNCHANGED = Unchanged()


@dataclass(frozen=True, slots=True)
class OldKey:
    """The old key of a row; the columns outside the replica identity are Null."""

    columns: TupleData


@dataclass(frozen=True, slots=True)
class OldRow:
    """The whole old row of a relation with REPLICA IDENTITY FULL."""

    columns: TupleData


_CONSTANT_BY_KIND: dict[int, ColumnValue] = {KIND_NULL: NULL, KIND_UNCHANGED: UNCHANGED}
_CLASS_BY_KIND: dict[int, type[Text | Binary]] = {KIND_TEXT: Text, KIND_BINARY: Binary}
_KIND_BY_CLASS: dict[type[ColumnValue], int] = {
    Null: KIND_NULL,
    Unchanged: KIND_UNCHANGED,
    Text: KIND_TEXT,
    Binary: KIND_BINARY,
}
_OLD_TUPLE_CLASS_BY_MARK: dict[int, type[OldKey | OldRow]] = {OLD_KEY: OldKey, OLD_ROW: OldRow}


def read_tuple(cursor: Cursor) -> TupleData:
    """Read one TupleData."""
    count = cursor.check_count(cursor.i16("number of columns"), "columns", item_size=1)
    return tuple([_read_column(cursor) for _ in range(count)])


def write_tuple(writer: Writer, columns: TupleData) -> None:
    """Write one TupleData."""
    writer.i16(len(columns), "number of columns")
    for column in columns:
        writer.u8(_KIND_BY_CLASS[type(column)], "kind of value")
        if isinstance(column, Text | Binary):
            writer.length_prefixed(column.content, "length of a value")


def read_new(cursor: Cursor) -> TupleData:
    """Read the mark 'N' and the new tuple after it."""
    if cursor.u8("'N'") != NEW_TUPLE:
        cursor.fail("'N', the mark of the new tuple", bytes_before=1)
    return read_tuple(cursor)


def write_new(writer: Writer, columns: TupleData) -> None:
    """Write the mark 'N' and the new tuple."""
    writer.u8(NEW_TUPLE, "'N'")
    write_tuple(writer, columns)


def read_old(cursor: Cursor) -> OldKey | OldRow:
    """Read the mark 'K' or 'O', and the old tuple after it."""
    old_tuple_class = _OLD_TUPLE_CLASS_BY_MARK.get(cursor.u8("'K' or 'O'"))
    if old_tuple_class is None:
        cursor.fail("'K' or 'O', the mark of an old key or an old row", bytes_before=1)
    return old_tuple_class(read_tuple(cursor))


def write_old(writer: Writer, old: OldKey | OldRow) -> None:
    """Write the mark 'K' or 'O', and the old tuple."""
    writer.u8(OLD_KEY if isinstance(old, OldKey) else OLD_ROW, "'K' or 'O'")
    write_tuple(writer, old.columns)


def read_old_and_new(cursor: Cursor) -> tuple[OldKey | OldRow | None, TupleData]:
    """Read the tuples of an Update: the old tuple, or None if the message has no old tuple, and the new tuple."""
    mark = cursor.u8("'K', 'O' or 'N'")
    if mark == NEW_TUPLE:
        return None, read_tuple(cursor)
    old_tuple_class = _OLD_TUPLE_CLASS_BY_MARK.get(mark)
    if old_tuple_class is None:
        cursor.fail("'K', 'O' or 'N', the mark of a tuple", bytes_before=1)
    return old_tuple_class(read_tuple(cursor)), read_new(cursor)


def _read_column(cursor: Cursor) -> ColumnValue:
    kind = cursor.u8("kind of value")
    value_class = _CLASS_BY_KIND.get(kind)
    if value_class is not None:
        return value_class(cursor.length_prefixed("value"))
    if kind not in _CONSTANT_BY_KIND:
        cursor.fail(f"'n', 'u', 't' or 'b', the kind of a value, not byte 0x{kind:02x}", bytes_before=1)
    return _CONSTANT_BY_KIND[kind]
