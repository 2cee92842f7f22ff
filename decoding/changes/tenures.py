"""The tenures of keys, and the rows that they have: what `net_change` and `row_versions` both need.

Several rows can have the same key, one after the other. The time during which a row has a key is a *tenure*. This
example has four changes of a replica that has rows with the keys 1 and 2:

    change       UPDATE of 1   DELETE of 2   UPDATE of 1 to 2   INSERT of 1       net change
    sends        b                           c                  b and c

    key 1    ──────── b ──────────────────────── left              ┌─ b, c ──►    upsert: b and c of the INSERT
             the replica's row                    │                its own row
                                                  ▼
    key 2    ──────────────────── ended          arrived: c ──────────────────►   update: c of the move, b inherited,
             the replica's row                   the row of key 1                 other values from the replica's
                                                                                  row of key 1 (the base key)

An UPDATE that changes the key is a *move*: the row leaves its old key, then arrives at its new key. The tenures of
one row form a chain. A tenure has the values of the columns that its changes sent. It inherits the other values from
the tenure before it in the chain. It inherits nothing from earlier tenures of the same key, because these belong to
other rows. A move or a DELETE that finds no row does nothing (PostgreSQL documentation, Logical Replication:
Conflicts, update_missing and delete_missing).

In: changes in order, with numbers of their keys (`KeyChanges`). Out: tenures, with one element per tenure. All data are
integers, so a few NumPy operations on whole columns do the work. Raises nothing.

Source: apply_handle_insert(), apply_handle_update() and apply_handle_delete() in
src/backend/replication/logical/worker.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers, fill_none, mask_new_numbers
from pgsieve.decoding.changes.key_changes import DELETE, INSERT, LEAVE, UPDATE, KeyChanges
from pgsieve.decoding.changes.value_sources import ValueSources

#: A change is one event, but a move is two events: `LEAVE` and `_ARRIVE`.
_ARRIVE = 4
#: Where the row of a tenure comes from: an INSERT (`INSERT`), a move (`_ARRIVE`), the replica (`REPLICA`), or nowhere,
#: because the changes found no row (`_NOTHING`). Commits may divide a tenure into parts. Then `_CONTINUED` says that the
#: row comes from the previous part.
REPLICA, _NOTHING, _CONTINUED = -1, -2, -3
#: Events are sorted as integers. The high bits are the key. This number of low bits is the place of the event: twice
#: the index of its change, plus 1 if the event is the arrival of a move.
_PLACE_BITS = 33


@dataclass(frozen=True)
class Tenures:
    """The tenures of all keys and their events. Both are ordered by key, then by time.

    - `event_changes` and `event_kinds` have one element per event. `event_changes` is the index of the change.
    - `first_events` and `last_events` have one element per tenure: the indexes of its first and its last event.
    - `origins` says for each tenure where its row comes from.
    - `keys` has the key of each tenure. The mask `is_first` has the tenures that are the first tenure of their key, and
      the mask `is_ended` has the tenures that end within the changes.
    """

    event_changes: Numbers
    event_kinds: npt.NDArray[np.int8]
    first_events: Numbers
    last_events: Numbers
    origins: Numbers
    keys: Numbers
    is_first: Mask
    is_ended: Mask

    @classmethod
    def from_changes(cls, changes: KeyChanges, commits: Numbers | None = None) -> Tenures:
        """Return the tenures of all keys.

        If `commits` is given, it has the commit of each change, and each commit begins a new part of a tenure.
        """
        is_move = changes.is_move
        other_changes, moves = np.flatnonzero(~is_move), np.flatnonzero(is_move)
        event_keys = np.where(
            _mask_ends(changes.operations[other_changes]),
            changes.old_keys[other_changes],
            changes.new_keys[other_changes],
        )
        event_keys = np.concatenate([event_keys, changes.old_keys[moves], changes.new_keys[moves]])
        event_places = np.concatenate([2 * other_changes, 2 * moves, 2 * moves + 1])
        events = np.sort(event_keys << _PLACE_BITS | event_places)
        event_keys, event_places = events >> _PLACE_BITS, events & ((1 << _PLACE_BITS) - 1)
        event_changes = event_places >> 1
        event_kinds = np.where(
            is_move[event_changes], LEAVE + (event_places & 1), changes.operations[event_changes]
        ).astype(np.int8)
        is_begin, is_end, is_first = (
            _mask_begins(event_kinds),
            _mask_ends(event_kinds),
            mask_new_numbers(event_keys),
        )
        follows_end = np.zeros(len(event_keys), np.bool_)
        follows_end[1:] = is_end[:-1]
        begins_commit = mask_new_numbers(commits[event_changes]) if commits is not None else False
        first_events = np.flatnonzero(is_first | is_begin | follows_end | begins_commit)
        origins = np.select([is_begin, is_first, follows_end], [event_kinds, REPLICA, _NOTHING], _CONTINUED)
        origins = origins[first_events].astype(np.int64)
        last_events = np.append(first_events[1:], len(event_keys)) - 1 if len(first_events) else first_events
        keys, is_ended = event_keys[first_events], is_end[last_events]
        return cls(
            event_changes,
            event_kinds,
            first_events,
            last_events,
            origins,
            keys,
            is_first[first_events],
            is_ended,
        )

    @property
    def is_left(self) -> Mask:
        """The mask of the tenures that end because the row moves to another key."""
        is_left: Mask = self.event_kinds[self.last_events] == LEAVE
        return is_left

    @property
    def brings_row(self) -> Mask:
        """The mask of the tenures that begin because an INSERT or a move brings a row to the key."""
        return _mask_begins(self.event_kinds[self.first_events])

    @property
    def first_changes(self) -> Numbers:
        """The index of the first change of each tenure."""
        return self.event_changes[self.first_events]

    @property
    def last_changes(self) -> Numbers:
        """The index of the last change of each tenure. It may be the change that ends the tenure."""
        return self.event_changes[self.last_events]

    def find_rows(self, changes: KeyChanges) -> TenureRows:
        """Find the row of each tenure. The tenures were made from `changes`."""
        return _inherit(self, *_find_value_changes(changes, self))


@dataclass(frozen=True)
class TenureRows:
    """The row of each tenure, after it has inherited from the tenures before it in its chain.

    - `origins` says where the row comes from. If it is the replica, `base_keys` has the row's key there, otherwise `NONE`.
      If it is an INSERT, `begin_changes` is this INSERT, otherwise `NONE`.
    - `value_changes` is the last change of the tenure that sends values of the row, or `NONE`.
    - `changes_by_column` maps each column that some change did not send to the last change that sent it, or to `NONE`.
    """

    origins: Numbers
    value_changes: Numbers
    base_keys: Numbers
    begin_changes: Numbers
    changes_by_column: Mapping[str, Numbers]

    def mask_rows(self, has_row_before: Mask) -> Mask:
        """Return the mask of the tenures that have a row; `has_row_before` says which keys the replica has."""
        has_row: Mask = (self.origins == INSERT) | (
            (self.origins == REPLICA) & has_row_before[self.base_keys]
        )
        return has_row

    def select_columns(self, tenures: Numbers) -> dict[str, Numbers]:
        """Return `changes_by_column` of these tenures."""
        return {name: changes[tenures] for name, changes in self.changes_by_column.items()}


def _find_value_changes(changes: KeyChanges, tenures: Tenures) -> tuple[Numbers, dict[str, Numbers]]:
    """Return each tenure's last change that sends values of the row, and its last change that sent each column."""
    if not len(tenures.first_events):
        return fill_none(0), {name: fill_none(0) for name in changes.is_sent_by_column}
    row_changes = np.where(_mask_ends(tenures.event_kinds), NONE, tenures.event_changes)
    value_changes = np.maximum.reduceat(row_changes, tenures.first_events)
    changes_by_column = {
        name: np.maximum.reduceat(
            np.where(is_sent[tenures.event_changes], row_changes, NONE), tenures.first_events
        )
        for name, is_sent in changes.is_sent_by_column.items()
    }
    return value_changes, changes_by_column


