"""The rows of an evolved replica: four kinds of column in one table."""

from __future__ import annotations

import pyarrow as pa

from pgsieve.assets.steps.update_transformation.projection import Projection
from pgsieve.decoding.publications.evolution import ColumnSource


def test_columns_stay_are_renamed_get_another_type_are_added_or_dropped() -> None:
    before = pa.record_batch({"id": [1, 2], "old": ["a", None], "amount": [5, 6], "dropped": [True, True]})
    projection = Projection(
        [
            ColumnSource("id", "id"),
            ColumnSource("renamed", "old"),
            ColumnSource("amount", "amount"),
            ColumnSource("added", None),
        ],
        pa.schema({"id": pa.int64(), "renamed": pa.string(), "amount": pa.float64(), "added": pa.int32()}),
        {"added": pa.array([7], pa.int32())},
    )
    assert projection.former_columns == ["id", "old", "amount"]
    assert projection(before).to_pylist() == [
        {"id": 1, "renamed": "a", "amount": 5.0, "added": 7},
        {"id": 2, "renamed": None, "amount": 6.0, "added": 7},
    ]
