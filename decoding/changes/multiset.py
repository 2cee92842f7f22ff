"""Tables without a key: changes in their order in, the rows to delete and to insert out.

In: changes by the numbers of their rows (`KeyChanges`, whose keys are whole rows). Out: `MultisetChange`. A
replica without a key is a multiset: a DELETE takes one of several equal rows, an UPDATE replaces one. A
change whose old row is missing has no effect (PostgreSQL documentation, section 29.8, update_missing and
delete_missing). Raises nothing.

    the replica's rows     a  a  b
    UPDATE of a to c       a  b  c        one a is deleted; c is inserted
    DELETE of b            a  c           b is deleted
    UPDATE of b to a       a  c           no b is left: nothing is inserted, one row is missing

Source: FindReplTupleInLocalRel() in src/backend/replication/logical/worker.c, RelationFindReplTupleSeq() in
src/backend/executor/execReplication.c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pgsieve.decoding.changes.net_change import NONE, UPDATE, KeyChanges, Mask, Numbers

#: The low bits of an event's integer: its place, and whether it inserts its row. The row's number is above
#: them.
_EVENT_BITS = 33


@dataclass(frozen=True)
class MultisetChange:
    """The rows to delete by row number, the changes whose rows are inserted, and the missing rows."""

    deleted: Numbers
    inserted: Numbers
    missing: int


def sides(changes: KeyChanges) -> tuple[Numbers, Numbers]:
    """The rows before and after each change.

    An UPDATE that changes nothing has the same row on both sides.
    """
    stays = (changes.operations == UPDATE) & (changes.old == NONE)
    return np.where(stays, changes.new, changes.old), changes.new


def needed(changes: KeyChanges, rows: int) -> Numbers:
    """The number of each row that the replica needs, so that every change finds its row.

    `rows` is the number of rows.
    """
    old, new = sides(changes)
    least = np.zeros(rows, np.int64)
    # An UPDATE deletes the old row before it inserts the new one.
    events = np.concatenate([_events(old, 0), _events(new, 1)])
    if len(events):
        events.sort()
        row, steps = events >> _EVENT_BITS, np.where(events & 1, 1, -1)
        running, begins = np.cumsum(steps), np.flatnonzero(np.diff(row, prepend=NONE))
        before = np.repeat(running[begins] - steps[begins], np.diff(begins, append=len(row)))
        least[row[begins]] = np.minimum.reduceat(running - before, begins)
    return np.maximum(-least, 0)


def multiset_change(changes: KeyChanges, present: Numbers) -> MultisetChange:
    """The change of a multiset that has each row as often as `present` says."""
    old, new = sides(changes)
    lost = np.zeros(len(old), np.bool_)
    if (needed(changes, len(present)) > present).any():
        lost = _lost(old, new, present)
        old, new = np.where(lost, NONE, old), np.where(lost, NONE, new)
    counts = np.zeros(len(present), np.int64)
    np.add.at(counts, new[new != NONE], 1)
    np.subtract.at(counts, old[old != NONE], 1)
    return MultisetChange(
        np.maximum(-counts, 0), _last(new, np.maximum(counts, 0)), int(np.count_nonzero(lost))
    )


def first_of(rows: Numbers, left: Numbers) -> Mask:
    """Mask the first occurrences of each row.

    `left` has the number that is wanted of each row, and is reduced.
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=NONE))
    rank = np.arange(len(rows)) - np.repeat(begins, np.diff(begins, append=len(rows)))
    chosen = np.zeros(len(rows), np.bool_)
    chosen[order] = rank < left[ordered]
    np.subtract.at(left, rows[chosen], 1)
    return chosen


def _events(rows: Numbers, comes: int) -> Numbers:
    """One integer per event: its row, then its place, then whether it inserts the row."""
    places = np.flatnonzero(rows != NONE)
    return (rows[places] << _EVENT_BITS) | (places << 1) | comes


def _lost(old: Numbers, new: Numbers, present: Numbers) -> Mask:
    """The changes that find no row.

    Such a change inserts no row for a later one, so the changes are followed one by one.
    """
    counts, lost = present.tolist(), np.zeros(len(old), np.bool_)
    for change, (gone, come) in enumerate(zip(old.tolist(), new.tolist(), strict=True)):
        if gone != NONE:
            if not counts[gone]:
                lost[change] = True
                continue
            counts[gone] -= 1
        if come != NONE:
            counts[come] += 1
    return lost


def _last(new: Numbers, counts: Numbers) -> Numbers:
    """The last changes with each new row; `counts` has the number that is wanted of each row."""
    places = np.flatnonzero(new != NONE)[::-1]
    return np.sort(places[first_of(new[places], counts)])
