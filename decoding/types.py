"""PostgreSQL types as columns of a replica: a type's oid and modifier in, its Arrow and Spark type out.

One table says what each type becomes, how its text (pgoutput's values) is converted, and which SQL expression
the initial copy selects so that both ways lead to the same Arrow values. A type that is not in the table is
PostgreSQL's own text: arrays, enums, domains, ranges, interval, time, money, numeric without a precision.

| PostgreSQL | Spark | |
|---|---|---|
| boolean | boolean | |
| smallint, integer, bigint | smallint, int, bigint | |
| oid | bigint | oid has no sign |
| real, double precision | float, double | bit by bit; NaN and infinities as they are |
| numeric(p,s), p <= 38, 0 <= s <= p | decimal(p,s) | NaN is refused |
| other numeric | string | |
| text, varchar, name | string | |
| char(n) | string | with its padding blanks |
| bytea | binary | |
| date | date | infinities: `datetimes` |
| timestamp, timestamp with time zone | timestamp_ntz, timestamp | infinities: `datetimes` |
| uuid, json, jsonb, and every other type | string | as the type's output function prints it |

Both the slot's session and the copy's must print values with DateStyle ISO, IntervalStyle postgres, TimeZone
UTC, extra_float_digits 3, bytea_output hex and client encoding UTF8. Raises UnsupportedTypeError for an
override that is not offered and ValueNotRepresentableError for a value that its column cannot hold.
PostgreSQL documentation chapter 8; oids from src/include/catalog/pg_type.dat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from decoding import bytea, datetimes
from decoding.errors import UnsupportedTypeError, ValueNotRepresentableError
from decoding.octets import offsets_of

Converter: TypeAlias = Callable[[pa.Array, pa.DataType], pa.Array]

_NATIVE = "{}"
_TEXT = "{}::pg_catalog.text"
# The type's output function, as pgoutput calls it: a cast to text prints booleans and char(n) otherwise, also
# below a domain. concat() makes NULL an empty string.
_OUTPUT = "CASE WHEN pg_catalog.num_nulls({0}) = 0 THEN pg_catalog.concat({0}) END"

_NUMERIC = 1700
_GREATEST_PRECISION = 38  # Spark's and Arrow's


@dataclass(frozen=True, slots=True)
class ColumnType:
    """What a column of a PostgreSQL type is in a replica.

    `arrow` and `spark` are the same type twice; `text` and `copy` convert PostgreSQL's text, and what
    `copy_expression` yields in the initial copy, to `arrow`.
    """

    arrow: pa.DataType
    spark: str
    text: Converter
    copy: Converter
    expression: str


def _boolean_text(values: pa.Array, _: pa.DataType) -> pa.Array:
    """Convert 't' and 'f' (boolout)."""
    valid = np.asarray(values.is_valid())
    offsets = offsets_of(values)
    if (np.diff(offsets)[valid] != 1).any():
        raise ValueError("not a boolean")
    if not valid.any():
        return pa.nulls(len(values), pa.bool_())
    octets = np.frombuffer(values.buffers()[2], np.uint8)
    # A NULL behind the last value has no byte of its own.
    letters = np.take(octets, offsets[:-1], mode="clip")
    true = letters == ord("t")
    if (valid & ~true & (letters != ord("f"))).any():
        raise ValueError("not a boolean")
    return pa.array(true, mask=None if valid.all() else ~valid)


def _parsed(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert digits; the parser refuses what is no number, so the bytes need no check of their encoding."""
    text = values if pa.types.is_string(values.type) else values.cast(pa.binary()).view(pa.string())
    return text.cast(target)


