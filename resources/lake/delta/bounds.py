"""Files that delta-rs writes have bounds of their columns, or none where it cannot tell them.

delta-rs panics over the bounds of a date after the year 262142. PostgreSQL's dates end in 5874897, and infinity is later still.
Without bounds the values are the same; readers can leave out no file by them.
"""

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import ColumnProperties, WriterProperties
from deltalake.exceptions import DeltaError

Done = TypeVar("Done")

#: Several row groups a file, so that decoding one is shared among the cores.
ROW_GROUP = 128 * 1024
#: 262142-12-31, the last date of chrono, which delta-rs computes with; as days since 1970-01-01.
_LAST_DAY = 95_026_236
_PANIC = "`NaiveDate + TimeDelta` overflowed"

BOUNDED = WriterProperties(max_row_group_size=ROW_GROUP, compression="SNAPPY")
_UNBOUNDED = WriterProperties(
    max_row_group_size=ROW_GROUP,
    compression="SNAPPY",
    default_column_properties=ColumnProperties(statistics_enabled="NONE"),
)


def bounded_if_possible(write: Callable[[WriterProperties], Done], rows: pa.Table | None = None) -> Done:
    """What `write` does with properties of files that it can comply with; a second time where it could not.

    `rows` are what it writes, or a part of that. What fails so has committed nothing.
    """
    if rows is not None and any(map(_is_beyond, rows.columns)):
        return write(_UNBOUNDED)
    try:
        return write(BOUNDED)
    except DeltaError as error:
        if _PANIC not in str(error):
            raise
        return write(_UNBOUNDED)


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
