"""A move is an UPDATE whose old tuple has another key, or lacks it. The old tuple decides, whatever the new one says."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pgsieve.decoding.changes.tally import count_changes, empty_tally

_ROW = pa.struct({"a": pa.int32(), "x": pa.float64(), "note": pa.string()})


def _row(a: int | None, x: float | None) -> dict[str, Any]:
    return {"a": a, "x": x, "note": None}


@pytest.mark.parametrize(
    ("operation", "old", "new", "moves"),
    [
        ("update", _row(1, 1.0), _row(1, 1.0), 0),
        ("update", _row(1, 1.0), _row(2, 1.0), 1),
        ("update", _row(1, 0.0), _row(1, -0.0), 0),
        ("update", _row(1, float("nan")), _row(1, float("nan")), 0),
        ("update", _row(1, float("nan")), _row(1, 1.0), 1),
        (
            "update",
            _row(None, 1.0),
            _row(1, 1.0),
            1,
        ),  # the old tuple of a replica identity without this column
        ("update", _row(1, None), _row(1, 1.0), 1),
        ("update", _row(None, None), _row(1, 1.0), 1),
        ("update", None, _row(1, 1.0), 0),
        ("insert", None, _row(1, 1.0), 0),
        ("delete", _row(1, 1.0), None, 0),
        ("delete", _row(None, 1.0), None, 0),
    ],
)
def test_changes_that_move_a_row(
    operation: str, old: dict[str, Any] | None, new: dict[str, Any] | None, moves: int
) -> None:
    batch = pa.record_batch(
        {
            "operation": [operation],
            "unchanged": pa.array([None], pa.list_(pa.string())),
            "old": pa.array([old], _ROW),
            "new": pa.array([new], _ROW),
        }
    )
    tally = empty_tally()
    for _ in range(2):
        count_changes(batch, ["a", "x"], tally)
    assert tally["key_changes"] == 2 * moves
    assert tally[operation] == 2


def test_without_a_key_no_old_tuple_is_needed() -> None:
    rows = {
        "operation": ["insert", "update", "update"],
        "unchanged": pa.array([[], ["t"], []], pa.list_(pa.string())),
    }
    tally: dict[str, Any] = {}
    count_changes(pa.RecordBatch.from_pydict(rows), (), tally)
    assert tally == {"insert": 1, "update": 2, "key_changes": 0, "unchanged": ["t"]}
