"""The UPDATE transformation of few changes (section 29.4.3): what passes filters, and which rows no filter looks at."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pgsieve.assets.steps.update_transformation.decoded_batches import changes_schema
from pgsieve.assets.steps.update_transformation.in_process import can_filter, transformed_changes, truncates
from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.decoding.row_filters.nodes import RowFilter

_INT = 23
Row = tuple[int | None, int | None]
Change = tuple[str, Row | None, Row | None]

EVERY = ("insert", "update", "delete")


def row_filter(text: str) -> RowFilter:
    return parse_row_filter(text, {name: FilterColumn(name, _INT, -1, 0) for name in "ab"}, "t")


def sent(changes: list[Change], texts: list[str] | None, operations: tuple[str, ...] = EVERY) -> list[Change]:
    row = pa.struct({"a": pa.int32(), "b": pa.int32()})
    batch = pa.record_batch(
        {
            "commit_lsn": pa.array([10] * len(changes), pa.int64()),
            "ordinal": pa.array(range(len(changes)), pa.int64()),
            "number": pa.array(range(len(changes)), pa.int64()),
            "commit_time": pa.array([0] * len(changes), pa.timestamp("us", "UTC")),
            "operation": [operation for operation, *_ in changes],
            "unchanged": pa.array([["b"]] * len(changes), pa.list_(pa.string())),
            "old": pa.array([old and dict(zip("ab", old, strict=True)) for _, old, _ in changes], row),
            "new": pa.array([new and dict(zip("ab", new, strict=True)) for *_, new in changes], row),
        }
    )
    filters = dict.fromkeys(EVERY, None if texts is None else [row_filter(text) for text in texts])
    assert can_filter(filters)
    schema = changes_schema([("b", pa.int32()), ("a", pa.int32())])
    rows = transformed_changes([batch], filters, operations, schema).to_pylist()
    assert all(row["unchanged"] == (None if row["operation"] == "delete" else ["b"]) for row in rows)
    return [
        (row["operation"], *(row[side] and (row[side]["a"], row[side]["b"]) for side in ("old", "new")))
        for row in rows
    ]


#: a > 5 of the old row and of the new one -> what an UPDATE becomes.
UPDATES: list[tuple[Change, list[Change]]] = [
    (("update", (1, 0), (2, 0)), []),
    (("update", (1, 0), (9, 0)), [("insert", None, (9, 0))]),
    (("update", (9, 0), (1, 0)), [("delete", (9, 0), None)]),
    (("update", (8, 0), (9, 0)), [("update", (8, 0), (9, 0))]),
    (("update", None, (9, 0)), [("update", None, (9, 0))]),
    (("update", None, (1, 0)), []),
    (("update", (None, 0), (9, 0)), [("insert", None, (9, 0))]),
]


@pytest.mark.parametrize(("change", "becomes"), UPDATES)
def test_an_update_becomes_what_old_and_new_row_say(change: Change, becomes: list[Change]) -> None:
    assert sent([change], ["a > 5"]) == becomes
    # Whatever else is published: what it becomes is still the UPDATE.
    assert sent([change], ["a > 5"], ("update",)) == becomes


def test_a_row_has_to_pass_one_of_the_filters() -> None:
    changes: list[Change] = [("insert", None, (a, 0)) for a in range(4)] + [
        ("delete", (a, 0), None) for a in range(4)
    ]
    assert sent(changes, ["a = 1", "a = 3"]) == [
        change
        for change in changes
        if (change[2] or change[1])[0] in {1, 3}  # type: ignore[index]
    ]


def test_operations_that_are_not_published_are_not_sent_and_not_looked_at() -> None:
    changes: list[Change] = [("insert", None, (0, 0)), ("delete", (1, 0), None), ("update", None, (1, 0))]
    assert sent(changes, ["1 / a = 1"], ("delete", "update")) == changes[1:]
    assert sent(changes, None, ("insert",)) == changes[:1]
    assert sent(changes, None) == changes


def test_truncates_have_nothing_but_their_place() -> None:
    schema = changes_schema([("a", pa.int32())])
    (row,) = truncates([(10, 2)], schema).to_pylist()
    assert {name for name, value in row.items() if value is not None} == {
        "commit_lsn",
        "ordinal",
        "operation",
    }
