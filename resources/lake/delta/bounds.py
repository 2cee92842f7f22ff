"""Leaves out the bounds of a file's values that would be wrong for some reader.

In: the columns of a new file. Out: delta-rs' properties for the write. Without bounds, readers cannot skip the
file or a row group, but read the same values. These bounds are left out:

- of decimals with more than 15 digits: delta-rs computes their bounds in floating point, 9007199254740993 as
  ...992, and a reader that looks for the value skips the file;
- of floating-point numbers: Parquet's bounds ignore NaN, which PostgreSQL and Spark order after every number,
  so a reader that looks for greater values skips NaN (`parquet_files` leaves them out, too);
- of texts and bytes all but a prefix: otherwise the file's footer and Delta's log would repeat values of megabytes, and
  Spark reads no log with a text of more than 20,000,000 characters. A truncated upper bound is rounded up, so it is
  still a bound;
- of dates after the year 262142, for which delta-rs panics. PostgreSQL's dates end in 5874897, and infinity
  is even later. If a file has such a date, none of its columns with dates has bounds.
"""

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import ColumnProperties, WriterProperties
from deltalake.exceptions import DeltaError

from pgsieve.resources.lake.delta.parquet_files import COMPRESSION_LEVEL, ROW_GROUP, has_dictionary, leaves

Result = TypeVar("Result")

#: 262142-12-31, the last date of chrono, which delta-rs uses; as days since 1970-01-01.
_LAST_DAY = 95_026_236
_PANIC = "`NaiveDate + TimeDelta` overflowed"
#: A decimal of this many digits survives a conversion to floating point.
_EXACT_DIGITS = 15
#: The length of text bounds. It is delta-rs's default, which does not apply to a write with properties.
_BOUND_BYTES = 64


def write_with_bounds(
    write: Callable[[WriterProperties], Result], schema: pa.Schema, rows: pa.Table | None = None
) -> Result:
    """Call `write` with properties for files of this schema; return its result.

    If delta-rs fails at the bounds of dates, `write` is repeated without these: the failed write has committed
    nothing. `rows` are the rows to write, or a part of them.
    """
    if rows is not None and any(map(_has_late_date, rows.columns)):
        return write(writer_properties(schema, dates=False))
    try:
        return write(writer_properties(schema))
    except DeltaError as error:
        if _PANIC not in str(error):
            raise
        return write(writer_properties(schema, dates=False))


def writer_properties(schema: pa.Schema, *, dates: bool = True) -> WriterProperties:
    """Properties for files of this schema, without bounds that delta-rs computes wrongly; `dates`: with bounds of dates."""
    fields = list(schema)
    unsafe = [field for field in fields if _has_unsafe_bounds(field.type, dates=dates)]
    # The properties can only name top-level columns. So if a field of a struct is unsafe, no struct gets bounds.
    no_structs = any(pa.types.is_nested(field.type) for field in unsafe)
    return WriterProperties(
        max_row_group_size=ROW_GROUP,
        compression="ZSTD",
        compression_level=COMPRESSION_LEVEL,
        statistics_truncate_length=_BOUND_BYTES,
        default_column_properties=ColumnProperties(
            dictionary_enabled=False, statistics_enabled="NONE" if no_structs else None
        ),
        column_properties={
            field.name: ColumnProperties(
                dictionary_enabled=has_dictionary(field.type),
                statistics_enabled="NONE" if field in unsafe else "CHUNK" if no_structs else None,
            )
            for field in fields
        },
    )


def _has_unsafe_bounds(kind: pa.DataType, *, dates: bool) -> bool:
    return any(
        pa.types.is_floating(leaf)
        or (pa.types.is_decimal(leaf) and leaf.precision > _EXACT_DIGITS)
        or (pa.types.is_date(leaf) and not dates)
        for _, leaf in leaves("", kind)
    )


def _has_late_date(values: pa.ChunkedArray) -> bool:
    """Whether a date is too late for delta-rs's bounds, also within a struct or list."""
    kind = values.type
    if pa.types.is_date32(kind):
        last = pc.max(values.cast(pa.int32())).as_py()
        return last is not None and last > _LAST_DAY
    if pa.types.is_list(kind):
        return _has_late_date(pc.list_flatten(values))
    if pa.types.is_struct(kind):
        return any(_has_late_date(pc.struct_field(values, [i])) for i in range(kind.num_fields))
    return False