def _widened_real(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Read as the four-byte number it is: its shortest digits as a double would be another number."""
    return _parsed(values, pa.float32()).cast(target)


def _decoded_text(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Check that the bytes are UTF-8: a database in encoding SQL_ASCII may hold anything."""
    return values.cast(pa.binary()).cast(target)


def _decoded_bytea(values: pa.Array, _: pa.DataType) -> pa.Array:
    return bytea.from_text(values)


def _native(values: pa.Array, target: pa.DataType) -> pa.Array:
    return values.cast(target)


_STRING = ColumnType(pa.string(), "string", _decoded_text, _decoded_text, _OUTPUT)
_CHARACTERS = replace(_STRING, expression=_NATIVE)
_CAST_TO_TEXT = replace(_STRING, expression=_TEXT)


def _number(
    arrow: pa.DataType, spark: str, text: Converter = _parsed, expression: str = _NATIVE
) -> ColumnType:
    return ColumnType(arrow, spark, text, _native, expression)


def _datetime(arrow: pa.DataType, spark: str, send: str) -> ColumnType:
    # The copy's driver overflows on infinity and on distant years in native values; the send functions do not.
    return ColumnType(arrow, spark, datetimes.from_text, datetimes.from_send, f"pg_catalog.{send}({{}})")


def _decimal(precision: int, scale: int) -> ColumnType:
    return ColumnType(
        pa.decimal128(precision, scale), f"decimal({precision},{scale})", _parsed, _parsed, _TEXT
    )


_SMALLINT = _number(pa.int16(), "smallint")
_INT = _number(pa.int32(), "int")
_BIGINT = _number(pa.int64(), "bigint")

_TYPES: Mapping[int, ColumnType] = MappingProxyType(
    {
        16: _number(pa.bool_(), "boolean", _boolean_text),
        17: ColumnType(pa.binary(), "binary", _decoded_bytea, _native, _NATIVE),
        19: _CHARACTERS,  # name
        20: _BIGINT,
        21: _SMALLINT,
        23: _INT,
        25: _CHARACTERS,  # text
        26: replace(_BIGINT, expression="{}::pg_catalog.int8"),  # oid
        114: _CAST_TO_TEXT,  # json
        700: _number(pa.float32(), "float"),
        701: _number(pa.float64(), "double"),
        1042: _CHARACTERS,  # char(n): a cast to text would remove its padding
        1043: _CHARACTERS,  # varchar
        1082: _datetime(pa.date32(), "date", "date_send"),
        1114: _datetime(pa.timestamp("us"), "timestamp_ntz", "timestamp_send"),
        1184: _datetime(pa.timestamp("us", "UTC"), "timestamp", "timestamptz_send"),
        _NUMERIC: _CAST_TO_TEXT,  # without a precision, or one that no decimal has
        2950: _CAST_TO_TEXT,  # uuid
        3802: _CAST_TO_TEXT,  # jsonb
    }
)

_WIDER: Mapping[int, Mapping[str, ColumnType]] = MappingProxyType(
    {
        21: {"int": _INT, "bigint": _BIGINT},
        23: {"bigint": _BIGINT},
        700: {"double": _number(pa.float64(), "double", _widened_real)},
    }
)
"""What an override may make of a type beside string and, for numeric, decimal(p,s): only what is exact."""

_DECIMAL = re.compile(r"(?:decimal|numeric)\((\d+)(?:,(\d+))?\)")
_SYNONYMS = {
    "short": "smallint",
    "integer": "int",
    "long": "bigint",
    "real": "float",
    "timestamp_ltz": "timestamp",
}


def column_type(type_oid: int, type_modifier: int, override: str | None = None) -> ColumnType:
    """Return what a column of this PostgreSQL type is in a replica.

    `override` is another Spark type that the user asks for: string is PostgreSQL's own text for every type;
    numeric can be any decimal(p,s); integers and real can be wider.
    """
    default = _default_type(type_oid, type_modifier)
    if override is None:
        return default
    wanted = "".join(override.lower().split())
    wanted = _SYNONYMS.get(wanted, wanted)
    if wanted == default.spark:
        return default
    if wanted == "string":
        return _CAST_TO_TEXT if type_oid == _NUMERIC else _STRING
    wider = _WIDER.get(type_oid, {})
    if wanted in wider:
        return wider[wanted]
    decimal = _DECIMAL.fullmatch(wanted) if type_oid == _NUMERIC else None
    if decimal is not None:
        precision, scale = int(decimal[1]), int(decimal[2] or 0)
        if 1 <= precision <= _GREATEST_PRECISION and scale <= precision:
            return _decimal(precision, scale)
    offered = [default.spark, *wider, *(["decimal(p,s)"] if type_oid == _NUMERIC else []), "string"]
    raise UnsupportedTypeError(
        f'a column of PostgreSQL type {type_oid} cannot be of Spark type "{override}"',
        hint=f"offered for it: {', '.join(dict.fromkeys(offered))}",
    )


def _default_type(type_oid: int, type_modifier: int) -> ColumnType:
    if type_oid == _NUMERIC and type_modifier >= 4:
        # numeric_typmod_precision and _scale in utils/adt/numeric.c; the scale has a sign from 15 on.
        precision = (type_modifier - 4) >> 16 & 0xFFFF
        scale = ((type_modifier - 4) & 0x7FF ^ 0x400) - 0x400
        if precision <= _GREATEST_PRECISION and 0 <= scale <= precision:
            return _decimal(precision, scale)
    return _TYPES.get(type_oid, _STRING)


def from_text(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert PostgreSQL's text output (binary or string, null for NULL) to the column's Arrow type."""
    return _converted(type.text, values, type, column)


def copy_expression(
    quoted_column: str, type_oid: int, type_modifier: int, override: str | None = None
) -> str:
    """Return what the initial copy selects for a column; `from_copy` converts it."""
    return column_type(type_oid, type_modifier, override).expression.format(quoted_column)


def from_copy(values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002 - as in PostgreSQL
    """Convert the values of the column's `copy_expression`, as ADBC reads them, to the column's Arrow type."""
    return _converted(type.copy, values, type, column)


def _converted(converter: Converter, values: pa.Array, type: ColumnType, column: str) -> pa.Array:  # noqa: A002
    try:
        return converter(values, type.arrow)
    except ValueError:  # Arrow's errors are among these. They quote the value, so none is chained
        raise ValueNotRepresentableError(
            f'column "{column}" has a value that Spark type {type.spark} cannot hold',
            hint=f"set `types: {{<schema>.<table>.{column}: string}}` for PostgreSQL's own text, then resync the table",
        ) from None
