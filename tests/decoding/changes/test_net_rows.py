"""The new rows of random histories: their values are where changes one by one leave them."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import NONE
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, UPDATE, KeyChanges
from pgsieve.decoding.changes.net_change import compute_net_change
from pgsieve.decoding.changes.net_rows import NetRows, find_net_rows
from pgsieve.decoding.changes.value_sources import NumberedValues

_KEYS, _COLUMNS = 5, ("a", "b")
#: For each column of a row, the change that sent its value, or the replica's row.
_Row = dict[str, object]


def _history(drawn: random.Random) -> tuple[KeyChanges, dict[int, _Row], dict[int, _Row]]:
    """Random changes without a conflict, some of missing rows, and the replica's rows before and after them."""
    before = {key: dict.fromkeys(_COLUMNS, ("replica", key)) for key in range(_KEYS) if drawn.random() < 0.5}
    rows, changes = {key: dict(row) for key, row in before.items()}, []
    for number in range(drawn.randrange(1, 12)):
        old, new, kind = (
            drawn.randrange(_KEYS),
            drawn.randrange(_KEYS),
            drawn.choice((INSERT, UPDATE, DELETE)),
        )
        sent = {c for c in _COLUMNS if kind == INSERT or drawn.random() < 0.6}
        if kind == UPDATE and drawn.random() < 0.5:
            new = old
        if new in rows and (kind == INSERT or (kind == UPDATE and new != old and old in rows)):
            continue
        number = len(changes)  # noqa: PLW2901 - those that would meet a row of their key are left out
        changes.append((kind, NONE if kind == INSERT or (kind == UPDATE and new == old) else old, new, sent))
        row = {} if kind == INSERT else rows.pop(old, None)
        if kind != DELETE and row is not None:
            rows[new] = {**row, **dict.fromkeys(sent, ("change", number))}
    operations, olds = np.array([c[0] for c in changes], np.int8), np.array([c[1] for c in changes], np.int64)
    news = np.array([NONE if c[0] == DELETE else c[2] for c in changes], np.int64)
    unsent = {c: np.array([c in change[3] for change in changes], np.bool_) for c in _COLUMNS}
    return KeyChanges(operations, olds, news, unsent), before, rows


def test_new_rows_have_their_values_where_the_changes_one_by_one_find_them() -> None:
    drawn = random.Random(34)
    found = 0
    for _ in range(500):
        changes, before, after = _history(drawn)
        present = np.array([*(key in before for key in range(_KEYS)), False])
        net, conflict = compute_net_change(changes, present)
        assert conflict is None
        places = 10 * np.arange(len(changes.operations))
        has_row = net.is_upserted | (net.is_updated & present[net.base_keys])
        new_rows = find_net_rows(places, net, has_row & (net.last_changes != NONE))
        keys = changes.new_keys[new_rows.places // 10].tolist()
        rows = {key: row for key, row in before.items() if key not in net.keys}
        values = {name: _find_values(new_rows, name) for name in _COLUMNS}
        rows |= {key: {name: values[name][i] for name in _COLUMNS} for i, key in enumerate(keys)}
        assert rows == after, (changes, before)
        found += len(keys)
    assert found > 300


def _find_values(new_rows: NetRows, name: str) -> list[object]:
    """The value of each new row: that of its own change, or of the place where its sources say."""
    values: list[object] = [("change", place // 10) for place in new_rows.places.tolist()]
    _, sources = new_rows.find_column_sources(name)
    texts = [
        NumberedValues(numbers, pa.array([f"{kind} {number}" for number in numbers.tolist()], pa.string()))
        for kind, numbers in (("change", sources.needed_changes), ("replica", sources.needed_base_rows))
    ]
    completion = new_rows.complete(name, *texts)
    for place, text in zip(
        completion.values.numbers.tolist(), completion.values.values.to_pylist(), strict=True
    ):
        kind, number = text.split()
        values[new_rows.places.tolist().index(place)] = (
            kind,
            int(number) // (10 if kind == "change" else 1),
        )
    return values
