"""Prints a replica's values as PostgreSQL does.

In: Arrow values of a replica. Out: the text that PostgreSQL's output functions print, with the session's settings that
`pgsieve.decoding.values.output` lists. Python has no dates before year 1 and after 9999. So dates and timestamps are
printed from their numbers of days or microseconds. Raises nothing for values of a replica.
"""

from __future__ import annotations

import pyarrow as pa

from pgsieve.decoding.values import datetimes, numeric
from pgsieve.decoding.values.arrays import print_lists
from pgsieve.decoding.values.output import print_binary
from pgsieve.decoding.values.output_numbers import print_float4, print_float8

_BYTEA, _DATE, _TIMESTAMP, _TIMESTAMPTZ = 17, 1082, 1114, 1184


def list_texts(values: pa.Array | pa.ChunkedArray) -> list[str]:
    """Return the text of each value, or `null` for NULL, as in PostgreSQL's errors about keys.

    Source: BuildIndexValueDescription() in genam.c.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    texts: list[str] = print_values(array).fill_null("null").to_pylist()
    return texts


def print_values(values: pa.Array) -> pa.Array:
    """Print a replica's values as strings; NULL stays NULL."""
    value_type = values.type
    if pa.types.is_date(value_type) or pa.types.is_timestamp(value_type):
        has_zone = pa.types.is_timestamp(value_type) and value_type.tz is not None
        return print_binary(
            datetimes.encode_binary(values),
            _DATE if pa.types.is_date(value_type) else _TIMESTAMPTZ if has_zone else _TIMESTAMP,
        )
    if pa.types.is_list(value_type):
        return print_lists(values, print_values(values.flatten()), ",")
    if pa.types.is_binary(value_type):
        return print_binary(values, _BYTEA)
    if pa.types.is_decimal(value_type):
        return numeric.print_decimals(values)
    if pa.types.is_floating(value_type):
        print_number = print_float4 if pa.types.is_float32(value_type) else print_float8
        return pa.array([None if n is None else print_number(n) for n in values.to_pylist()], pa.string())
    if pa.types.is_boolean(value_type):
        return pa.array(["f", "t"]).take(values.cast(pa.int8()))
    return values.cast(pa.string())
