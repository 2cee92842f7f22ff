"""Rows of a file that is older than a column of its table, or a field of a struct."""

from __future__ import annotations

import pyarrow as pa

from pgsieve.resources.lake.delta.conforming import conform


def test_columns_that_a_file_lacks_are_null() -> None:
    rows = pa.table({"n": pa.array([1, 2], pa.int32()), "row": pa.array([{"b": "x", "a": 1}, None])})
    schema = pa.schema(
        {
            "row": pa.struct({"a": pa.int64(), "b": pa.string(), "c": pa.date32()}),
            "n": pa.int64(),
            "m": pa.bool_(),
        }
    )
    conforming = conform(rows, schema)
    assert conforming.schema == schema
    assert conforming.to_pylist() == [
        {"row": {"a": 1, "b": "x", "c": None}, "n": 1, "m": None},
        {"row": None, "n": 2, "m": None},
    ]


def test_a_file_without_rows_has_the_columns() -> None:
    schema = pa.schema({"row": pa.struct({"a": pa.int64()})})
    assert conform(pa.table({"row": pa.array([], pa.struct({}))}), schema) == schema.empty_table()
