"""The rows of a replica as PostgreSQL's record_send() would return them.

In: Arrow columns. Out: one byte string per row. The publisher computes the same bytes for its rows with the SQL of
`row_expression`. So both sides can hash the bytes, and compare the hashes.

Rows with the same bytes have the same values. The reverse is not always true. Equal values with different bytes are
-0.0 and 0.0, several NaNs, and arrays whose elements have another type in the replica (key `types` of pgsieve.yaml).

The bytes of a row begin with the number of its columns. After that, each column has the oid of its type, the length of
the value (-1 for NULL), and the result of the type's send function (record_send() in src/backend/utils/adt/rowtypes.c).
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

from pgsieve.decoding.binary.octets import to_big_endian
from pgsieve.decoding.values import datetimes
from pgsieve.decoding.values.arrays import ArrayTextConverter, print_lists
from pgsieve.decoding.values.numeric import print_decimals
from pgsieve.decoding.values.output import print_binary
from pgsieve.decoding.values.types import ColumnType

#: A matrix of bytes, with one line for each row of the table.
ByteMatrix: TypeAlias = npt.NDArray[np.uint8]

_BYTEA, _TEXT = 17, 25
_NUMBER_TYPES: Mapping[pa.DataType, tuple[int, str]] = MappingProxyType(
    {
        pa.bool_(): (16, "bool"),
        pa.int16(): (21, "int2"),
        pa.int32(): (23, "int4"),
        pa.int64(): (20, "int8"),
        pa.float32(): (700, "float4"),
        pa.float64(): (701, "float8"),
    }
)
"""Maps an Arrow type to the oid and the name of the PostgreSQL type whose binary format has the same bytes."""

_OID_BY_ELEMENT_TYPE: Mapping[pa.DataType, int] = MappingProxyType(
    {
        **{arrow: oid for arrow, (oid, _) in _NUMBER_TYPES.items()},
        pa.binary(): _BYTEA,
        pa.date32(): 1082,
        pa.timestamp("us"): 1114,
        pa.timestamp("us", "UTC"): 1184,
    }
)
"""Maps the Arrow type of array elements to the oid of the PostgreSQL type whose output function prints them."""


@dataclass(frozen=True, slots=True)
class SentColumn:
    """A column of the row that the publisher passes to record_send().

    - `expression` is the SQL expression for the column in this row.
    - `oid` is the oid of the type of this expression.
    - `arrow_type` is the column's type in the replica.
    - `delimiter` separates the elements of an array. It is '' for other types.
    """

    expression: str
    oid: int
    arrow_type: pa.DataType
    delimiter: str

    @classmethod
    def for_column(cls, quoted_name: str, type_oid: int, type: ColumnType) -> SentColumn:  # noqa: A002 - as in PostgreSQL
        """Return how a column is passed; `quoted_name` is the column's name in SQL."""
        expression, oid = type.copy_expression.format(quoted_name), _TEXT
        if type.arrow_type in _NUMBER_TYPES:
            oid, name = _NUMBER_TYPES[type.arrow_type]
            expression = f"({expression})::pg_catalog.{name}"
        elif pa.types.is_decimal(type.arrow_type):
            expression = f"pg_catalog.trim_scale({quoted_name})::pg_catalog.text"
        elif type.arrow_type == pa.list_(pa.float64()):
            expression = f"{quoted_name}::pg_catalog.float8[]::pg_catalog.text"
        elif not pa.types.is_list(type.arrow_type) and not pa.types.is_string(type.arrow_type):
            oid = _BYTEA
        elif expression == quoted_name:
            oid = type_oid
        delimiter = (
            type.text_converter.delimiter if isinstance(type.text_converter, ArrayTextConverter) else ""
        )
        return cls(expression, oid, type.arrow_type, delimiter)


def row_expression(columns: Iterable[SentColumn]) -> str:
    """Return the SQL expression with which the publisher computes the bytes of a row."""
    return f"pg_catalog.record_send(ROW({', '.join(c.expression for c in columns)}))"


def record_send(arrays: Sequence[pa.Array], columns: Sequence[SentColumn]) -> pa.Array:
    """Return the bytes of each row; `arrays` are the columns of the replica, in the same order as `columns`."""
    return pc.binary_join_element_wise(*_encode_rows_in_pieces(arrays, columns), b"")


def _encode_rows_in_pieces(arrays: Sequence[pa.Array], columns: Sequence[SentColumn]) -> Iterator[pa.Array]:
    """Yield binary arrays, whose concatenated values are the rows. Adjacent fields of fixed width form one array."""
    row_count = len(arrays[0])
    fixed_width_fields = [_repeat_integer(len(columns), row_count)]
    for array, column in zip(arrays, columns, strict=True):
        values = _compute_sent_values(array, column)
        lengths = np.asarray(pc.binary_length(values).fill_null(-1), np.int32)
        fixed_width_fields += [_repeat_integer(column.oid, row_count), _encode_integers(lengths)]
        if column.arrow_type in _NUMBER_TYPES and not values.null_count:
            width = column.arrow_type.byte_width if column.arrow_type != pa.bool_() else 1
            fixed_width_fields.append(
                np.frombuffer(values.buffers()[2], np.uint8, row_count * width).reshape(row_count, width)
            )
        else:
            yield _join_fields(fixed_width_fields)
            yield values.fill_null(b"")
            fixed_width_fields = []
    if fixed_width_fields:
        yield _join_fields(fixed_width_fields)


def _repeat_integer(number: int, row_count: int) -> ByteMatrix:
    return np.broadcast_to(np.frombuffer(number.to_bytes(4, "big"), np.uint8), (row_count, 4))


def _encode_integers(numbers: npt.NDArray[np.int32]) -> ByteMatrix:
    return numbers.astype(">i4").view(np.uint8).reshape(len(numbers), 4)


def _join_fields(fields: Sequence[ByteMatrix]) -> pa.Array:
    octets = np.concatenate(fields, axis=1)
    row_count, width = octets.shape
    return pa.Array.from_buffers(pa.binary(width), row_count, [None, pa.py_buffer(octets)]).cast(pa.binary())


def _compute_sent_values(array: pa.Array, column: SentColumn) -> pa.Array:
    """Return what the send function would return for the column's SQL expression; NULL stays NULL."""
    array_type = array.type
    if pa.types.is_list(array_type):
        return print_lists(array, _print_elements(array.flatten()), column.delimiter).cast(pa.binary())
    if pa.types.is_decimal(array_type):
        text = print_decimals(array)
        if array_type.scale:
            text = pc.ascii_rtrim(pc.ascii_rtrim(text, "0"), ".")
        return text.cast(pa.binary())
    return _to_binary_format(array)


def _to_binary_format(array: pa.Array) -> pa.Array:
    """Convert numbers, dates, timestamps, text and bytea to PostgreSQL's binary format."""
    if array.type in _NUMBER_TYPES:
        is_boolean = pa.types.is_boolean(array.type)
        numbers = array.cast(pa.uint8()) if is_boolean else array
        return to_big_endian(np.asarray(numbers.fill_null(0)), np.asarray(array.is_valid()))
    if pa.types.is_temporal(array.type):
        return datetimes.encode_binary(array)
    return array.cast(pa.binary())


def _print_elements(elements: pa.Array) -> pa.Array:
    """Return the texts that the output function of the element type prints for the elements of arrays."""
    if pa.types.is_string(elements.type):
        return elements
    if pa.types.is_decimal(elements.type):
        return print_decimals(elements)
    return print_binary(_to_binary_format(elements), _OID_BY_ELEMENT_TYPE[elements.type])
