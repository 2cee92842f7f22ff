"""PostgreSQL's equality: a column in, a column out whose values are equal in Arrow if they are in PostgreSQL.

Arrow compares and groups values by their bits, and cannot compare or group lists. So all NaN get the same
bits, and so do all zeros. A list becomes bytes with a number for each distinct element. The result is only
for comparisons.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def to_comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values that Arrow compares as PostgreSQL compares the column's values; NULL stays NULL."""
    if pa.types.is_list(column.type):
        return pa.chunked_array([_lists(column.combine_chunks())])
    if not pa.types.is_floating(column.type):
        return column
    zero, nan = pa.scalar(0.0, column.type), pa.scalar(float("nan"), column.type)
    return pc.if_else(pc.is_nan(column), nan, pc.add(column, zero))


def _lists(lists: pa.ListArray) -> pa.Array:
    elements = to_comparable(pa.chunked_array([lists.flatten()])).combine_chunks()
    numbers = np.asarray(elements.dictionary_encode().indices.fill_null(-1), np.int32)
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(np.asarray(pc.fill_null(lists.value_lengths(), 0)) * numbers.itemsize, out=offsets[1:])
    octets = pa.Array.from_buffers(
        pa.large_binary(), len(lists), [None, pa.py_buffer(offsets), pa.py_buffer(numbers)]
    )
    return pc.if_else(lists.is_valid(), octets, pa.scalar(None, pa.large_binary()))
