"""The values of a row filter in Python: converts them from Arrow and from constants, and ranks them for comparisons.

| PostgreSQL                        | Python |
|-----------------------------------|--------|
| numeric                           | Decimal; its negated exponent is the display scale |
| real                              | a float with the value of a single precision number |
| date                              | days since 1970-01-01, or an infinity |
| timestamp, timestamptz            | microseconds since 1970-01-01, or an infinity |
| interval                          | the microseconds by which PostgreSQL compares it (interval_cmp_value), or an infinity |
| time, uuid                        | text with the same order |
| arrays                            | a list |
| boolean, bytea, other numbers and strings | bool, bytes, int, float, str |
| any other type                    | True if not NULL, because a filter can only test it for NULL |

Raises nothing for values with the Arrow types of `pgsieve.decoding.values.types`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import inf
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa

from pgsieve.decoding.row_filters import nodes, numeric
from pgsieve.decoding.row_filters.constants import parse_interval
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS
from pgsieve.decoding.values.datetimes import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
)

DAY_MICROS: Final = 86_400_000_000

_DATE_INFINITIES: Final = MappingProxyType({DATE_INFINITY: inf, DATE_MINUS_INFINITY: -inf})
_TIMESTAMP_INFINITIES: Final = MappingProxyType({TIMESTAMP_INFINITY: inf, TIMESTAMP_MINUS_INFINITY: -inf})
#: The texts of infinite intervals, which PostgreSQL has from 17 on.
_INTERVAL_INFINITIES: Final = MappingProxyType({"infinity": inf, "-infinity": -inf})
_MICROSECOND: Final = timedelta(microseconds=1)

# --- from Arrow --------------------------------------------------------------------------


def _identity(value: Any) -> Any:
    return value


def _convert_date(days: int) -> float:
    return _DATE_INFINITIES.get(days, days)


def _convert_timestamp(micros: int) -> float:
    return _TIMESTAMP_INFINITIES.get(micros, micros)


def _convert_numeric(value: Decimal | str) -> Decimal:
    return numeric.decimal_from_text(value) if isinstance(value, str) else value


def _convert_interval(text: str) -> float:
    return _INTERVAL_INFINITIES.get(text) or nodes.comparison_microseconds(parse_interval(text))


#: Maps the oid of a type to the Arrow type to which a column is cast before its values become Python values (None
#: for no cast), and to the conversion of these Python values.
_ARROW_CONVERSIONS: Final[dict[int, tuple[pa.DataType | None, Callable[[Any], Any]]]] = {
    **dict.fromkeys(
        (nodes.BOOL, nodes.BYTEA, nodes.TIME, nodes.UUID, *nodes.INTEGERS, *nodes.FLOATS, *nodes.STRINGS),
        (None, _identity),
    ),
    nodes.NUMERIC: (None, _convert_numeric),
    nodes.DATE: (pa.int32(), _convert_date),
    nodes.TIMESTAMP: (pa.int64(), _convert_timestamp),
    nodes.TIMESTAMPTZ: (pa.int64(), _convert_timestamp),
    nodes.INTERVAL: (None, _convert_interval),
}


def to_python_values(column: pa.Array, type_oid: int) -> list[Any]:
    """Return the values of a column of this PostgreSQL type, in the form of the module's table."""
    element_oid = ELEMENT_OIDS.get(type_oid, type_oid)
    if element_oid not in _ARROW_CONVERSIONS:
        return [True if is_valid else None for is_valid in column.is_valid().to_pylist()]
    arrow_type, convert = _ARROW_CONVERSIONS[element_oid]
    if arrow_type is not None:
        column = column.cast(arrow_type if element_oid == type_oid else pa.list_(arrow_type))
    values: list[Any] = column.to_pylist()
    if convert is _identity:
        return values
    if element_oid == type_oid:
        return [None if value is None else convert(value) for value in values]
    return [
        None if items is None else [None if item is None else convert(item) for item in items]
        for items in values
    ]


# --- constants ---------------------------------------------------------------------------


def to_python_value(value: nodes.ConstantValue) -> Any:
    """Return a constant's value in the form of the module's table."""
    match value:
        case Decimal():
            return numeric.expand_exponent(value)
        case nodes.Infinity(sign=sign):
            return sign * inf
        case nodes.Interval():
            return nodes.comparison_microseconds(value)
        case datetime():
            instant = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
            return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // _MICROSECOND
        case date():
            return (value - date(1970, 1, 1)).days
        case _:
            return value


# --- comparisons -------------------------------------------------------------------------


def _rank_float(value: float) -> tuple[bool, float]:
    """Return the rank of a float: NaN equals NaN, and is greater than all other floats."""
    return (False, value) if value == value else (True, 0.0)  # noqa: PLR0124


def _strip_padding(text: str) -> str:
    """Return the text without the padding of character(n), which comparisons ignore."""
    return text.rstrip(" ")


_RANK_FUNCTIONS: Final[dict[int, Callable[[Any], Any]]] = {
    nodes.NUMERIC: numeric.sort_key,
    nodes.FLOAT4: _rank_float,
    nodes.FLOAT8: _rank_float,
    nodes.BPCHAR: _strip_padding,
}


def date_to_micros(days: float) -> float:
    """Return a date as a timestamp, even if it is beyond PostgreSQL's range of timestamps."""
    return days * DAY_MICROS


def rank_function(type_oid: int) -> Callable[[Any], Any] | None:
    """Return the function from a value of this type to its rank; None if a value is its own rank.

    Values are compared, ordered and hashed by their ranks. A filter may order strings only under a collation
    that orders them by bytes. Python orders strings by code points. This is the order of their bytes in UTF-8.
    """
    if type_oid not in ELEMENT_OIDS:
        return _RANK_FUNCTIONS.get(type_oid)
    rank_element = rank_function(ELEMENT_OIDS[type_oid]) or _identity

    def rank_array(items: list[Any]) -> tuple[tuple[bool, Any], ...]:
        """Return the rank of an array.

        As elements, NULL equals NULL, and is greater than all other values. If an array is the beginning of a longer
        array, it is less than that array.
        """
        return tuple((True, 0) if item is None else (False, rank_element(item)) for item in items)

    return rank_array
