"""What becomes of each key: a batch without moves and one with a move, whose rows may lack columns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pyspark.sql import DataFrame

from pgsieve.assets.steps.apply.net_change import changed_rows, decided_changes, net_changes_with_moves
from tests.fixtures.pgsieve_replica import engine

pytestmark = pytest.mark.spark

_SCHEMA = (
    "slice bigint, commit_lsn bigint, ordinal bigint, number bigint, operation string, unchanged array<string>,"
    " old struct<k: int, b: string, c: string>, new struct<k: int, b: string, c: string>"
)
_COLUMNS = ("k", "b", "c")
_SLICES = (100,)

Row = tuple[int, str | None, str | None]
Change = tuple[str, Row | None, Row | None, list[str]]

#: Columns that were not sent are NULL in `new`, and named.
WITHOUT_MOVES: Sequence[Change] = [
    ("update", None, (1, None, "new"), ["b"]),
    ("insert", None, (2, "b", "c"), []),
    ("delete", (2, None, None), None, []),
    ("insert", None, (2, None, "again"), ["b"]),
    ("update", None, (3, "sent", "c"), []),
    ("delete", (3, None, None), None, []),
    ("insert", None, (3, None, "again"), ["b"]),
    ("update", None, (3, None, "once more"), ["b"]),
    ("delete", (4, None, None), None, []),
]
MOVE: Change = ("update", (1, None, None), (5, None, "moved"), ["b"])


def _frame(changes: Sequence[Change]) -> DataFrame:
    rows = [
        (100, 90, number, number, operation, unchanged, old, new)
        for number, (operation, old, new, unchanged) in enumerate(changes)
    ]
    return engine().session.createDataFrame(rows, _SCHEMA)


def _net(frame: DataFrame) -> dict[int, tuple[str, Row | None, tuple[str, ...], bool]]:
    return {
        row["key"]["k"]: (
            row["action"],
            row["row"] and tuple(row["row"]),
            tuple(row["unknown"] or ()),
            row["expected"],
        )
        for row in frame.collect()
    }


#: What is the same with a move in the batch and without one.
SHARED = {
    2: ("upsert", (2, None, "again"), (), False),
    3: ("upsert", (3, None, "once more"), (), True),
    4: ("delete", None, (), True),
}


def test_a_row_knows_nothing_of_what_was_sent_for_the_one_before_it() -> None:
    changes = _frame(WITHOUT_MOVES)
    decided = decided_changes(changes, ("k",), ("b",), _SLICES)
    net = _net(changed_rows(decided, changes, ("k",), _COLUMNS, ("b",), _SLICES, few=True))
    assert net == {1: ("update", (1, None, "new"), ("b",), True), **SHARED}


def test_a_row_that_moves_keeps_what_was_not_sent() -> None:
    changes = _frame([*WITHOUT_MOVES, MOVE])
    held = [(1, "kept", "old"), (3, "old", "old"), (4, "old", "old")]
    replica = engine().session.createDataFrame(held, "k int, b string, c string")
    net = _net(net_changes_with_moves(changes, replica, ("k",), _COLUMNS, ("b",)))
    gone = {key: (action, expected) for key, (action, _, _, expected) in net.items() if action == "delete"}
    assert gone == {1: ("delete", True), 4: ("delete", True)}
    kept = {key: made for key, made in net.items() if key not in gone}
    assert kept == {5: ("upsert", (5, "kept", "moved"), (), False), 2: SHARED[2], 3: SHARED[3]}
