"""PostgreSQL types as columns of a replica: a type's oid and modifier in, its Arrow and Spark type out.

One table (`_TYPES`) has each type's Arrow and Spark type, the conversions of its values from text and from
binary format, and the SQL expression that the initial copy selects. All three give the same Arrow values. An
array of a built-in type becomes an array of the element's type. A type that is not in the table, or a user's
type, becomes PostgreSQL's own text. docs/types.md shows the table.

The sessions of the slot and of the copy must print values with DateStyle ISO, IntervalStyle postgres,
TimeZone UTC, extra_float_digits 3, bytea_output hex and client encoding UTF8. Raises UnsupportedTypeError for
an override that is not offered, ValueNotRepresentableError for a value that does not fit in its column, and
UnsupportedBinaryError for a value in binary format whose text cannot be made from its bytes. PostgreSQL
documentation, chapter 8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from pgsieve.decoding.binary.octets import fixed_width, offsets_of
from pgsieve.decoding.errors import (
    OF_TABLE,
    UnsupportedBinaryError,
    UnsupportedTypeError,
    ValueNotRepresentableError,
)
from pgsieve.decoding.values import bytea, datetimes, numeric
from pgsieve.decoding.values.arrays import ArraySend, ArrayText, Converter
from pgsieve.decoding.values.builtin_types import BOX_ARRAY, ELEMENTS, NONE_DEFINED, DefinedTypes
from pgsieve.decoding.values.output import NoOutputError, text_of
from pgsieve.decoding.values.quoting import quote_identifier

_NATIVE = "{}"
_TEXT = "{}::pg_catalog.text"
# concat() calls the type's output function, as pgoutput does; a cast to text would print booleans and
# char(n), and domains over them, differently. The CASE keeps NULL, of which concat() makes an empty string.
_OUTPUT = "CASE WHEN pg_catalog.num_nulls({0}) = 0 THEN pg_catalog.concat({0}) END"

_NUMERIC = 1700
_GREATEST_PRECISION = 38  # Of Spark and Arrow.


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The replica's column for a PostgreSQL type.

    `arrow` and `spark` are the same type for two libraries. `text`, `binary` and `copy` convert values to
    `arrow`: from PostgreSQL's text, from its binary format, and from the result of `expression` in the
    initial copy.
    """

    arrow: pa.DataType
    spark: str
    text: Converter
    binary: Converter
    copy: Converter
    expression: str


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Converts numbers in binary format; `layout` is numpy's name of the format."""

    layout: str

    def __call__(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        numbers, valid = fixed_width(values.cast(pa.binary()), self.layout)
        return pa.array(numbers, mask=None if valid.all() else ~valid).cast(target)


@dataclass(frozen=True, slots=True)
class _Printed:
    """Converts binary format to the text that the type's output function prints."""

    type_oid: int
    defined: DefinedTypes

    def __call__(self, values: pa.Array, _: pa.DataType) -> pa.Array:
        return text_of(values, self.type_oid, self.defined)


def _boolean_text(values: pa.Array, _: pa.DataType) -> pa.Array:
    """Convert 't' and 'f' (boolout)."""
    valid = np.asarray(values.is_valid())
    offsets = offsets_of(values)
    if (np.diff(offsets)[valid] != 1).any():
        raise ValueError("not a boolean")
    if not valid.any():
        return pa.nulls(len(values), pa.bool_())
    octets = np.frombuffer(values.buffers()[2], np.uint8)
    # A NULL after the last value has no byte of its own.
    letters = np.take(octets, offsets[:-1], mode="clip")
    true = letters == ord("t")
    if (valid & ~true & (letters != ord("f"))).any():
        raise ValueError("not a boolean")
    return pa.array(true, mask=None if valid.all() else ~valid)


def _parsed(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert digits.

    The bytes' encoding is not checked, because the parser refuses all that is no number.
    """
    text = values if pa.types.is_string(values.type) else values.cast(pa.binary()).view(pa.string())
    return text.cast(target)


def _parsed_decimal(values: pa.Array, target: pa.DataType) -> pa.Array:
    return numeric.decimal_from_text(_parsed(values, pa.string()), target)


def _widened_real(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Read the digits as a real, then widen it: a double from the same digits would be another number."""
    return _parsed(values, pa.float32()).cast(target)


def _decoded_text(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert bytes to text after a check that they are UTF-8.

    A database in encoding SQL_ASCII may send any bytes.
    """
    return values.cast(pa.binary()).cast(target)


def _decoded_bytea(values: pa.Array, _: pa.DataType) -> pa.Array:
    return bytea.from_text(values)


def _decoded_numeric(values: pa.Array, target: pa.DataType) -> pa.Array:
    return numeric.decimal_from_send(values, target)


def _native(values: pa.Array, target: pa.DataType) -> pa.Array:
    return values.cast(target)


def _string(type_oid: int, expression: str = _OUTPUT, defined: DefinedTypes = NONE_DEFINED) -> ColumnType:
    """PostgreSQL's own text."""
    printed = _Printed(type_oid, defined)
    return ColumnType(pa.string(), "string", _decoded_text, printed, _decoded_text, expression)


def _number(
    arrow: pa.DataType, spark: str, layout: str, text: Converter = _parsed, expression: str = _NATIVE
) -> ColumnType:
    return ColumnType(arrow, spark, text, _Fixed(layout), _native, expression)


def _datetime(arrow: pa.DataType, spark: str, send: str) -> ColumnType:
    # The copy's driver overflows on infinity and on distant years, so the copy selects the send function's
    # bytes.
    return ColumnType(
        arrow,
        spark,
        datetimes.from_text,
        datetimes.from_send,
        datetimes.from_send,
        f"pg_catalog.{send}({{}})",
    )


def _decimal(precision: int, scale: int) -> ColumnType:
    return ColumnType(
        pa.decimal128(precision, scale),
        f"decimal({precision},{scale})",
        _parsed_decimal,
        _decoded_numeric,
        _parsed_decimal,
        _TEXT,
    )


def _array(array_oid: int, element: ColumnType) -> ColumnType:
    text = ArrayText(element.text, ";" if array_oid == BOX_ARRAY else ",")
    send = ArraySend(ELEMENTS[array_oid], element.binary)
    return ColumnType(pa.list_(element.arrow), f"array<{element.spark}>", text, send, text, _TEXT)


_SMALLINT = _number(pa.int16(), "smallint", ">i2")
_INT = _number(pa.int32(), "int", ">i4")
_BIGINT = _number(pa.int64(), "bigint", ">i8")

_TYPES: Mapping[int, ColumnType] = MappingProxyType(
    {
        16: _number(pa.bool_(), "boolean", "u1", _boolean_text),
        17: ColumnType(pa.binary(), "binary", _decoded_bytea, _native, _native, _NATIVE),
        19: _string(19, _NATIVE),  # name
        20: _BIGINT,
        21: _SMALLINT,
        23: _INT,
        25: _string(25, _NATIVE),  # text
        26: _number(pa.int64(), "bigint", ">u4", expression="{}::pg_catalog.int8"),  # oid
        114: _string(114, _TEXT),  # json
        700: _number(pa.float32(), "float", ">f4"),
        701: _number(pa.float64(), "double", ">f8"),
        1042: _string(1042, _NATIVE),  # char(n): a cast to text would remove its padding.
        1043: _string(1043, _NATIVE),  # varchar
        1082: _datetime(pa.date32(), "date", "date_send"),
        1114: _datetime(pa.timestamp("us"), "timestamp_ntz", "timestamp_send"),
        1184: _datetime(pa.timestamp("us", "UTC"), "timestamp", "timestamptz_send"),
        _NUMERIC: _string(_NUMERIC, _TEXT),  # Without a precision, or with one that no decimal has.
        2950: _string(2950, _TEXT),  # uuid
        3802: _string(3802, _TEXT),  # jsonb
    }
)

_WIDER: Mapping[int, Mapping[str, ColumnType]] = MappingProxyType(
    {
        21: {
            "int": _number(pa.int32(), "int", ">i2"),
            "bigint": _number(pa.int64(), "bigint", ">i2"),
        },
        23: {"bigint": _number(pa.int64(), "bigint", ">i4")},
        700: {"double": _number(pa.float64(), "double", ">f4", _widened_real)},
    }
)
"""The exact overrides of a type; string, and for numeric decimal(p,s), are offered besides."""

_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d+)(?:,(\d+))?\)")
_ARRAY = re.compile(r"array<(.*)>")
_SYNONYMS = {
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
}


def column_type(
    type_oid: int,
    type_modifier: int,
    override: str | None = None,
    defined: DefinedTypes = NONE_DEFINED,
) -> ColumnType:
    """The replica's column for a PostgreSQL type.

    `override` is another Spark type that the user wants: string (PostgreSQL's own text) for every type, any
    decimal(p,s) for numeric, a wider type for integers and real, or an array of these. `defined` describes
    users' types, which is needed for their values in binary format.
    """
    default = _default_type(type_oid, type_modifier, defined)
    if override is None:
        return default
    wanted = "".join(override.lower().split())
    chosen = _chosen_type(type_oid, type_modifier, wanted, defined)
    if chosen is None:
        raise UnsupportedTypeError(
            f'a column of PostgreSQL type {type_oid} cannot be of Spark type "{override}"',
            hint=f"offered for it: {', '.join(dict.fromkeys([default.spark, *_offered(type_oid), 'string']))}",
        )
    return chosen


def _default_type(type_oid: int, type_modifier: int, defined: DefinedTypes) -> ColumnType:
    if type_oid in ELEMENTS:
        return _array(type_oid, _default_type(ELEMENTS[type_oid], type_modifier, defined))
    if type_oid == _NUMERIC and type_modifier >= 4:
        # numeric_typmod_precision and _scale in utils/adt/numeric.c; the scale has a sign from 15 on.
        precision = (type_modifier - 4) >> 16 & 0xFFFF
        scale = ((type_modifier - 4) & 0x7FF ^ 0x400) - 0x400
        if precision <= _GREATEST_PRECISION and 0 <= scale <= precision:
            return _decimal(precision, scale)
    return _TYPES.get(type_oid) or _string(type_oid, defined=defined)


def _chosen_type(type_oid: int, type_modifier: int, wanted: str, defined: DefinedTypes) -> ColumnType | None:
    """The column's type for an override, None if it is not offered."""
    default = _default_type(type_oid, type_modifier, defined)
    wanted = _SYNONYMS.get(wanted, wanted)
    if wanted == default.spark:
        return default
    if wanted == "string":
        return _string(type_oid, _TEXT if type_oid == _NUMERIC else _OUTPUT, defined)
    if type_oid in ELEMENTS:
        inner = _ARRAY.fullmatch(wanted)
        element = inner and _chosen_type(ELEMENTS[type_oid], type_modifier, inner[1], defined)
        return _array(type_oid, element) if element else None
    decimal = _DECIMAL.fullmatch(wanted) if type_oid == _NUMERIC else None
    if decimal is not None:
        precision, scale = int(decimal[1]), int(decimal[2] or 0)
        if 1 <= precision <= _GREATEST_PRECISION and scale <= precision:
            return _decimal(precision, scale)
    return _WIDER.get(type_oid, {}).get(wanted)


def _offered(type_oid: int) -> list[str]:
    """The types that an override may ask for besides the default and string."""
    if type_oid in ELEMENTS:
        return [f"array<{spark}>" for spark in (*_offered(ELEMENTS[type_oid]), "string")]
    return ["decimal(p,s)"] if type_oid == _NUMERIC else list(_WIDER.get(type_oid, {}))


def copy_expression(
    quoted_column: str, type_oid: int, type_modifier: int, override: str | None = None
) -> str:
    """The expression that the initial copy selects for a column; `from_copy` converts its values."""
    return column_type(type_oid, type_modifier, override).expression.format(quoted_column)


def from_text(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert PostgreSQL's text output (binary or string, null for NULL) to the column's Arrow type."""
    return _converted(type.text, values, type, column)


def from_binary(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert the bytes of the type's send function (binary, null for NULL) to the column's Arrow type."""
    try:
        return _converted(type.binary, values, type, column)
    except NoOutputError:
        raise UnsupportedBinaryError(
            f'column "{column}" has a value in binary format, and its type can be printed by the server only',
            hint="read the slot without `binary`; if pgsieve.yaml does not set it, the server cannot print the value as text:"
            " correct the value at the publisher, or leave its column out by a column list",
            sqlstate="0A000",
        ) from None


def from_copy(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert the values of `copy_expression`, as ADBC reads them, to the column's Arrow type."""
    return _converted(type.copy, values, type, column)


def _converted(converter: Converter, values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002
    try:
        return converter(values, type.arrow)
    except (
        ValueError
    ):  # Arrow's errors are of this class. They quote the value, so the new error has no cause.
        raise ValueNotRepresentableError(
            f'column "{column}" has a value that Spark type {type.spark} cannot hold',
            hint=f"set `types: {{{OF_TABLE}.{quote_identifier(column)}: string}}` in pgsieve.yaml for PostgreSQL's own text",
            row=_first_refused(converter, values, type.arrow),
        ) from None


def _first_refused(converter: Converter, values: pa.Array, target: pa.DataType) -> int:
    """The index of the first value that cannot be converted; there has to be one."""

    def refused(first: int, last: int) -> bool:
        try:
            converter(values.take(pa.array(range(first, last), pa.int64())), target)
        except ValueError:
            return True
        return False

    first, last = 0, len(values)
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (first, middle) if refused(first, middle) else (middle, last)
    return first
