"""Rows of a replica as record_send would return them: Arrow columns in, one byte string per row out.

The publisher computes the same bytes for its rows by `row_expression`, so that both sides can hash them. Two
rows have the same bytes only if all their values are the same. Equal values may have different bytes: -0.0
and 0.0, the several NaNs of PostgreSQL, and arrays whose elements have another type by `types`.

The bytes of a row are the number of its columns, and for each column the oid of its type, the length of the
value (-1 for NULL), and the result of the type's send function: record_send in
src/backend/utils/adt/rowtypes.c.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.binary.octets import binary_of
from pgsieve.decoding.values import datetimes
from pgsieve.decoding.values.arrays import ArrayText, text_from_lists
from pgsieve.decoding.values.numeric import text_from_decimal
from pgsieve.decoding.values.output import text_of
from pgsieve.decoding.values.types import ColumnType

#: Bytes in rows and columns; each row of a table has the same number of them.
Bytes: TypeAlias = npt.NDArray[np.uint8]

_BYTEA, _TEXT = 17, 25
_NUMBERS: Mapping[pa.DataType, tuple[int, str]] = MappingProxyType(
    {
        pa.bool_(): (16, "bool"),
        pa.int16(): (21, "int2"),
        pa.int32(): (23, "int4"),
        pa.int64(): (20, "int8"),
        pa.float32(): (700, "float4"),
        pa.float64(): (701, "float8"),
    }
)
"""The PostgreSQL type, by oid and name, whose binary format a number has."""

_PRINTED: Mapping[pa.DataType, int] = MappingProxyType(
    {
        **{arrow: oid for arrow, (oid, _) in _NUMBERS.items()},
        pa.binary(): _BYTEA,
        pa.date32(): 1082,
        pa.timestamp("us"): 1114,
        pa.timestamp("us", "UTC"): 1184,
    }
)
"""The oid of the type whose output function prints an array's elements."""


@dataclass(frozen=True, slots=True)
class SentColumn:
    """A column as a field: its SQL expression, the oid of the expression's type, its type in the replica."""

    expression: str
    oid: int
    arrow: pa.DataType
    delimiter: str

    @classmethod
    def of(cls, quoted: str, type_oid: int, type: ColumnType) -> SentColumn:  # noqa: A002 - as in PostgreSQL
        """The field for a column; `quoted` is its name in SQL."""
        expression, oid = type.expression.format(quoted), _TEXT
        if type.arrow in _NUMBERS:
            oid, name = _NUMBERS[type.arrow]
            expression = f"({expression})::pg_catalog.{name}"
        elif pa.types.is_decimal(type.arrow):
            expression = f"pg_catalog.trim_scale({quoted})::pg_catalog.text"
        elif type.arrow == pa.list_(pa.float64()):
            expression = f"{quoted}::pg_catalog.float8[]::pg_catalog.text"
        elif not pa.types.is_list(type.arrow) and not pa.types.is_string(type.arrow):
            oid = _BYTEA
        elif expression == quoted:
            oid = type_oid
        delimiter = type.text.delimiter if isinstance(type.text, ArrayText) else ""
        return cls(expression, oid, type.arrow, delimiter)


def row_expression(columns: Iterable[SentColumn]) -> str:
    """The SQL expression for a row's bytes."""
    return f"pg_catalog.record_send(ROW({', '.join(c.expression for c in columns)}))"


def record_send(arrays: Sequence[pa.Array], columns: Sequence[SentColumn]) -> pa.Array:
    """The bytes of each row; `arrays` are the columns in the replica's types."""
    return pc.binary_join_element_wise(*_pieces(arrays, columns), b"")


def _pieces(arrays: Sequence[pa.Array], columns: Sequence[SentColumn]) -> Iterator[pa.Array]:
    """Yield binary arrays whose concatenation gives the rows.

    Adjacent fields of fixed width are one array.
    """
    count = len(arrays[0])
    fixed = [_same(len(columns), count)]
    for array, column in zip(arrays, columns, strict=True):
        sent = _sent(array, column)
        lengths = np.asarray(pc.binary_length(sent).fill_null(-1), np.int32)
        fixed += [_same(column.oid, count), _octets(lengths)]
        if column.arrow in _NUMBERS and not sent.null_count:
            width = column.arrow.byte_width if column.arrow != pa.bool_() else 1
            fixed.append(np.frombuffer(sent.buffers()[2], np.uint8, count * width).reshape(count, width))
        else:
            yield _piece(fixed)
            yield sent.fill_null(b"")
            fixed = []
    if fixed:
        yield _piece(fixed)


def _same(number: int, count: int) -> Bytes:
    return np.broadcast_to(np.frombuffer(number.to_bytes(4, "big"), np.uint8), (count, 4))


def _octets(numbers: npt.NDArray[np.int32]) -> Bytes:
    return numbers.astype(">i4").view(np.uint8).reshape(len(numbers), 4)


def _piece(fixed: Sequence[Bytes]) -> pa.Array:
    octets = np.concatenate(fixed, axis=1)
    count, width = octets.shape
    return pa.Array.from_buffers(pa.binary(width), count, [None, pa.py_buffer(octets)]).cast(pa.binary())


def _sent(array: pa.Array, column: SentColumn) -> pa.Array:
    """Values as the send function of the column's expression returns them; NULL stays NULL."""
    kind = array.type
    if pa.types.is_list(kind):
        return text_from_lists(array, _text(array.flatten()), column.delimiter).cast(pa.binary())
    if pa.types.is_decimal(kind):
        text = text_from_decimal(array)
        if kind.scale:
            text = pc.ascii_rtrim(pc.ascii_rtrim(text, "0"), ".")
        return text.cast(pa.binary())
    return _binary(array)


def _binary(array: pa.Array) -> pa.Array:
    """Values in binary format: numbers, dates and timestamps, text and bytea."""
    if array.type in _NUMBERS:
        is_boolean = pa.types.is_boolean(array.type)
        numbers = array.cast(pa.uint8()) if is_boolean else array
        return binary_of(np.asarray(numbers.fill_null(0)), np.asarray(array.is_valid()))
    if pa.types.is_temporal(array.type):
        return datetimes.to_send(array)
    return array.cast(pa.binary())


def _text(elements: pa.Array) -> pa.Array:
    """Elements of an array as their type's output function prints them."""
    if pa.types.is_string(elements.type):
        return elements
    if pa.types.is_decimal(elements.type):
        return text_from_decimal(elements)
    return text_of(_binary(elements), _PRINTED[elements.type])
