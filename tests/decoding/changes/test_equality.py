"""Equality of PostgreSQL, as a column that Arrow groups in the same way."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from pgsieve.decoding.changes.equality import to_comparable


def groups(values: list[object], kind: pa.DataType) -> list[int | None]:
    """The number of each value's group; None for NULL."""
    column = to_comparable(pa.chunked_array([pa.array(values, kind)]))
    indices: list[int | None] = column.combine_chunks().dictionary_encode().indices.to_pylist()
    return indices


NAN = float("nan")
OTHER_NAN = struct.unpack("<d", struct.pack("<q", 0x7FF8000000000001))[0]


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        (pa.int32(), [1, 2, 1, None], [0, 1, 0, None]),
        (pa.float64(), [0.0, -0.0, 1.0, None], [0, 0, 1, None]),
        (pa.float64(), [NAN, OTHER_NAN, -NAN], [0, 0, 0]),
        (pa.list_(pa.int32()), [[1, 2], [2, 1], [1, 2], [], None], [0, 1, 0, 2, None]),
        (pa.list_(pa.int32()), [[1, None], [1], [1, None]], [0, 1, 0]),
        (pa.list_(pa.float64()), [[0.0, NAN], [-0.0, OTHER_NAN]], [0, 0]),
        (pa.list_(pa.string()), [["a", "bc"], ["ab", "c"]], [0, 1]),
    ],
)
def test_values_are_grouped_as_postgresql_groups_them(
    kind: pa.DataType, values: list[object], expected: list[int | None]
) -> None:
    assert groups(values, kind) == expected
