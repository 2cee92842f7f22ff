"""What becomes of each key, by columns: the same as by following the changes one after the other."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pgsieve.assets.steps.apply.decided_keys import DELETE, INSERT, DecidedKeys, KeyedEvents, keyed_events
from pgsieve.assets.steps.apply.key_conflicts import Event, first_conflict
from pgsieve.assets.steps.apply.key_histories import KeyedChange, net_changes
from pgsieve.assets.steps.records.columns import ROW_OPERATIONS
from pgsieve.resources.lake.delta.key_lookup import key_values
from pgsieve.resources.lake.stores.store import Store

_KEY = pa.schema({"k": pa.int64(), "t.t": pa.string()})
_SLICES = (100, 200)

Change = tuple[str, tuple[int, str]]


def _changes(draw: random.Random) -> list[Change]:
    keys = [(number, letter) for number in range(2) for letter in "ab"]
    return [(draw.choice(ROW_OPERATIONS), draw.choice(keys)) for _ in range(draw.randint(1, 9))]


def _events(changes: list[Change]) -> KeyedEvents:
    keys = pa.Table.from_pylist([dict(zip(_KEY.names, key, strict=True)) for _, key in changes], _KEY)
    operations = np.array([ROW_OPERATIONS.index(operation) for operation, _ in changes], np.int8)
    places = np.arange(len(changes)) * 3
    return KeyedEvents(keys, places, operations, places + 10)


def _keyed(change: Change) -> KeyedChange:
    operation, key = change
    return KeyedChange(
        operation, key if operation == "delete" else None, None if operation == "delete" else key
    )


def test_random_changes_decide_what_following_them_does() -> None:
    for seed in range(500):
        changes = _changes(random.Random(seed))
        decided = DecidedKeys.of(_events(changes))
        net = net_changes(map(_keyed, changes), (), ())
        keys = list(key_values(decided.keys.columns))
        assert len(keys) == len(net), f"seed {seed}"
        for number, key in enumerate(keys):
            change = net[key]
            action = (
                "upsert" if decided.upserted[number] else "update" if decided.updated[number] else "delete"
            )
            assert action == change.action, f"seed {seed}"
            assert bool(decided.expected[number]) == change.expected, f"seed {seed}"
            if change.last is not None:
                assert decided.lasts[number] == change.last * 3, f"seed {seed}"


def test_a_key_without_suspicion_has_no_conflict() -> None:
    suspected = conflicting = 0
    for seed in range(500):
        draw = random.Random(seed)
        changes = _changes(draw)
        decided = DecidedKeys.of(_events(changes))
        keys = list(key_values(decided.keys.columns))
        present = np.array([draw.random() < 0.4 for _ in keys])
        suspect = decided.suspect(present)
        events = [
            Event(place, new=key) if operation == "insert" else Event(place, old=key)
            for place, (operation, key) in enumerate(changes)
            if operation != "update"
        ]
        before = {key for key, there in zip(keys, present, strict=True) if there}
        conflict = first_conflict(events, before)
        chosen, operations, lsns = decided.events_of(suspect)
        among = [
            Event((lsn - 10) // 3, new=key) if operation == INSERT else Event((lsn - 10) // 3, old=key)
            for key, operation, lsn in zip(key_values(chosen.columns), operations, lsns, strict=True)
            if operation in {INSERT, DELETE}
        ]
        assert first_conflict(among, before) == conflict, f"seed {seed}"
        suspected += bool(suspect.any())
        conflicting += conflict is not None
    assert 50 < conflicting < suspected < 500


def test_changes_are_read_from_files_in_their_order(tmp_path: Path) -> None:
    row = pa.struct([*_KEY, ("other", pa.string())])
    names = ("slice", "number", "commit_lsn", "operation", "new", "old")

    def file(name: str, rows: list[tuple[object, ...]]) -> str:
        kinds = [pa.int64(), pa.int64(), pa.int64(), pa.string(), row, row]
        columns = [
            pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), kinds, strict=True)
        ]
        pq.write_table(pa.table(columns, names), tmp_path / name)
        return str(tmp_path / name)

    def key(number: int, text: str) -> dict[str, object]:
        return {"k": number, "t.t": text, "other": "x" * 1000}

    files = [
        file(
            "b",
            [(200, 0, 150, "update", key(1, "b"), key(9, "old")), (300, 0, 250, "insert", key(7, ""), None)],
        ),
        file(
            "a",
            [
                (100, 5, 90, "delete", None, key(1, "a")),
                (100, 1, 20, "insert", key(2, "copied"), None),
                (100, 4, 90, "insert", key(1, "a"), None),
                (100, None, 90, "truncate", None, None),
            ],
        ),
    ]
    events = keyed_events(Store(), files, _KEY, _SLICES, since=50, most_bytes=1000)
    assert events is not None
    assert events.keys.to_pylist() == [{"k": 1, "t.t": t} for t in ("a", "a", "b")]
    assert [ROW_OPERATIONS[operation] for operation in events.operations] == ["insert", "delete", "update"]
    assert events.places.tolist() == [4, 5, 1 << 56]
    assert events.commit_lsns.tolist() == [90, 90, 150]
    assert keyed_events(Store(), files, _KEY, _SLICES, since=50, most_bytes=50) is None
    assert DecidedKeys.of(keyed_events(Store(), [], _KEY, _SLICES, 0, 0) or events).keys.num_rows == 0
