"""Tenures, on a few rows: the drawing of `pgsieve.assets.steps.apply.tenures`, and what each rule is for.

`test_net_change.py` compares Spark's tenures and net changes with those of `tests/fixtures/tenures.py`.
"""

from __future__ import annotations

import random

import pytest

from tests.fixtures.tenures import (
    Change,
    NetChange,
    Tenure,
    Values,
    applied,
    delete,
    history,
    insert,
    merged,
    move,
    net_changes,
    tenures,
    update,
)

DRAWN = [update(1, b="sent"), delete(2), move(1, 2, c="moved"), insert(1, b="new", c="new")]
REPLICA: dict[int, Values] = {1: {"b": "old", "c": "old"}, 2: {"b": "old", "c": "old"}}


def test_the_four_changes_of_the_drawing_make_four_tenures() -> None:
    assert tenures(DRAWN) == [
        Tenure(1, 0, "replica", {"b": "sent"}, ended=True, went=2),
        Tenure(1, 2, "insert", {"b": "new", "c": "new"}),
        Tenure(2, 0, "replica", ended=True),
        Tenure(2, 2, "arrive", {"c": "moved"}, came=2),
    ]


def test_the_row_that_moved_inherits_what_was_sent_before_its_move() -> None:
    net = net_changes(DRAWN, REPLICA)
    assert net == {
        1: NetChange("upsert", {"b": "new", "c": "new"}, None),
        2: NetChange("update", {"b": "sent", "c": "moved"}, base=1),
    }
    assert merged(net, REPLICA) == {1: {"b": "new", "c": "new"}, 2: {"b": "sent", "c": "moved"}}


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        pytest.param(
            [move(1, 3), move(3, 4, b="sent"), move(4, 5)],
            {2: {"b": "b2", "c": "c2"}, 5: {"b": "sent", "c": "c1"}},
            id="a chain of moves ends in the replica's row",
        ),
        pytest.param(
            [move(1, 9), move(2, 1), move(9, 2)],
            {1: {"b": "b2", "c": "c2"}, 2: {"b": "b1", "c": "c1"}},
            id="two rows swap their keys",
        ),
        pytest.param(
            [move(1, 3), insert(1, c="new")],
            {1: {"b": None, "c": "new"}, 2: {"b": "b2", "c": "c2"}, 3: {"b": "b1", "c": "c1"}},
            id="a key that is used again has nothing of the row before",
        ),
        pytest.param(
            [move(7, 2, b="sent")],
            {1: {"b": "b1", "c": "c1"}, 2: {"b": "b2", "c": "c2"}},
            id="a move that finds no row leaves its new key alone",
        ),
        pytest.param(
            [move(7, 8), move(8, 2)],
            {1: {"b": "b1", "c": "c1"}, 2: {"b": "b2", "c": "c2"}},
            id="nor does a move that follows it",
        ),
        pytest.param(
            [delete(1), update(1, b="sent"), move(1, 3)],
            {2: {"b": "b2", "c": "c2"}},
            id="a row that is gone is not moved",
        ),
    ],
)
def test_net_changes_leave_the_rows_that_the_changes_leave(
    changes: list[Change], rows: dict[int, Values]
) -> None:
    replica: dict[int, Values] = {1: {"b": "b1", "c": "c1"}, 2: {"b": "b2", "c": "c2"}}
    assert merged(net_changes(changes, replica), replica) == rows == applied(changes, replica)


def test_net_changes_of_random_histories_leave_what_their_changes_leave() -> None:
    for seed in range(300):
        changes, replica = history(random.Random(seed), length=12)
        assert merged(net_changes(changes, replica), replica) == applied(changes, replica), f"seed {seed}"
