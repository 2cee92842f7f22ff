"""Maps PostgreSQL's types to the columns of a replica, and converts their values.

In: the oid and the modifier of a type. Out: its Arrow type, its Spark type, and the conversions of its values.

One table (`_COLUMN_TYPE_BY_OID`) has each type's Arrow and Spark type, the conversions of its values from text and from
binary format, and the SQL expression that the initial copy selects. Text, binary format and copy all give the same
Arrow values. An array of a built-in type becomes an array of the element's type. A user's type, or a type that is not
in the table, becomes text. docs/types.md shows the table.

The sessions that read the slot or copy tables must print values with DateStyle ISO, IntervalStyle postgres,
TimeZone UTC, extra_float_digits 3, bytea_output hex and client encoding UTF8.

The functions raise:

- UnsupportedTypeError for a type that the user chose and that pgsieve does not offer
- ValueNotRepresentableError for a value that does not fit in its column
- UnsupportedBinaryError for a value in binary format that only the server can print as text

PostgreSQL documentation, Data Types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from pgsieve.decoding.binary.octets import read_fixed_width, value_offsets
from pgsieve.decoding.errors import (
    TABLE_PLACEHOLDER,
    UnsupportedBinaryError,
    UnsupportedTypeError,
    ValueNotRepresentableError,
)
from pgsieve.decoding.values import bytea, datetimes, numeric
from pgsieve.decoding.values.arrays import ArraySendConverter, ArrayTextConverter, Converter
from pgsieve.decoding.values.builtin_types import (
    BOX_ARRAY_OID,
    ELEMENT_OIDS,
    NO_DEFINED_TYPES,
    DerivedTypesByOid,
)
from pgsieve.decoding.values.output import NoOutputError, print_binary
from pgsieve.decoding.values.quoting import double_single_quotes, quote_identifier

_COLUMN_EXPRESSION = "{}"
_TEXT_EXPRESSION = "{}::pg_catalog.text"
# concat() calls the type's output function, as pgoutput does. A cast to text would print booleans, char(n) and
# domains over them in another way. The CASE keeps NULL, because concat() turns NULL into an empty string.
_OUTPUT_EXPRESSION = "CASE WHEN pg_catalog.num_nulls({0}) = 0 THEN pg_catalog.concat({0}) END"

_NUMERIC = 1700
_MAX_PRECISION = 38  # The greatest precision of decimals in Spark and Arrow.


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The replica's column for a PostgreSQL type.

    - `arrow_type` and `spark_type` are the column's types in these libraries.
    - `text_converter` converts values from PostgreSQL's text format to `arrow_type`.
    - `binary_converter` converts values from PostgreSQL's binary format to `arrow_type`.
    - `copy_expression` is the SQL expression that the initial copy selects, and `copy_converter` converts its results to `arrow_type`.
    """

    arrow_type: pa.DataType
    spark_type: str
    text_converter: Converter
    binary_converter: Converter
    copy_converter: Converter
    copy_expression: str


