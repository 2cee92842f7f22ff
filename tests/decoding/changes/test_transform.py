"""The UPDATE transformation: which changes pass the filters, and which rows the filters never read.

PostgreSQL documentation, Row Filters: UPDATE Transformations.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from pgsieve.decoding.changes.columns import ENCODED_COLUMNS, changes_schema
from pgsieve.decoding.changes.decode import FilterColumns
from pgsieve.decoding.changes.sent_as import ChangeKind, count_received
from pgsieve.decoding.changes.transform import EncodedMessages, Transformation, add_slice, truncate_changes
from pgsieve.decoding.protocol.messages import Delete, Insert, Message, Update, encode
from pgsieve.decoding.protocol.tuple_data import Null, OldRow, Text, TupleData, Unchanged
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.row_filters.analysis import FilterColumn, parse_row_filter
from pgsieve.decoding.row_filters.nodes import RowFilter
from pgsieve.decoding.values.types import column_type

_INT = 23
Row = tuple[int | None, int | None]
Change = tuple[str, Row | None, Row | None]

EVERY = ("insert", "update", "delete")
COLUMNS = RelationColumns(("a", "b"), (column_type(_INT, -1), column_type(_INT, -1)))
SCHEMA = changes_schema([("b", pa.int32()), ("a", pa.int32())])


def row_filter(text: str) -> RowFilter:
    return parse_row_filter(text, {name: FilterColumn(name, _INT, -1, 0) for name in "ab"}, "t")


def transformation(texts: list[str] | None, operations: tuple[str, ...] = EVERY) -> Transformation:
    filters = dict.fromkeys(EVERY, None if texts is None else [row_filter(text) for text in texts])
    used = frozenset(name for each in filters["insert"] or () for name in each.columns)
    read = None if texts is None else FilterColumns(used, COLUMNS)
    return Transformation(COLUMNS, SCHEMA, ["a"], frozenset(operations), filters, filter_columns=read)


def encoded(messages: list[Message]) -> EncodedMessages:
    places = pa.array(range(len(messages)), pa.int64())
    time = pa.array([0] * len(messages), pa.timestamp("us", "UTC"))
    data = pa.array([encode(message) for message in messages])
    return EncodedMessages(pa.record_batch([places, places, places, time, data], names=list(ENCODED_COLUMNS)))


def message(change: Change) -> Message:
    def columns(row: Row | None) -> TupleData:
        return tuple(Null() if value is None else Text(str(value).encode()) for value in row or ())

    operation, old, new = change
    if operation == "insert":
        return Insert(1, columns(new))
    if operation == "delete":
        return Delete(1, OldRow(columns(old)))
    return Update(1, None if old is None else OldRow(columns(old)), columns(new))


def sent(changes: list[Change], texts: list[str] | None, operations: tuple[str, ...] = EVERY) -> list[Change]:
    counts = Counter[ChangeKind]()
    batches = transformation(texts, operations).transform([encoded(list(map(message, changes)))], counts)
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert count_received(counts) == {o: sum(kind == o for kind, *_ in changes) for o in EVERY}
    return [
        (row["operation"], *(row[side] and (row[side]["a"], row[side]["b"]) for side in ("old", "new")))
        for row in rows
    ]


#: Whether a > 5 is true of the old row and of the new one, and what the UPDATE becomes.
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
def test_the_old_and_the_new_row_decide_what_an_update_becomes(change: Change, becomes: list[Change]) -> None:
    assert sent([change], ["a > 5"]) == becomes
    # If only updates are published, the result is still sent.
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


def test_unpublished_operations_are_neither_sent_nor_decoded() -> None:
    changes: list[Change] = [("insert", None, (0, 0)), ("delete", (1, 0), None), ("update", None, (1, 0))]
    assert sent(changes, ["1 / a = 1"], ("delete", "update")) == changes[1:]
    assert sent(changes, None, ("insert",)) == changes[:1]
    assert sent(changes, None) == changes


def test_an_insert_made_of_an_update_names_the_columns_that_it_lacks() -> None:
    left_out = Update(1, None, (Text(b"9"), Unchanged()))
    (batch,) = transformation(["a > 5"]).transform([encoded([left_out])], Counter())
    assert batch.to_pylist()[0]["unchanged"] == ["b"]
    # A complete old row supplies all columns.
    moved = Update(1, OldRow((Text(b"1"), Text(b"7"))), (Text(b"9"), Unchanged()))
    (row,) = next(transformation(["a > 5"]).transform([encoded([moved])], Counter())).to_pylist()
    assert (row["operation"], row["new"], row["unchanged"]) == ("insert", {"a": 9, "b": 7}, None)


def test_columns_of_filters_are_decoded_by_the_shared_reader() -> None:
    asked: list[FilterColumns] = []

    def shared(read: FilterColumns, make: object) -> pa.RecordBatch:
        asked.append(read)
        return make()  # type: ignore[operator]

    inserts = encoded([message(("insert", None, (a, 0))) for a in range(8)])
    batches = transformation(["a > 5"]).transform([EncodedMessages(inserts.batch, shared)], Counter())
    assert [row["new"]["a"] for batch in batches for row in batch.to_pylist()] == [6, 7]
    assert [sorted(read.names) for read in asked] == [["a"]]


def test_truncates_have_only_their_place_time_and_slice() -> None:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    (row,) = add_slice(truncate_changes([(10, 2, time)], SCHEMA), 77, SCHEMA).to_pylist()
    assert {name: value for name, value in row.items() if value is not None} == {
        "slice": 77,
        "commit_lsn": 10,
        "ordinal": 2,
        "commit_time": time,
        "operation": "truncate",
    }
