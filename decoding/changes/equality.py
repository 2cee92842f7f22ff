"""PostgreSQL's equality for Arrow.

In: a column. Out: a column for comparisons. When Arrow joins, groups or compares its values, they are equal exactly if
the values of the given column are equal in PostgreSQL. Raises Arrow's errors.

In PostgreSQL NaN equals NaN, and 0.0 equals -0.0. Arrow joins and groups values by their bits, compares NaN as unequal
to NaN, and cannot join or group lists. So all NaN get the same bits, all zeros get the same bits, a float becomes the
integer with its bits, and a list becomes bytes.

`encode_rows` turns entire rows into bytes. It can use this equality, or the equality of the values' texts, in which
0.0 differs from -0.0.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_OCTETS = pa.large_binary()
_NO_OCTETS = pa.scalar(b"", _OCTETS)


def to_comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return values that Arrow treats as equal if PostgreSQL treats the column's values as equal; NULL stays NULL."""
    if pa.types.is_list(column.type):
        return pa.chunked_array([_encode_lists(chunk) for chunk in column.chunks], _OCTETS)
    if pa.types.is_floating(column.type):
        integer_type = pa.int64() if pa.types.is_float64(column.type) else pa.int32()
        floats = unify_floats(column, unify_zeros=True)
        return pa.chunked_array([chunk.view(integer_type) for chunk in floats.chunks], integer_type)
    return column


def encode_rows(rows: pa.RecordBatch, *, unify_zeros: bool) -> pa.Array:
    """Return the bytes of each row. Two rows have the same bytes if all of their values are equal; NULL equals NULL.

    With `unify_zeros`, 0.0 equals -0.0, as in PostgreSQL. Without it they differ, as their texts do.
    """
    octets = (_encode_values(column, unify_zeros=unify_zeros) for column in rows.columns)
    return pc.binary_join_element_wise(*octets, _NO_OCTETS)


def unify_floats(column: pa.Array | pa.ChunkedArray, *, unify_zeros: bool) -> pa.Array | pa.ChunkedArray:
    """Give all NaN the same bits; with `unify_zeros` also give 0.0 and -0.0 the same bits."""
    if not pa.types.is_floating(column.type):
        return column
    values = pc.add(column, pa.scalar(0.0, column.type)) if unify_zeros else column
    return pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), column.type), values)


def is_text_or_binary(data_type: pa.DataType) -> bool:
    """Whether values of a type are texts or bytes of any length."""
    return bool(
        pa.types.is_string(data_type)
        or pa.types.is_large_string(data_type)
        or pa.types.is_binary(data_type)
        or pa.types.is_large_binary(data_type)
    )


def measure_lengths(column: pa.Array) -> pa.Array | None:
    """Return the lengths of texts, bytes or lists; None for a type of fixed width."""
    if pa.types.is_list(column.type):
        return pc.list_value_length(column).cast(pa.int64())
    return pc.binary_length(column).cast(pa.int64()) if is_text_or_binary(column.type) else None


def _encode_lists(lists: pa.Array) -> pa.Array:
    octets = _encode_values(lists, unify_zeros=True)
    return pc.if_else(lists.is_valid(), octets, pa.scalar(None, _OCTETS))


def _encode_values(column: pa.Array, *, unify_zeros: bool) -> pa.Array:
    """Return the bytes of each value, also of NULL. No value's bytes are the beginning of another value's bytes."""
    presence = pc.if_else(column.is_valid(), pa.scalar(b"\1", _OCTETS), pa.scalar(b"\0", _OCTETS))
    parts = []
    if (lengths := measure_lengths(column)) is not None:
        parts.append(_encode_fixed_width(pc.fill_null(lengths, 0)))
    is_list = pa.types.is_list(column.type)
    parts.append(
        _join_elements(column, lengths, unify_zeros) if is_list else _encode_contents(column, unify_zeros)
    )
    return pc.binary_join_element_wise(
        presence, *(pc.fill_null(part, _NO_OCTETS) for part in parts), _NO_OCTETS
    )


def _join_elements(lists: pa.Array, lengths: pa.Array, unify_zeros: bool) -> pa.Array:
    """Return for each list the bytes of its elements, one after the other."""
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum(pc.fill_null(lengths, 0), out=offsets[1:])
    octets = _encode_values(lists.flatten(), unify_zeros=unify_zeros)
    return pc.binary_join(pa.LargeListArray.from_arrays(pa.array(offsets), octets), _NO_OCTETS)


def _encode_contents(column: pa.Array, unify_zeros: bool) -> pa.Array:
    if is_text_or_binary(column.type):
        return column.cast(_OCTETS)
    return _encode_fixed_width(unify_floats(column, unify_zeros=unify_zeros))


def _encode_fixed_width(column: pa.Array) -> pa.Array:
    """Return the bytes of values of a type with a fixed width."""
    column = column.cast(pa.uint8()) if pa.types.is_boolean(column.type) else column
    return column.view(pa.binary(column.type.bit_width // 8)).cast(_OCTETS)
