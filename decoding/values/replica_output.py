"""Prints a replica's values as PostgreSQL does.

In: Arrow values of a replica. Out: the text that PostgreSQL's output functions print, with the session's settings that
`pgsieve.decoding.values.output` lists. Python has no dates before year 1 and after 9999. So dates and timestamps are
printed from their numbers of days or microseconds. Raises nothing for values of a replica.
"""

from __future__ import annotations

import pyarrow as pa

from pgsieve.decoding.values import datetimes, numeric
from pgsieve.decoding.values.arrays import text_from_lists
from pgsieve.decoding.values.output import text_of
from pgsieve.decoding.values.output_numbers import float4_text, float8_text

_BYTEA, _DATE, _TIMESTAMP, _TIMESTAMPTZ = 17, 1082, 1114, 1184


def value_texts(values: pa.Array | pa.ChunkedArray) -> list[str]:
    """Return the text of each value, or `null` for NULL, as PostgreSQL's errors about keys have them.

    Source: BuildIndexValueDescription() in genam.c.
    """
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    texts: list[str] = replica_text(array).fill_null("null").to_pylist()
    return texts


def replica_text(values: pa.Array) -> pa.Array:
    """Print a replica's values as strings; NULL stays NULL."""
    kind = values.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        has_zone = pa.types.is_timestamp(kind) and kind.tz is not None
        return text_of(
            datetimes.to_send(values),
            _DATE if pa.types.is_date(kind) else _TIMESTAMPTZ if has_zone else _TIMESTAMP,
        )
    if pa.types.is_list(kind):
        return text_from_lists(values, replica_text(values.flatten()), ",")
    if pa.types.is_binary(kind):
        return text_of(values, _BYTEA)
    if pa.types.is_decimal(kind):
        return numeric.text_from_decimal(values)
    if pa.types.is_floating(kind):
        print_number = float4_text if pa.types.is_float32(kind) else float8_text
        return pa.array([None if n is None else print_number(n) for n in values.to_pylist()], pa.string())
    if pa.types.is_boolean(kind):
        return pa.array(["f", "t"]).take(values.cast(pa.int8()))
    return values.cast(pa.string())