def _inherit(
    tenures: Tenures, value_changes: Numbers, changes_by_column: Mapping[str, Numbers]
) -> TenureRows:
    """Follow the chains of moves, and let each tenure inherit from the tenures before it in its chain.

    `value_changes` and `changes_by_column` are those of `_find_value_changes`.

    This is done by pointer doubling. At first a tenure points to the tenure before it, its parent. In each round,
    every tenure takes over the columns that its parent has so far, and then points to its parent's parent. So a chain
    of n moves takes log2(n) rounds. For example, a row moves from tenure a to b, c, d and e. After each round the
    tenures point to:

        round    b       c                      d                      e
        0        a       b                      c                      d
        1        done    a, with b's columns    b, with c's columns    c, with d's columns
        2                done                   done                   a, with the columns of d, c and b
        3                                                              done
    """
    origins = tenures.origins
    parents = np.where(origins == _CONTINUED, np.arange(len(origins)) - 1, NONE)
    if (is_arrival := origins == _ARRIVE).any():
        tenure_by_move = fill_none(int(tenures.event_changes.max()) + 1)
        tenure_by_move[tenures.last_changes[tenures.is_left]] = np.flatnonzero(tenures.is_left)
        parents[is_arrival] = tenure_by_move[tenures.first_changes[is_arrival]]
    sources = ValueSources(
        changes_by_column,
        {
            "origin": origins,
            "base_key": np.where(origins == REPLICA, tenures.keys, NONE),
            "begin_change": np.where(origins == INSERT, tenures.first_changes, NONE),
            "parent": parents,
        },
    )
    while len(children := np.flatnonzero(sources.origins["parent"] != NONE)):
        sources = sources.inherit(children, sources.take(sources.origins["parent"][children]))
    return TenureRows(
        sources.origins["origin"],
        value_changes,
        sources.origins["base_key"],
        sources.origins["begin_change"],
        sources.changes_by_column,
    )


