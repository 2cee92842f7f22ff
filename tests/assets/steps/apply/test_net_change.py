"""What becomes of each key: a batch without moves and one with a move, whose rows may lack columns.

`test_tenures.py` shows the rules of moves on a few rows, without Spark. Here Spark is held to them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from pyspark.sql import DataFrame

from pgsieve.assets.steps.apply.net_change import (
    changed_rows,
    decided_changes,
    net_changes_with_moves,
    tenures,
)
from tests.fixtures import tenures as model
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


def _replica(rows: Sequence[Row]) -> DataFrame:
    return engine().session.createDataFrame(rows, "k int, b string, c string")


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
    rows: list[Row] = [(1, "kept", "old"), (3, "old", "old"), (4, "old", "old")]
    replica = _replica(rows)
    net = _net(net_changes_with_moves(changes, replica, ("k",), _COLUMNS, ("b",)))
    gone = {key: (action, expected) for key, (action, _, _, expected) in net.items() if action == "delete"}
    assert gone == {1: ("delete", True), 4: ("delete", True)}
    kept = {key: made for key, made in net.items() if key not in gone}
    assert kept == {5: ("upsert", (5, "kept", "moved"), (), False), 2: SHARED[2], 3: SHARED[3]}


def test_spark_computes_the_tenures_and_net_changes_of_the_rules() -> None:
    changes, replica = _histories(40)
    unsent = model.COLUMNS
    frame = _frame([_sent(change) for change in changes])
    rows: list[Row] = [(key, values["b"], values["c"]) for key, values in replica.items()]

    computed = tenures(frame, ("k",), _COLUMNS, unsent).collect()
    assert sorted(
        (
            row["key"]["k"],
            row["tenure"],
            row["origin"],
            row["ended"],
            row["came"] and row["came"]["ordinal"],
            row["went"] and row["went"]["ordinal"],
            {name: row["row"][name] for name in unsent if name not in row["unknown"]},
        )
        for row in computed
    ) == sorted(
        (t.key, t.number, t.origin, t.ended, t.came, t.went, t.values) for t in model.tenures(changes)
    )

    net = _net(net_changes_with_moves(frame, _replica(rows), ("k",), _COLUMNS, unsent))
    assert {key: (action, row and row[1:], unknown) for key, (action, row, unknown, _) in net.items()} == {
        key: _merge_row(key, change, replica) for key, change in model.net_changes(changes, replica).items()
    }


def _histories(number: int) -> tuple[list[model.Change], dict[int, model.Values]]:
    """Independent histories one after the other, each of keys of its own."""
    changes: list[model.Change] = []
    replica: dict[int, model.Values] = {}
    for seed in range(number):
        of_history, rows = model.history(random.Random(seed), length=12)
        first = seed * 5
        replica |= {key + first: values for key, values in rows.items()}
        changes += [
            model.Change(
                change.operation,
                None if change.old is None else change.old + first,
                None if change.new is None else change.new + first,
                change.values,
            )
            for change in of_history
        ]
    return changes, replica


def _sent(change: model.Change) -> Change:
    """The change as the UPDATE transformation writes it."""
    old: Row | None = None if change.old is None else (change.old, None, None)
    if change.new is None:
        return change.operation, old, None, []
    new = (change.new, change.values.get("b"), change.values.get("c"))
    return change.operation, old, new, [name for name in model.COLUMNS if name not in change.values]


def _merge_row(
    key: int, change: model.NetChange, replica: Mapping[int, model.Values]
) -> tuple[str, tuple[str | None, ...] | None, tuple[str, ...]]:
    """The action, row and kept columns of a MERGE: a row that comes from another key is inserted whole."""
    action, values = change.action, change.values
    if action == "update" and change.base == key:
        kept = tuple(name for name in model.COLUMNS if name not in values)
        return action, tuple(values.get(name) for name in model.COLUMNS), kept
    if action == "update":
        moved = replica.get(change.base) if change.base is not None else None
        action, values = ("upsert", moved | values) if moved is not None else ("delete", {})
    return action, tuple(values.get(name) for name in model.COLUMNS), ()
