"""The source of a MERGE for random histories: each upserted row has the values of its net change."""

from __future__ import annotations

import random

import numpy as np

from pgsieve.decoding.changes.arrays import NONE
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, UPDATE, KeyChanges
from pgsieve.decoding.changes.merge_source import make_merge_source
from pgsieve.decoding.changes.net_change import compute_net_change

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


def test_a_merge_leaves_the_same_rows_as_the_changes() -> None:
    drawn = random.Random(34)
    merged = 0
    for _ in range(500):
        changes, before, after = _history(drawn)
        present = np.array([*(key in before for key in range(_KEYS)), False])
        net, conflict = compute_net_change(changes, present)
        assert conflict is None
        source = make_merge_source(net)
        rows = {key: dict(row) for key, row in before.items()}
        for i, key in enumerate(source.keys.tolist()):
            if source.actions[i] == "delete":
                rows.pop(key, None)
                continue
            if source.actions[i] == "update" and key not in before:
                continue
            rows[key] = {c: _value(source, i, c, before) for c in _COLUMNS}
            merged += 1
        assert rows == after, (changes, before)
    assert merged > 300


def _value(source, i: int, column: str, before: dict[int, _Row]) -> object:
    if source.retains_value_by_column[column][i]:
        return before[int(source.keys[i])][column]
    if (sent := int(source.changes_by_column[column][i])) != NONE:
        return ("change", sent)
    return before[int(source.base_keys[i])][column]
