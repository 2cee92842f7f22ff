"""The net change of each key equals the changes applied one by one, and its conflict is the first one of these."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, UPDATE, KeyChanges
from pgsieve.decoding.changes.net_change import compute_net_change
from tests.fixtures import histories as model

_OPERATIONS = {"insert": INSERT, "update": UPDATE, "delete": DELETE}


def _numbers(values: list[int | None]) -> Numbers:
    return np.array([NONE if value is None else value for value in values], np.int64)


def _columns(changes: list[model.Change]) -> KeyChanges:
    return KeyChanges(
        np.array([_OPERATIONS[change.operation] for change in changes], np.int8),
        _numbers(
            [change.old if change.operation == "delete" or change.is_move else None for change in changes]
        ),
        _numbers([change.new for change in changes]),
        {name: np.array([name in change.values for change in changes], np.bool_) for name in model.COLUMNS},
    )


def _followed(changes: list[model.Change], present: set[int]) -> int | None:
    """The first change that conflicts with a row of its key."""
    rows = set(present)
    for place, change in enumerate(changes):
        key = change.new if change.operation == "insert" or change.is_move else None
        if change.operation == "delete" or change.is_move:
            is_present = change.old in rows
            rows.discard(change.old or 0)
            if not is_present:
                continue
        if key is not None:
            if key in rows:
                return place
            rows.add(key)
    return None


def _merged(
    changes: list[model.Change], replica: dict[int, model.Values], present: Mask
) -> dict[int, model.Values]:
    """The replica's rows after the net change of their keys."""
    net, conflict = compute_net_change(_columns(changes), present)
    assert conflict is None
    rows = {key: row for key, row in replica.items() if key not in net.keys}
    for number, key in enumerate(net.keys.tolist()):
        base = int(net.base_keys[number])
        if not (net.is_upserted[number] or (net.is_updated[number] and base in replica)):
            continue
        assert changes[net.last_changes[number]].new == key
        kept = replica[base] if net.is_updated[number] else dict.fromkeys(model.COLUMNS)
        sent = {name: int(places[number]) for name, places in net.changes_by_column.items()}
        rows[key] = kept | {name: changes[at].values[name] for name, at in sent.items() if at != NONE}
    return rows


@pytest.mark.slow
def test_random_histories_leave_the_rows_of_changes_applied_one_by_one() -> None:
    moves = 0
    for seed in range(2000):
        draw = random.Random(seed)
        changes, replica = model.history(draw, length=draw.choice([1, 3, 12, 40]))
        present = np.array([key in replica for key in range(6)])
        wanted = model.applied(changes, replica)
        assert _merged(changes, replica, present) == wanted, f"seed {seed}"
        # Only keys that matter are looked up.
        matters = np.append(_columns(changes).compute_lookup_masks(5)[1], False)
        assert _merged(changes, replica, present & matters) == wanted, f"seed {seed}"
        moves += sum(change.is_move for change in changes)
    assert moves > 5000


def test_kept_rows_end_in_their_last_state() -> None:
    kept = 0
    for seed in range(500):
        draw = random.Random(seed)
        changes, replica = model.history(draw, length=draw.choice([1, 3, 12, 40]))
        present = np.array([key in replica for key in range(6)])
        net, conflict = compute_net_change(_columns(changes), present, retain_ended=True)
        assert conflict is None
        living = {key: row for key, row in replica.items() if key not in net.keys}
        ended = dict[int, tuple[model.Values, int]]()
        for number, key in enumerate(net.keys.tolist()):
            if not net.has_row[number]:
                continue
            row = (
                replica[int(net.base_keys[number])]
                if net.is_updated[number]
                else dict.fromkeys(model.COLUMNS)
            )
            sent = {name: int(places[number]) for name, places in net.changes_by_column.items()}
            row = row | {name: changes[at].values[name] for name, at in sent.items() if at != NONE}
            if net.end_changes[number] == NONE:
                living[key] = row
            else:
                ended[key] = row, int(net.end_changes[number])
        assert living == model.applied(changes, replica), f"seed {seed}"
        assert ended == model.ended(changes, replica), f"seed {seed}"
        counts = net.count_rows(present)
        assert counts["deleted"] == len(replica.keys() & ended.keys()), f"seed {seed}"
        kept += len(ended)
    assert kept > 500


@pytest.mark.slow
def test_random_changes_have_the_conflict_of_changes_applied_one_by_one() -> None:
    conflicts = 0
    for seed in range(3000):
        draw = random.Random(seed)
        changes = [
            draw.choice([model.insert, model.update, model.delete])(draw.randrange(4))
            if draw.random() < 0.5
            else model.move(*draw.sample(range(4), 2))
            for _ in range(draw.choice([2, 6, 15]))
        ]
        present = {key for key in range(4) if draw.random() < 0.4}
        columns = _columns(changes)
        wanted = _followed(changes, present)
        there = np.array([key in present for key in range(5)])
        assert compute_net_change(columns, there)[1] == wanted, f"seed {seed}"
        # Keys that do not matter need not be looked up.
        matters = np.append(columns.compute_lookup_masks(4)[1], False)
        assert compute_net_change(columns, there & matters)[1] == wanted, f"seed {seed}"
        conflicts += wanted is not None
    assert 500 < conflicts < 2500


@pytest.mark.parametrize("is_present", [True, False])
def test_a_chain_of_moves_of_any_length_ends_at_its_row(is_present: bool) -> None:
    length = 5000
    changes = [model.move(key, key + 1, b="sent" if key == 7 else None) for key in range(length)]
    for change in changes:
        if change.new != 8:
            change.values.clear()
    net, conflict = compute_net_change(_columns(changes), np.array([is_present, *[False] * (length + 1)]))
    (stays,) = np.flatnonzero(net.is_upserted | net.is_updated) if is_present else [None]
    assert conflict is None
    if is_present:
        assert (net.keys[stays], net.base_keys[stays], net.changes_by_column["b"][stays]) == (length, 0, 7)
        assert net.last_changes[stays] == length - 1
    assert np.count_nonzero(net.is_expected) == (1 if is_present else length)


def test_a_key_is_expected_in_the_replica_unless_its_first_change_inserts() -> None:
    changes = [model.update(0), model.insert(1), model.delete(1), model.move(2, 3), model.move(4, 5)]
    net, _ = compute_net_change(_columns(changes), np.array([False, False, True, False, False, False, False]))
    expected = dict(zip(net.keys.tolist(), net.is_expected.tolist(), strict=True))
    # A move that finds no row is a DELETE of its old key, and does not affect its new key.
    assert expected == {0: True, 1: False, 2: True, 3: False, 4: True}


def test_no_changes_become_nothing() -> None:
    net, conflict = compute_net_change(_columns([]), np.zeros(1, np.bool_))
    assert (len(net.keys), conflict) == (0, None)
