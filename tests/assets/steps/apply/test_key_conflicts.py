"""Conflicts that Spark sees are those that one change after the other meets."""

from __future__ import annotations

import random

import pytest

from pgsieve.assets.steps.apply.conflicting_rows import conflicts, lookups
from pgsieve.assets.steps.apply.key_conflicts import Event, first_conflict, looked_up
from pgsieve.assets.steps.apply.net_change import decided_changes
from tests.fixtures.pgsieve_replica import engine

_SCHEMA = (
    "slice bigint, commit_lsn bigint, ordinal bigint, number bigint, operation string, unchanged array<string>,"
    " old struct<k: int>, new struct<k: int>"
)
_CASES, _KEYS = 400, 3


def _random_events(draw: random.Random, *, moves: bool) -> list[Event]:
    """Changes of few keys, with and without rows; an UPDATE that stays with its key is no event."""
    events = []
    for change in range(draw.randint(1, 7)):
        kind = draw.choice(["insert", "delete", "move"] if moves else ["insert", "delete"])
        one, other = draw.sample([(key,) for key in range(_KEYS)], 2)
        events.append(
            Event(change, old=None if kind == "insert" else one, new=None if kind == "delete" else other)
        )
    return events


def test_what_is_not_looked_up_decides_nothing() -> None:
    draw = random.Random(7)
    conflicting = 0
    for _ in range(20_000):
        events = _random_events(draw, moves=True)
        if draw.random() < 0.2:
            events.insert(draw.randrange(len(events) + 1), Event(99))
        present = {(key,) for key in range(_KEYS) if draw.random() < 0.4}
        sides = {(event.change, side): getattr(event, side) for event in events for side in ("old", "new")}
        kinds = {sides[place] for place in looked_up(events)}
        conflict = first_conflict(events, present)
        assert first_conflict(events, present & kinds) == conflict
        conflicting += conflict is not None
    assert 2_000 < conflicting < 18_000


@pytest.mark.spark
@pytest.mark.parametrize("moves", [pytest.param(False, marks=pytest.mark.long), True])
def test_spark_and_this_process_see_the_same_conflicts(moves: bool) -> None:
    draw = random.Random(11)
    rows, base, expected, may = [], [], {}, set()
    for case in range(_CASES):
        events = _random_events(draw, moves=moves)
        present = {(key,) for key in range(_KEYS) if draw.random() < 0.4}
        base += [(case * 10 + key,) for (key,) in present]
        for event in events:
            sides = [side and (case * 10 + side[0],) for side in (event.old, event.new)]
            operation = "insert" if event.old is None else "delete" if event.new is None else "update"
            # The first half of each case in a slice of its own.
            end = 100 if event.change < len(events) // 2 else 200
            place = event.change * _CASES + case
            rows.append((end, end - 10, place, place, operation, [], *sides))
        if (conflict := first_conflict(events, present)) is not None:
            assert conflict.new is not None
            expected[case] = (conflict.change, conflict.new[0], conflict.old is None)
    spark = engine().session
    changes, replica = spark.createDataFrame(rows, _SCHEMA), spark.createDataFrame(base, "k int")
    seen: dict[int, tuple[int, int, bool]] = {}
    for row in conflicts(changes, replica, ("k",), (100, 200), moves=moves).orderBy("place").collect():
        case, key = divmod(row["k0"], 10)
        seen.setdefault(case, (row["place"] % 2**56 // _CASES, key, row["inserted"]))
    assert seen == expected
    assert len(expected) > _CASES // 4
    # What is cheap to see says so of each of them.
    kept = lookups(changes, ("k",), (100, 200)).collect()
    for row in kept:
        if row["begins"] > 1 or (row["absent"] and (row["k0"],) in base):
            may.add(row["k0"] // 10)
    assert set(expected) <= may
    if not moves:
        decided = decided_changes(changes, ("k",), (), (100, 200)).where("begins > 0")
        assert set(decided.select("k0", "begins", "absent").collect()) == set(kept)
