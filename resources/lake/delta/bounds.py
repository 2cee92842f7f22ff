"""Chooses which bounds of values delta-rs writes into a file.

The bounds of a column are the least and the greatest value in a file or a row group. A reader that looks for other
values skips the file. Without bounds, it reads the file.

In: the columns of a new file.
Out: delta-rs' properties for writing the file.

These bounds are left out:

- bounds of decimals with more than 15 digits: delta-rs computes these bounds in floating point, which turns
  9007199254740993 into ...992. A reader that looks for the value would skip the file.
- bounds of floating-point numbers: Parquet's bounds ignore NaN, which PostgreSQL and Spark order after every number. A
  reader that looks for greater values would skip NaN. `parquet_files` leaves these bounds out, too.
- bounds of texts and bytes, except a prefix: the footer of the file and the log of Delta would otherwise contain
  values of megabytes, and Spark cannot read a log with a text of more than 20,000,000 characters. An upper bound that is
  truncated is rounded up, so it is still an upper bound.
- bounds of dates after the year 262142: delta-rs crashes with them. The dates of PostgreSQL end in the year 5874897, and
  infinity is even later. If a file has such a date, none of its columns of dates has bounds.
"""

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import ColumnProperties, WriterProperties
from deltalake.exceptions import DeltaError

from pgsieve.resources.lake.delta.parquet_files import (
    COMPRESSION_LEVEL,
    ROW_GROUP_ROWS,
    has_dictionary,
    list_leaf_columns,
)

Result = TypeVar("Result")

#: The last date that the library chrono can represent, which delta-rs uses: 262142-12-31, as days since
#: 1970-01-01.
_LAST_DAY = 95_026_236
_PANIC_MESSAGE = "`NaiveDate + TimeDelta` overflowed"
#: A decimal with at most this many digits is not changed by a conversion to floating point.
_EXACT_DIGITS = 15
#: The length of the bounds of texts. It is also delta-rs's default, but the default does not apply to a write with
#: properties.
_BOUND_BYTES = 64


def write_with_bounds(
    write: Callable[[WriterProperties], Result], schema: pa.Schema, rows: pa.Table | None = None
) -> Result:
    """Call `write` with properties for files of this schema. Return its result.

    If delta-rs crashes because of the bounds of dates, `write` is called again without these bounds. The write
    that crashed has committed nothing. `rows` are the rows to write, or some of them. If they have a date that is too late,
    the first call already leaves these bounds out.
    """
    if rows is not None and any(map(_has_late_date, rows.columns)):
        return write(make_writer_properties(schema, date_bounds=False))
    try:
        return write(make_writer_properties(schema))
    except DeltaError as error:
        if _PANIC_MESSAGE not in str(error):
            raise
        return write(make_writer_properties(schema, date_bounds=False))


def make_writer_properties(schema: pa.Schema, *, date_bounds: bool = True) -> WriterProperties:
    """The properties for files of this schema. Bounds that delta-rs computes wrongly are left out.

    `date_bounds` says whether columns of dates have bounds.
    """
    fields = list(schema)
    unsafe_fields = [field for field in fields if _has_unsafe_bounds(field.type, date_bounds=date_bounds)]
    # The properties can only name top-level columns. So if the bounds of a struct's field are unsafe, no struct gets
    # bounds.
    omits_structs = any(pa.types.is_nested(field.type) for field in unsafe_fields)
    return WriterProperties(
        max_row_group_size=ROW_GROUP_ROWS,
        compression="ZSTD",
        compression_level=COMPRESSION_LEVEL,
        statistics_truncate_length=_BOUND_BYTES,
        default_column_properties=ColumnProperties(
            dictionary_enabled=False, statistics_enabled="NONE" if omits_structs else None
        ),
        column_properties={
            field.name: ColumnProperties(
                dictionary_enabled=has_dictionary(field.type),
                statistics_enabled="NONE" if field in unsafe_fields else "CHUNK" if omits_structs else None,
            )
            for field in fields
        },
    )


def _has_unsafe_bounds(data_type: pa.DataType, *, date_bounds: bool) -> bool:
    """True if delta-rs computes wrong bounds for a type, or for a type that is nested in it."""
    return any(
        pa.types.is_floating(leaf_type)
        or (pa.types.is_decimal(leaf_type) and leaf_type.precision > _EXACT_DIGITS)
        or (pa.types.is_date(leaf_type) and not date_bounds)
        for _, leaf_type in list_leaf_columns("", data_type)
    )


def _has_late_date(values: pa.ChunkedArray) -> bool:
    """True if a date is too late for delta-rs's bounds. The date may be in a struct or a list."""
    data_type = values.type
    if pa.types.is_date32(data_type):
        last_day = pc.max(values.cast(pa.int32())).as_py()
        return last_day is not None and last_day > _LAST_DAY
    if pa.types.is_list(data_type):
        return _has_late_date(pc.list_flatten(values))
    if pa.types.is_struct(data_type):
        return any(_has_late_date(pc.struct_field(values, [i])) for i in range(data_type.num_fields))
    return False
