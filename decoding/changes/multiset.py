"""Computes which rows to delete and to insert in a replica without a key.

In: the changes in order (`KeyChanges`), with a number for the row before and after each change; equal rows have the same
number. Out: a `MultisetChange`. Raises nothing.

A replica without a key is a multiset: it can have several equal rows. A DELETE removes one of them, and an UPDATE
replaces one of them. A change that finds no equal row has no effect (PostgreSQL documentation, Logical Replication:
Conflicts, update_missing and delete_missing).

    the replica's rows     a  a  b
    UPDATE of a to c       a  b  c        one a is deleted; c is inserted
    DELETE of b            a  c           b is deleted
    UPDATE of b to a       a  c           there is no b: nothing is inserted, one row is missing

Source: FindReplTupleInLocalRel() in src/backend/replication/logical/worker.c, RelationFindReplTupleSeq() in
src/backend/executor/execReplication.c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.key_changes import UPDATE, KeyChanges

#: The number of bits below the row's number in an event. An event means that a change deletes or inserts a row. It is one
#: integer: its high bits are the row's number, its lowest bit is 1 if the row is inserted, and the bits between are the
#: index of the change.
_EVENT_BITS = 33


@dataclass(frozen=True)
class MultisetChange:
    """The effect of changes on a multiset of rows.

    - `deletion_counts` says how often each row is deleted.
    - `inserting_changes` has the changes whose new rows are inserted.
    - `changes_without_row` has the changes that found no row.
    """

    deletion_counts: Numbers
    inserting_changes: Numbers
    changes_without_row: Numbers

    @property
    def missing_count(self) -> int:
        """The number of changes that found no row."""
        return len(self.changes_without_row)


def rows_before_and_after(changes: KeyChanges) -> tuple[Numbers, Numbers]:
    """Return the numbers of the rows before and after each change.

    Both are the same for an UPDATE that changes nothing.
    """
    has_same_row = (changes.operations == UPDATE) & (changes.old_keys == NONE)
    return np.where(has_same_row, changes.new_keys, changes.old_keys), changes.new_keys


def count_needed_rows(changes: KeyChanges, row_count: int) -> Numbers:
    """Return how often the replica must have each row, so that every change finds its row.

    `row_count` is the number of different rows.
    """
    old_rows, new_rows = rows_before_and_after(changes)
    lowest_balances = np.zeros(row_count, np.int64)
    # An UPDATE deletes the old row before it inserts the new row, so 0 (delete) comes before 1 (insert).
    events = np.concatenate([_encode_events(old_rows, 0), _encode_events(new_rows, 1)])
    if len(events):
        events.sort()
        event_rows, steps = events >> _EVENT_BITS, np.where(events & 1, 1, -1)
        balances, starts = np.cumsum(steps), np.flatnonzero(np.diff(event_rows, prepend=NONE))
        balances_before = np.repeat(balances[starts] - steps[starts], np.diff(starts, append=len(event_rows)))
        lowest_balances[event_rows[starts]] = np.minimum.reduceat(balances - balances_before, starts)
    return np.maximum(-lowest_balances, 0)


def compute_multiset_change(changes: KeyChanges, present_counts: Numbers) -> MultisetChange:
    """Return the effect of changes on a multiset; `present_counts` says how often the multiset has each row.

    A caller that divides the rows into parts, and computes each part alone, gives an UPDATE of a row to another row as two
    changes: a `LEAVE`, which removes the old row, and an INSERT of the new row. If the `LEAVE` finds no row, the caller
    computes the changes again without the INSERT. Then further changes may find no row.
    """
    old_rows, new_rows = rows_before_and_after(changes)
    is_without_row = np.zeros(len(old_rows), np.bool_)
    if (count_needed_rows(changes, len(present_counts)) > present_counts).any():
        is_without_row = _mask_changes_without_row(old_rows, new_rows, present_counts)
        old_rows = np.where(is_without_row, NONE, old_rows)
        new_rows = np.where(is_without_row, NONE, new_rows)
    counts = np.zeros(len(present_counts), np.int64)
    np.add.at(counts, new_rows[new_rows != NONE], 1)
    np.subtract.at(counts, old_rows[old_rows != NONE], 1)
    return MultisetChange(
        np.maximum(-counts, 0),
        _find_last_changes(new_rows, np.maximum(counts, 0)),
        np.flatnonzero(is_without_row),
    )


def mask_first_occurrences(rows: Numbers, remaining_counts: Numbers) -> Mask:
    """Mask the first occurrences of each row in `rows`, at most as many as `remaining_counts` says for the row.

    Subtracts the masked occurrences from `remaining_counts`, so that the next call goes on with the rest.
    """
    order = np.argsort(rows, kind="stable")
    sorted_rows = rows[order]
    starts = np.flatnonzero(np.diff(sorted_rows, prepend=NONE))
    occurrence_indexes = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    mask = np.zeros(len(rows), np.bool_)
    mask[order] = occurrence_indexes < remaining_counts[sorted_rows]
    np.subtract.at(remaining_counts, rows[mask], 1)
    return mask


def _encode_events(rows: Numbers, inserts: int) -> Numbers:
    """Return one integer per event, which has the row, the index of the change, and whether it inserts the row."""
    change_indexes = np.flatnonzero(rows != NONE)
    return (rows[change_indexes] << _EVENT_BITS) | (change_indexes << 1) | inserts


def _mask_changes_without_row(old_rows: Numbers, new_rows: Numbers, present_counts: Numbers) -> Mask:
    """Mask the changes that find no row, in a loop over all changes.

    Operations on whole columns cannot do this, because changes depend on each other: a change that finds no row inserts no
    row either, and so a later change may find no row.
    """
    counts, is_without_row = present_counts.tolist(), np.zeros(len(old_rows), np.bool_)
    for change, (old_row, new_row) in enumerate(zip(old_rows.tolist(), new_rows.tolist(), strict=True)):
        if old_row != NONE:
            if not counts[old_row]:
                is_without_row[change] = True
                continue
            counts[old_row] -= 1
        if new_row != NONE:
            counts[new_row] += 1
    return is_without_row


def _find_last_changes(new_rows: Numbers, counts: Numbers) -> Numbers:
    """For each row, find the last changes that have it as their new row. `counts` says how many changes each row needs."""
    change_indexes = np.flatnonzero(new_rows != NONE)[::-1]
    return np.sort(change_indexes[mask_first_occurrences(new_rows[change_indexes], counts)])