def replace_lost_moves(changes: KeyChanges, has_row_before: Mask) -> KeyChanges:
    """Replace each move that finds no row by a DELETE of its old key. The DELETE finds no row either, so it does nothing."""
    if not changes.is_move.any():
        return changes
    if not len(find_moves_without_row(changes, has_row_before)):
        return changes
    lost_moves = _find_lost_moves(changes, has_row_before)
    operations, new_keys = changes.operations.copy(), changes.new_keys.copy()
    operations[lost_moves], new_keys[lost_moves] = DELETE, NONE
    return replace(changes, operations=operations, new_keys=new_keys)


def find_moves_without_row(changes: KeyChanges, has_row_before: Mask) -> Numbers:
    """Return the moves that find no row, supposing that all moves before them find theirs.

    A move that finds no row brings none to its new key, so a later move may find no row either. To find that move, call
    this function with changes in which each move is split into a LEAVE and an INSERT. It then returns the LEAVEs that
    find no row. Remove their INSERTs from the changes, and call it again.
    """
    tenures = Tenures.from_changes(changes)
    is_without_row = (tenures.origins == _NOTHING) | (
        (tenures.origins == REPLICA) & ~has_row_before[tenures.keys]
    )
    return np.sort(tenures.last_changes[tenures.is_left & is_without_row])


def _find_lost_moves(changes: KeyChanges, has_row_before: Mask) -> Numbers:
    """Return the moves that find no row, in a loop over all changes.

    Operations on whole columns cannot do this: whether a move finds a row can depend on each move before it.
    """
    has_row, lost_moves = bytearray(has_row_before.tobytes()), list[int]()
    change_indexes = np.flatnonzero((changes.operations != UPDATE) | changes.is_move)
    old_keys, new_keys = changes.old_keys[change_indexes].tolist(), changes.new_keys[change_indexes].tolist()
    for change, old_key, new_key in zip(change_indexes.tolist(), old_keys, new_keys, strict=True):
        if old_key != NONE:
            had_row = has_row[old_key]
            has_row[old_key] = 0
            if not had_row:
                if new_key != NONE:
                    lost_moves.append(change)
                continue
        if new_key != NONE:
            has_row[new_key] = 1
    return np.array(lost_moves, np.int64)


def _mask_begins(event_kinds: npt.NDArray[np.int8]) -> Mask:
    is_begin: Mask = (event_kinds == INSERT) | (event_kinds == _ARRIVE)
    return is_begin


def _mask_ends(event_kinds: npt.NDArray[np.int8]) -> Mask:
    is_end: Mask = (event_kinds == DELETE) | (event_kinds == LEAVE)
    return is_end