@dataclass(frozen=True, slots=True)
class _FixedWidthConverter:
    """Converts numbers in binary format; `layout` is their type in numpy's notation, such as `>i4`."""

    layout: str

    def __call__(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        numbers, is_valid = read_fixed_width(values.cast(pa.binary()), self.layout)
        return pa.array(numbers, mask=None if is_valid.all() else ~is_valid).cast(target)


@dataclass(frozen=True, slots=True)
class _OutputTextConverter:
    """Converts binary format to the text that the type's output function prints."""

    type_oid: int
    defined_types: DerivedTypesByOid

    def __call__(self, values: pa.Array, _: pa.DataType) -> pa.Array:
        return print_binary(values, self.type_oid, self.defined_types)


def _parse_boolean(values: pa.Array, _: pa.DataType) -> pa.Array:
    """Convert 't' and 'f', the text of boolout."""
    is_valid = np.asarray(values.is_valid())
    offsets = value_offsets(values)
    if (np.diff(offsets)[is_valid] != 1).any():
        raise ValueError("not a boolean")
    if not is_valid.any():
        return pa.nulls(len(values), pa.bool_())
    octets = np.frombuffer(values.buffers()[2], np.uint8)
    # A NULL after the last value has an offset beyond the last byte. The mode "clip" makes this offset valid.
    letters = np.take(octets, offsets[:-1], mode="clip")
    is_true = letters == ord("t")
    if (is_valid & ~is_true & (letters != ord("f"))).any():
        raise ValueError("not a boolean")
    return pa.array(is_true, mask=None if is_valid.all() else ~is_valid)


def _parse_number(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Parse numbers. The text need not be checked for UTF-8: Arrow refuses text that is not a number."""
    text = values if pa.types.is_string(values.type) else values.cast(pa.binary()).view(pa.string())
    return text.cast(target)


def _parse_decimal(values: pa.Array, target: pa.DataType) -> pa.Array:
    return numeric.parse_decimal(_parse_number(values, pa.string()), target)


def _parse_widened_real(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Parse the text as real, then convert the number to double precision.

    Parsed as double precision, the text could be another number. For example 0.1 as real is 0.10000000149011612.
    """
    return _parse_number(values, pa.float32()).cast(target)


def _decode_text(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert bytes to text; raises an error if they are not UTF-8. A database in SQL_ASCII may send any bytes."""
    return values.cast(pa.binary()).cast(target)


def _decode_bytea(values: pa.Array, _: pa.DataType) -> pa.Array:
    return bytea.decode_text(values)


def _decode_numeric(values: pa.Array, target: pa.DataType) -> pa.Array:
    return numeric.decode_decimal(values, target)


def _cast(values: pa.Array, target: pa.DataType) -> pa.Array:
    return values.cast(target)


def _make_string_column(
    type_oid: int,
    copy_expression: str = _OUTPUT_EXPRESSION,
    defined_types: DerivedTypesByOid = NO_DEFINED_TYPES,
) -> ColumnType:
    """Return a column that has the text of the type's output function."""
    output_text = _OutputTextConverter(type_oid, defined_types)
    return ColumnType(pa.string(), "string", _decode_text, output_text, _decode_text, copy_expression)


def _make_number_column(
    arrow_type: pa.DataType,
    spark_type: str,
    layout: str,
    text_converter: Converter = _parse_number,
    copy_expression: str = _COLUMN_EXPRESSION,
) -> ColumnType:
    return ColumnType(
        arrow_type, spark_type, text_converter, _FixedWidthConverter(layout), _cast, copy_expression
    )


def _make_datetime_column(arrow_type: pa.DataType, spark_type: str, send_function: str) -> ColumnType:
    # pgsieve reads the copy with ADBC, and ADBC overflows for infinity and distant years. So the copy selects the bytes
    # of the send function.
    return ColumnType(
        arrow_type,
        spark_type,
        datetimes.parse_text,
        datetimes.decode_binary,
        datetimes.decode_binary,
        f"pg_catalog.{send_function}({{}})",
    )


def _make_decimal_column(precision: int, scale: int) -> ColumnType:
    return ColumnType(
        pa.decimal128(precision, scale),
        f"decimal({precision},{scale})",
        _parse_decimal,
        _decode_numeric,
        _parse_decimal,
        _TEXT_EXPRESSION,
    )


def _make_array_column(array_oid: int, element: ColumnType) -> ColumnType:
    text_converter = ArrayTextConverter(element.text_converter, ";" if array_oid == BOX_ARRAY_OID else ",")
    binary_converter = ArraySendConverter(ELEMENT_OIDS[array_oid], element.binary_converter)
    return ColumnType(
        pa.list_(element.arrow_type),
        f"array<{element.spark_type}>",
        text_converter,
        binary_converter,
        text_converter,
        _TEXT_EXPRESSION,
    )


_SMALLINT = _make_number_column(pa.int16(), "smallint", ">i2")
_INT = _make_number_column(pa.int32(), "int", ">i4")
_BIGINT = _make_number_column(pa.int64(), "bigint", ">i8")

_COLUMN_TYPE_BY_OID: Mapping[int, ColumnType] = MappingProxyType(
    {
        16: _make_number_column(pa.bool_(), "boolean", "u1", _parse_boolean),
        17: ColumnType(pa.binary(), "binary", _decode_bytea, _cast, _cast, _COLUMN_EXPRESSION),
        19: _make_string_column(19, _COLUMN_EXPRESSION),  # name
        20: _BIGINT,
        21: _SMALLINT,
        23: _INT,
        25: _make_string_column(25, _COLUMN_EXPRESSION),  # text
        26: _make_number_column(pa.int64(), "bigint", ">u4", copy_expression="{}::pg_catalog.int8"),  # oid
        114: _make_string_column(114, _TEXT_EXPRESSION),  # json
        700: _make_number_column(pa.float32(), "float", ">f4"),
        701: _make_number_column(pa.float64(), "double", ">f8"),
        1042: _make_string_column(
            1042, _COLUMN_EXPRESSION
        ),  # char(n): a cast to text would remove its padding.
        1043: _make_string_column(1043, _COLUMN_EXPRESSION),  # varchar
        1082: _make_datetime_column(pa.date32(), "date", "date_send"),
        1114: _make_datetime_column(pa.timestamp("us"), "timestamp_ntz", "timestamp_send"),
        1184: _make_datetime_column(pa.timestamp("us", "UTC"), "timestamp", "timestamptz_send"),
        _NUMERIC: _make_string_column(
            _NUMERIC, _TEXT_EXPRESSION
        ),  # without a precision, or with one that is too great
        2950: _make_string_column(2950, _TEXT_EXPRESSION),  # uuid
        3802: _make_string_column(3802, _TEXT_EXPRESSION),  # jsonb
    }
)

_WIDER_TYPES: Mapping[int, Mapping[str, ColumnType]] = MappingProxyType(
    {
        21: {
            "int": _make_number_column(pa.int32(), "int", ">i2"),
            "bigint": _make_number_column(pa.int64(), "bigint", ">i2"),
        },
        23: {"bigint": _make_number_column(pa.int64(), "bigint", ">i4")},
        700: {"double": _make_number_column(pa.float64(), "double", ">f4", _parse_widened_real)},
    }
)
"""Maps a type to the wider types that a user can choose. string is offered for all types, decimal(p,s) for numeric."""

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
    defined_types: DerivedTypesByOid = NO_DEFINED_TYPES,
) -> ColumnType:
    """Return the replica's column for a PostgreSQL type.

    `override` is a Spark type that the user chose: string for every type, decimal(p,s) for numeric, a wider
    type for integers and real, or an array of these. `defined_types` has users' types; they are needed to print values in
    binary format. Raises UnsupportedTypeError if pgsieve does not offer the override for the type.
    """
    default_type = _find_default_type(type_oid, type_modifier, defined_types)
    if override is None:
        return default_type
    type_name = "".join(override.lower().split())
    override_type = _find_override_type(type_oid, type_modifier, type_name, defined_types)
    if override_type is None:
        raise UnsupportedTypeError(
            f'a column of PostgreSQL type {type_oid} cannot be of Spark type "{override}"',
            hint=f"offered types: {', '.join(dict.fromkeys([default_type.spark_type, *_list_offered_types(type_oid), 'string']))}",
        )
    return override_type


def _find_default_type(type_oid: int, type_modifier: int, defined_types: DerivedTypesByOid) -> ColumnType:
    if type_oid in ELEMENT_OIDS:
        return _make_array_column(
            type_oid, _find_default_type(ELEMENT_OIDS[type_oid], type_modifier, defined_types)
        )
    if type_oid == _NUMERIC and type_modifier >= 4:
        # See numeric_typmod_precision() and numeric_typmod_scale() in utils/adt/numeric.c. From version 15 on the
        # scale is signed.
        precision = (type_modifier - 4) >> 16 & 0xFFFF
        scale = ((type_modifier - 4) & 0x7FF ^ 0x400) - 0x400
        if precision <= _MAX_PRECISION and 0 <= scale <= precision:
            return _make_decimal_column(precision, scale)
    return _COLUMN_TYPE_BY_OID.get(type_oid) or _make_string_column(type_oid, defined_types=defined_types)


def _find_override_type(
    type_oid: int, type_modifier: int, type_name: str, defined_types: DerivedTypesByOid
) -> ColumnType | None:
    """Return the column for a Spark type that the user requested, or None if pgsieve does not offer this type."""
    default_type = _find_default_type(type_oid, type_modifier, defined_types)
    type_name = _SYNONYMS.get(type_name, type_name)
    if type_name == default_type.spark_type:
        return default_type
    if type_name == "string":
        return _make_string_column(
            type_oid, _TEXT_EXPRESSION if type_oid == _NUMERIC else _OUTPUT_EXPRESSION, defined_types
        )
    if type_oid in ELEMENT_OIDS:
        array_match = _ARRAY.fullmatch(type_name)
        element = array_match and _find_override_type(
            ELEMENT_OIDS[type_oid], type_modifier, array_match[1], defined_types
        )
        return _make_array_column(type_oid, element) if element else None
    decimal_match = _DECIMAL.fullmatch(type_name) if type_oid == _NUMERIC else None
    if decimal_match is not None:
        precision, scale = int(decimal_match[1]), int(decimal_match[2] or 0)
        if 1 <= precision <= _MAX_PRECISION and scale <= precision:
            return _make_decimal_column(precision, scale)
    return _WIDER_TYPES.get(type_oid, {}).get(type_name)


def _list_offered_types(type_oid: int) -> list[str]:
    """Return the Spark types that pgsieve offers for a type, besides the default and string."""
    if type_oid in ELEMENT_OIDS:
        return [f"array<{spark}>" for spark in (*_list_offered_types(ELEMENT_OIDS[type_oid]), "string")]
    return ["decimal(p,s)"] if type_oid == _NUMERIC else list(_WIDER_TYPES.get(type_oid, {}))


def copy_expression(
    quoted_column: str, type_oid: int, type_modifier: int, override: str | None = None
) -> str:
    """Return the SQL expression that the initial copy selects for a column; `convert_copy` converts its values."""
    return column_type(type_oid, type_modifier, override).copy_expression.format(quoted_column)


def convert_text(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert the text of the type's output function to the column's Arrow type; `values` are binary or string."""
    return _convert(type.text_converter, values, type, column)


def convert_binary(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert the bytes of the type's send function to the column's Arrow type."""
    try:
        return _convert(type.binary_converter, values, type, column)
    except NoOutputError:
        raise UnsupportedBinaryError(
            f'column "{column}" has a value in binary format, and only the server can print this type',
            hint="read the slot without `binary`; if pgsieve.yaml does not set it, pgsieve fell back to binary format,"
            " because the server cannot print the value as text: correct the value at the publisher, or exclude its column by a column list",
            sqlstate="0A000",
        ) from None


def convert_copy(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert the values of `copy_expression`, as ADBC reads them, to the column's Arrow type."""
    return _convert(type.copy_converter, values, type, column)


def _convert(converter: Converter, values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002
    try:
        return converter(values, type.arrow_type)
    except (
        ValueError
    ):  # Arrow's errors are of this class. They quote the value, so the new error has no cause.
        # Within single quotes, YAML needs no escapes for double quotes, colons and commas.
        key = f"'{TABLE_PLACEHOLDER}.{double_single_quotes(quote_identifier(column))}'"
        raise ValueNotRepresentableError(
            f'column "{column}" has a value that Spark type {type.spark_type} cannot hold',
            hint=f"set `types: {{{key}: string}}` in pgsieve.yaml for PostgreSQL's own text",
            value_index=_find_first_unconvertible(converter, values, type.arrow_type),
        ) from None


def _find_first_unconvertible(converter: Converter, values: pa.Array, target_type: pa.DataType) -> int:
    """Return the index of the first value that cannot be converted; the caller knows that there is one."""

    def is_unconvertible(first: int, last: int) -> bool:
        try:
            converter(values.take(pa.array(range(first, last), pa.int64())), target_type)
        except ValueError:
            return True
        return False

    first, last = 0, len(values)
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (first, middle) if is_unconvertible(first, middle) else (middle, last)
    return first
