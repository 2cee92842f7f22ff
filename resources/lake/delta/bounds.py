"""What a file says of its values' bounds is true for every reader, or it says nothing.

In: the columns of a file that is to be written. Out: how delta-rs is to write it. Without bounds the values are
the same; readers can leave out no file, and no row group, by them. What is not told:

- of decimals with more than 15 digits: delta-rs counts their bounds in floating point, 9007199254740993 as ...992, and a
  reader who looks for the value leaves the file out;
- of floating-point numbers: Parquet's bounds count no NaN, which is greater than every other number for PostgreSQL and Spark, so that a
  reader who looks for what is greater than a number leaves NaN out (`parquet_files` writes none either);
- of texts and bytes more than a beginning: a value of megabytes would stand in the file's footer and in Delta's log once more, and
  Spark reads no log with a text of more than 20,000,000 characters. What is cut stays a bound: the greatest one is cut to what is greater;
- of dates after the year 262142, over which delta-rs panics. PostgreSQL's dates end in 5874897, and infinity is later
  still. Then no date of that file has bounds, and no column with one within.
"""

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import ColumnProperties, WriterProperties
from deltalake.exceptions import DeltaError

from pgsieve.resources.lake.delta.parquet_files import COMPRESSION_LEVEL, ROW_GROUP, has_dictionary, leaves

Done = TypeVar("Done")

#: 262142-12-31, the last date of chrono, which delta-rs computes with; as days since 1970-01-01.
_LAST_DAY = 95_026_236
_PANIC = "`NaiveDate + TimeDelta` overflowed"
#: A decimal of so many digits comes back from floating point as it was.
_EXACT_DIGITS = 15
#: As many bytes of a text are bounds as delta-rs has without properties; with some it cuts nothing.
_BOUND_BYTES = 64


def bounded_if_possible(
    write: Callable[[WriterProperties], Done], schema: pa.Schema, rows: pa.Table | None = None
) -> Done:
    """What `write` does with properties of files that it can comply with; a second time where it could not.

    `schema` has the columns of its files, `rows` are what it writes, or a part of that. What fails so has committed nothing.
    """
    if rows is not None and any(map(_is_beyond, rows.columns)):
        return write(writer_properties(schema, dates=False))
    try:
        return write(writer_properties(schema))
    except DeltaError as error:
        if _PANIC not in str(error):
            raise
        return write(writer_properties(schema, dates=False))


def writer_properties(schema: pa.Schema, *, dates: bool = True) -> WriterProperties:
    """How delta-rs is to write files of some columns: with bounds, but for those that it cannot tell, or not of `dates`."""
    fields = list(schema)
    unsure = [field for field in fields if _is_unsure(field.type, dates=dates)]
    # It takes names of whole columns only: where one field of a struct is unsure, no struct has bounds.
    no_structs = any(pa.types.is_nested(field.type) for field in unsure)
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
                statistics_enabled="NONE" if field in unsure else "CHUNK" if no_structs else None,
            )
            for field in fields
        },
    )


def _is_unsure(kind: pa.DataType, *, dates: bool) -> bool:
    return any(
        pa.types.is_floating(leaf)
        or (pa.types.is_decimal(leaf) and leaf.precision > _EXACT_DIGITS)
        or (pa.types.is_date(leaf) and not dates)
        for _, leaf in leaves("", kind)
    )


def _is_beyond(values: pa.ChunkedArray) -> bool:
    """Whether there is a date, or a field or an element that is one, whose bounds delta-rs cannot tell."""
    kind = values.type
    if pa.types.is_date32(kind):
        last = pc.max(values.cast(pa.int32())).as_py()
        return last is not None and last > _LAST_DAY
    if pa.types.is_list(kind):
        return _is_beyond(pc.list_flatten(values))
    if pa.types.is_struct(kind):
        return any(_is_beyond(pc.struct_field(values, [i])) for i in range(kind.num_fields))
    return False
