"""Computes the net change: the outcome of a table's changes for each key.

In: changes in order, with numbers of their keys (`KeyChanges`). Out: one element per key (`NetChange`), and the first
change that conflicts with an existing row. All data are integers, so a few numpy operations on whole columns do the
work. Raises nothing.

Several rows can have the same key, one after the other. The time during which a row has a key is a *tenure*. This
example has four changes of a replica that has rows with the keys 1 and 2:

    change       UPDATE of 1   DELETE of 2   UPDATE of 1 to 2   INSERT of 1       net change
    sends        b                           c                  b and c

    key 1    ──────── b ──────────────────────── left              ┌─ b, c ──►    upsert: b and c as inserted
             the replica's row                    │                its own row
                                                  ▼
    key 2    ──────────────────── ended          arrived: c ──────────────────►   update: c as moved, b inherited,
             the replica's row                   the row of key 1                 the rest of the replica's row of
                                                                                  key 1, the base key

An UPDATE that changes the key is a *move*: the row leaves its old key, then arrives at its new key. The tenures of
one row form a chain. A tenure has the values of the columns that its changes sent. It inherits the other values from
the tenure before it in the chain. It inherits nothing from earlier tenures of the same key, because these belong to
other rows. A move or a DELETE that finds no row does nothing (PostgreSQL documentation, Logical Replication:
Conflicts, update_missing and delete_missing).

Source: apply_handle_insert(), apply_handle_update() and apply_handle_delete() in
src/backend/replication/logical/worker.c, and CheckAndReportConflict() in
src/backend/executor/execReplication.c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: The operations of changes. A change is one event, but a move is two events: `LEAVE` and `_ARRIVE`. A caller may also
#: give a move as two changes, `LEAVE` and `INSERT`, if the move finds its row (`find_moves_without_row`). Such an INSERT
#: inherits no values: `find_left_rows` says where the values of the old row are.
INSERT, UPDATE, DELETE, LEAVE = range(4)
_ARRIVE = 4
#: Where the row of a tenure comes from: an INSERT (`INSERT`), a move (`_ARRIVE`), the replica (`_REPLICA`), or nowhere,
#: because the changes found no row (`_NOTHING`). Tenures may be split by commits. Then `_CONTINUED` says that the row
#: comes from the part before.
_REPLICA, _NOTHING, _CONTINUED = -1, -2, -3
#: Stands for "no key", "no change" and "no row" in arrays of numbers.
NONE = -1
#: Events are sorted as integers. The high bits are the key. This number of low bits is the place of the event: twice
#: the index of its change, plus 1 if the event is the arrival of a move.
_PLACE_BITS = 33


@dataclass(frozen=True)
class KeyChanges:
    """The changes of a table in order, with numbers of their keys (0, 1, …).

    - `operations` are `INSERT`, `UPDATE`, `DELETE` and `LEAVE`.
    - `old_keys` is the key before a DELETE, a LEAVE or a move, and `NONE` for other changes.
    - `new_keys` is the key after an INSERT or an UPDATE, and `NONE` for other changes.
    - `is_sent_by_column` has the columns that some change did not send, because their TOASTed value did not change. It
      maps such a column to the mask of the changes that sent it.
    """

    operations: npt.NDArray[np.int8]
    old_keys: Numbers
    new_keys: Numbers
    is_sent_by_column: Mapping[str, Mask]

    @property
    def is_move(self) -> Mask:
        """The mask of UPDATEs from one key to another."""
        is_move: Mask = (self.operations == UPDATE) & (self.old_keys != NONE)
        return is_move

    def compute_lookup_masks(self, key_count: int) -> tuple[Mask, Mask]:
        """Return two masks of keys, which say for which keys the caller must look into the replica.

        The first mask has the keys that need a row before the changes: their first change is an UPDATE, a DELETE or a
        LEAVE. For the keys of the second mask it matters whether the replica has a row. A move takes a row away from
        such a key. Or the key gets a row before any change ends one: a row of the replica would conflict with it.
        """
        first_begins = _find_first_indexes(
            np.where((self.operations == INSERT) | self.is_move, self.new_keys, NONE), key_count
        )
        first_ends = _find_first_indexes(self.old_keys, key_count)
        first_updates = _find_first_indexes(
            np.where((self.operations == UPDATE) & ~self.is_move, self.new_keys, NONE), key_count
        )
        is_row_relevant = first_begins < first_ends
        is_row_relevant[self.old_keys[self.is_move]] = True
        return np.minimum(first_ends, first_updates) < np.minimum(
            first_begins, len(self.operations)
        ), is_row_relevant


@dataclass(frozen=True)
class NetChange:
    """The outcome of changes for their keys; each array has one element per key.

    - `is_upserted`: after the changes, the key has a new row.
    - `is_updated`: after the changes, the key has an updated row: the one that the replica has with the key
      `base_keys`. If the replica has no such row, the key has none.
    - `is_expected`: the replica should have a row with this key before the changes.
    - `last_changes` is the change that has the row's values at the end.
    - `changes_by_column` has the columns that some change did not send. It maps such a column to the change that has
      the column's value, or to `NONE` if only the replica's row with the key `base_keys` has it.
    - `begin_changes` is the INSERT with which the row began, or `NONE` if the replica has the row.
    - `end_changes` is the change that ended the row, if the replica retains ended rows (rows that were deleted, but
      stay), otherwise `NONE`. An ended row keeps its last values. If these are the replica's,
      `last_changes` is `NONE`.

    A key that is neither upserted nor updated has no row after the changes.
    """

    keys: Numbers
    is_upserted: Mask
    is_updated: Mask
    is_expected: Mask
    last_changes: Numbers
    base_keys: Numbers
    changes_by_column: Mapping[str, Numbers]
    begin_changes: Numbers
    end_changes: Numbers

    @property
    def has_row(self) -> Mask:
        """The mask of the keys that are upserted or updated.

        These keys have a row after the changes, except an updated key whose `base_keys` has no row in the replica. Here
        ended rows count as rows, if the replica retains them.
        """
        has_row: Mask = self.is_upserted | self.is_updated
        return has_row

    def count_rows(self, had_rows: Mask) -> dict[str, int]:
        """Count the rows that the changes insert, update and delete, and the rows that they do not find.

        `had_rows` is the mask of the keys with a row in the replica. Ended rows do not count as rows.
        """
        has_living_row = (self.is_upserted | (self.is_updated & had_rows[self.base_keys])) & (
            self.end_changes == NONE
        )
        had_row = had_rows[self.keys]
        masks = {
            "inserted": has_living_row & ~had_row,
            "updated": has_living_row & had_row,
            "deleted": ~has_living_row & had_row,
            "missing": self.is_expected & ~had_row,
        }
        return {kind: int(np.count_nonzero(rows)) for kind, rows in masks.items()}


@dataclass(frozen=True)
class LeftRows:
    """Rows that a `LEAVE` takes away from their keys, as they are before it; each array has one element per row.

    `leaves` is the LEAVE. The other fields have the same meaning as in `NetChange`.
    """

    leaves: Numbers
    base_keys: Numbers
    changes_by_column: Mapping[str, Numbers]
    begin_changes: Numbers


@dataclass(frozen=True)
class _Tenures:
    """The tenures of all keys and their events. Both are ordered by key, then by time.

    - `event_keys`, `event_changes` and `event_kinds` have one element per event. `event_changes` is the index of the
      change.
    - `first_events` and `last_events` have one element per tenure: the indexes of its first and its last event.
    - `origins` says for each tenure where its row comes from.
    - `keys` has the key of each tenure. The mask `is_first` has the tenures that are the first tenure of their key, and
      the mask `is_ended` has the tenures that end within the changes.
    """

    event_keys: Numbers
    event_changes: Numbers
    event_kinds: npt.NDArray[np.int8]
    first_events: Numbers
    last_events: Numbers
    origins: Numbers
    keys: Numbers
    is_first: Mask
    is_ended: Mask

    @property
    def is_left(self) -> Mask:
        """The mask of the tenures that end because the row moves to another key."""
        is_left: Mask = self.event_kinds[self.last_events] == LEAVE
        return is_left


@dataclass(frozen=True)
class _TenureRows:
    """The row of each tenure, after it has inherited from the tenures before it in its chain.

    - `origins` says where the row comes from.
    - `base_keys`, `begin_changes` and `changes_by_column` have the same meaning as in `NetChange`.
    """

    origins: Numbers
    base_keys: Numbers
    begin_changes: Numbers
    changes_by_column: Mapping[str, Numbers]

    def mask_rows(self, has_row_before: Mask) -> Mask:
        """Return the mask of the tenures that have a row; `has_row_before` says which keys the replica has."""
        has_row: Mask = (self.origins == INSERT) | (
            (self.origins == _REPLICA) & has_row_before[self.base_keys]
        )
        return has_row

    def select_columns(self, tenures: Numbers) -> dict[str, Numbers]:
        """Return `changes_by_column` of these tenures."""
        return {name: changes[tenures] for name, changes in self.changes_by_column.items()}


def compute_net_change(
    changes: KeyChanges, has_row_before: Mask, *, retain_ended: bool = False
) -> tuple[NetChange, int | None]:
    """Return the outcome for each key, and the first change that conflicts with a row of its key, or None.

    `has_row_before` says for each key whether the replica has a row. If there is a conflict, the outcome has no
    meaning. With `retain_ended`, a key without a row after the changes keeps its last ended row. For that,
    `has_row_before` must be right for all keys, and not only for those of `compute_lookup_masks`.
    """
    changes = _replace_lost_moves(changes, has_row_before)
    tenures = _find_tenures(changes)
    last_changes, changes_by_column = _find_last_changes(changes, tenures)
    rows = _inherit(tenures, changes_by_column)
    final_tenures = (
        np.flatnonzero(np.append(tenures.is_first[1:], True)) if len(last_changes) else _fill_none(0)
    )
    first_tenures = np.flatnonzero(tenures.is_first)
    is_gone, end_changes = tenures.is_ended[final_tenures], _fill_none(len(final_tenures))
    if retain_ended and len(final_tenures):
        has_row = rows.mask_rows(has_row_before)
        latest_tenures = np.maximum.reduceat(np.where(has_row, np.arange(len(has_row)), NONE), first_tenures)
        is_gone = latest_tenures == NONE
        final_tenures = np.where(is_gone, final_tenures, latest_tenures)
        end_changes = np.where(
            tenures.is_ended[final_tenures] & ~is_gone,
            tenures.event_changes[tenures.last_events[final_tenures]],
            NONE,
        )
    net = NetChange(
        keys=tenures.keys[final_tenures],
        is_upserted=~is_gone & (rows.origins[final_tenures] == INSERT),
        is_updated=~is_gone & (rows.origins[final_tenures] == _REPLICA),
        is_expected=~_mask_begins(tenures.event_kinds[tenures.first_events[first_tenures]]),
        last_changes=np.where(is_gone, NONE, last_changes[final_tenures]),
        base_keys=rows.base_keys[final_tenures],
        changes_by_column=rows.select_columns(final_tenures),
        begin_changes=rows.begin_changes[final_tenures],
        end_changes=end_changes,
    )
    return net, _find_conflict(tenures, rows, has_row_before)


def find_left_rows(changes: KeyChanges, has_row_before: Mask) -> LeftRows:
    """Find the rows that leave their keys by a `LEAVE` that did not send all columns.

    `has_row_before` is that of `compute_net_change`. `changes` has no moves of another form.
    """
    tenures, lacks_value = _find_tenures(changes), np.zeros(len(changes.operations), np.bool_)
    for is_sent in changes.is_sent_by_column.values():
        lacks_value |= ~is_sent
    rows = _inherit(tenures, _find_last_changes(changes, tenures)[1])
    last_changes = tenures.event_changes[tenures.last_events]
    left_tenures = np.flatnonzero(
        tenures.is_left & lacks_value[last_changes] & rows.mask_rows(has_row_before)
    )
    return LeftRows(
        last_changes[left_tenures],
        rows.base_keys[left_tenures],
        rows.select_columns(left_tenures),
        rows.begin_changes[left_tenures],
    )


@dataclass(frozen=True)
class RowVersions:
    """The versions of rows that changes make, and the ends of earlier versions.

    A commit makes a version of each key that it changes and that has a row after the commit. All fields but
    `former_end_commits` have one element per version.

    - `keys`, `last_changes`, `base_keys`, `changes_by_column` and `begin_changes` have the same meaning as in `NetChange`.
    - `end_commits` is the number of the commit that ends the version, or `NONE` if no commit ends it.
    - `former_end_commits` has for each key the commit that ends the row from before the changes, or `NONE`.
    """

    keys: Numbers
    last_changes: Numbers
    base_keys: Numbers
    changes_by_column: Mapping[str, Numbers]
    begin_changes: Numbers
    end_commits: Numbers
    former_end_commits: Numbers


def compute_row_versions(changes: KeyChanges, commits: Numbers, has_row_before: Mask) -> RowVersions:
    """Return the versions that changes make; the changes must have no conflict and no `LEAVE`.

    `commits` has the number of each change's commit. A commit makes at most one version of a row, since other
    transactions see only the last row of a transaction.
    """
    change_keys = np.where(changes.operations == DELETE, changes.old_keys, changes.new_keys)
    if not changes.is_move.any() and _are_distinct(change_keys, len(has_row_before)):
        return _compute_versions_of_single_changes(changes, change_keys, commits, has_row_before)
    changes = _replace_lost_moves(changes, has_row_before)
    tenures = _find_tenures(changes, commits)
    last_changes, changes_by_column = _find_last_changes(changes, tenures)
    rows = _inherit(tenures, changes_by_column)
    keys, tenure_commits = tenures.keys, commits[tenures.event_changes[tenures.first_events]]
    has_row = ~tenures.is_ended & rows.mask_rows(has_row_before)
    final_tenures = (
        np.flatnonzero(np.append(_mask_new_numbers(keys)[1:] | _mask_new_numbers(tenure_commits)[1:], True))
        if len(keys)
        else _fill_none(0)
    )
    is_first = _mask_new_numbers(keys[final_tenures])
    end_commits = np.append(np.where(is_first[1:], NONE, tenure_commits[final_tenures][1:]), NONE)[
        : len(final_tenures)
    ]
    former_end_commits = _fill_none(len(has_row_before))
    former_end_commits[keys[final_tenures][is_first]] = tenure_commits[final_tenures][is_first]
    former_end_commits[~has_row_before] = NONE
    has_version = has_row[final_tenures]
    version_tenures = final_tenures[has_version]
    return RowVersions(
        keys=keys[version_tenures],
        last_changes=last_changes[version_tenures],
        base_keys=np.where(rows.origins[version_tenures] == _REPLICA, rows.base_keys[version_tenures], NONE),
        changes_by_column=rows.select_columns(version_tenures),
        begin_changes=rows.begin_changes[version_tenures],
        end_commits=end_commits[has_version],
        former_end_commits=former_end_commits,
    )


def _compute_versions_of_single_changes(
    changes: KeyChanges, change_keys: Numbers, commits: Numbers, has_row_before: Mask
) -> RowVersions:
    """Return the versions if no change is a move, and all changes have different keys.

    `change_keys` is the key of each change. The order of the changes does not matter here.
    """
    former_end_commits = _fill_none(len(has_row_before))
    former_end_commits[change_keys] = np.where(has_row_before[change_keys], commits, NONE)
    is_update = changes.operations == UPDATE
    last_changes = np.flatnonzero((changes.operations == INSERT) | (is_update & has_row_before[change_keys]))
    return RowVersions(
        keys=change_keys[last_changes],
        last_changes=last_changes,
        base_keys=np.where(is_update[last_changes], change_keys[last_changes], NONE),
        changes_by_column={
            name: np.where(is_sent[last_changes], last_changes, NONE)
            for name, is_sent in changes.is_sent_by_column.items()
        },
        begin_changes=np.where(is_update[last_changes], NONE, last_changes),
        end_commits=_fill_none(len(last_changes)),
        former_end_commits=former_end_commits,
    )


def insert_deletes(
    changes: KeyChanges, truncates: Sequence[int], key_count: int
) -> tuple[KeyChanges, Numbers]:
    """Replace each TRUNCATE by DELETEs of keys.

    `truncates` has the number of changes before each TRUNCATE, in order. The first TRUNCATE becomes DELETEs of all
    `key_count` keys. A later TRUNCATE becomes DELETEs of the keys of the changes since the previous TRUNCATE.

    Returns the changes with these DELETEs. For each of them it also returns the number of its origin. The origin of an
    inserted DELETE is its TRUNCATE, and the origin of any other change is the change itself. The numbers of TRUNCATEs
    follow the number of the last change.
    """
    positions, deleted, origins, start = list[Numbers](), list[Numbers](), list[Numbers](), 0
    for origin, end in enumerate(truncates, len(changes.operations)):
        deleted_keys = np.concatenate([changes.old_keys[start:end], changes.new_keys[start:end]])
        deleted_keys = np.unique(deleted_keys[deleted_keys != NONE]) if positions else np.arange(key_count)
        deleted.append(deleted_keys)
        positions.append(np.full(len(deleted_keys), end))
        origins.append(np.full(len(deleted_keys), origin))
        start = end
    if not positions:
        return changes, np.arange(len(changes.operations))
    indexes = np.concatenate(positions)
    expanded = KeyChanges(
        np.insert(changes.operations, indexes, DELETE),
        np.insert(changes.old_keys, indexes, np.concatenate(deleted)),
        np.insert(changes.new_keys, indexes, NONE),
        {name: np.insert(is_sent, indexes, False) for name, is_sent in changes.is_sent_by_column.items()},
    )
    return expanded, np.insert(np.arange(len(changes.operations)), indexes, np.concatenate(origins))


def _find_tenures(changes: KeyChanges, commits: Numbers | None = None) -> _Tenures:
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
        _mask_new_numbers(event_keys),
    )
    follows_end = np.zeros(len(event_keys), np.bool_)
    follows_end[1:] = is_end[:-1]
    begins_commit = _mask_new_numbers(commits[event_changes]) if commits is not None else False
    first_events = np.flatnonzero(is_first | is_begin | follows_end | begins_commit)
    origins = np.select([is_begin, is_first, follows_end], [event_kinds, _REPLICA, _NOTHING], _CONTINUED)
    origins = origins[first_events].astype(np.int64)
    last_events = np.append(first_events[1:], len(event_keys)) - 1 if len(first_events) else first_events
    keys, is_ended = event_keys[first_events], is_end[last_events]
    return _Tenures(
        event_keys,
        event_changes,
        event_kinds,
        first_events,
        last_events,
        origins,
        keys,
        is_first[first_events],
        is_ended,
    )


def _find_last_changes(changes: KeyChanges, tenures: _Tenures) -> tuple[Numbers, dict[str, Numbers]]:
    """Return the last change of each tenure that has the row's values, and the last change that sent each column."""
    if not len(tenures.first_events):
        return _fill_none(0), {name: _fill_none(0) for name in changes.is_sent_by_column}
    row_changes = np.where(_mask_ends(tenures.event_kinds), NONE, tenures.event_changes)
    last_changes = np.maximum.reduceat(row_changes, tenures.first_events)
    changes_by_column = {
        name: np.maximum.reduceat(
            np.where(is_sent[tenures.event_changes], row_changes, NONE), tenures.first_events
        )
        for name, is_sent in changes.is_sent_by_column.items()
    }
    return last_changes, changes_by_column


def _inherit(tenures: _Tenures, changes_by_column: Mapping[str, Numbers]) -> _TenureRows:
    """Follow the chains of moves, and let each tenure inherit from the tenures before it in its chain.

    `changes_by_column` has for each tenure the last change that sent each column.

    This is done by pointer doubling. At first a tenure points to the tenure before it, its parent. In each round,
    every tenure takes over the columns that its parent has so far, and then points to its parent's parent. So a chain
    of n moves takes log2(n) rounds. For example, a row moves from tenure a to b, c, d and e. After each round the
    tenures point to:

        round    b       c                 d                 e
        0        a       b                 c                 d
        1        done    a, having b's     b, having c's     c, having d's
        2                done              done              a, having d's, c's and b's
        3                                                    done
    """
    origins, changes_by_column = tenures.origins.copy(), dict(changes_by_column)
    base_keys = np.where(origins == _REPLICA, tenures.keys, NONE)
    begin_changes = np.where(origins == INSERT, tenures.event_changes[tenures.first_events], NONE)
    parents = np.where(origins == _CONTINUED, np.arange(len(origins)) - 1, NONE)
    if (is_arrival := origins == _ARRIVE).any():
        tenure_by_move = _fill_none(int(tenures.event_changes.max()) + 1)
        tenure_by_move[tenures.event_changes[tenures.last_events[tenures.is_left]]] = np.flatnonzero(
            tenures.is_left
        )
        parents[is_arrival] = tenure_by_move[tenures.event_changes[tenures.first_events[is_arrival]]]
    while len(children := np.flatnonzero(parents != NONE)):
        ancestors = parents[children]
        for name, change_indexes in changes_by_column.items():
            inherited = change_indexes.copy()
            inherited[children] = np.where(
                change_indexes[children] == NONE, change_indexes[ancestors], change_indexes[children]
            )
            changes_by_column[name] = inherited
        origins, base_keys, begin_changes, parents = (
            _take_from_parent(values, children, ancestors)
            for values in (origins, base_keys, begin_changes, parents)
        )
    return _TenureRows(origins, base_keys, begin_changes, changes_by_column)


def _take_from_parent(values: Numbers, children: Numbers, parents: Numbers) -> Numbers:
    result = values.copy()
    result[children] = values[parents]
    return result


def _find_conflict(tenures: _Tenures, rows: _TenureRows, has_row_before: Mask) -> int | None:
    """Return the first INSERT, or move to a key, that finds a row with its key; None if there is no such change."""
    if not len(tenures.keys):
        return None
    has_row = ~tenures.is_ended & rows.mask_rows(has_row_before)
    had_row = np.where(
        tenures.is_first, has_row_before[tenures.keys], np.concatenate([[False], has_row[:-1]])
    )
    conflicts = tenures.event_changes[
        tenures.first_events[_mask_begins(tenures.event_kinds[tenures.first_events]) & had_row]
    ]
    return int(conflicts.min()) if len(conflicts) else None


def _replace_lost_moves(changes: KeyChanges, has_row_before: Mask) -> KeyChanges:
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
    """Return the moves that find no row even if all moves before them find theirs.

    A move that finds no row brings none to its new key, so later moves may find no row either. If moves are given as LEAVE
    and INSERT, returns each such LEAVE. Take away its INSERT, and call this function again to find the later ones.
    """
    tenures = _find_tenures(changes)
    is_without_row = (tenures.origins == _NOTHING) | (
        (tenures.origins == _REPLICA) & ~has_row_before[tenures.keys]
    )
    return np.sort(tenures.event_changes[tenures.last_events[tenures.is_left & is_without_row]])


def _find_lost_moves(changes: KeyChanges, has_row_before: Mask) -> Numbers:
    """Return the moves that find no row, in a loop over all changes.

    Operations on whole columns cannot do this. A move that finds no row brings no row to its new key, and so a later
    move may find no row.
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


def _mask_new_numbers(numbers: Numbers) -> Mask:
    """Return the mask of the elements that differ from the element before them; the first element is masked, too."""
    is_new = np.ones(len(numbers), np.bool_)
    is_new[1:] = numbers[1:] != numbers[:-1]
    return is_new


def _find_first_indexes(keys: Numbers, count: int) -> Numbers:
    """Return the index of the first occurrence of each key in `keys`, or the length of `keys` if it does not occur.

    The keys are the numbers below `count`.
    """
    first_indexes = np.full(count, len(keys), np.int64)
    indexes = np.flatnonzero(keys != NONE)[::-1]
    # The indexes descend. If a key occurs several times, NumPy keeps the value that is assigned last: the first index.
    first_indexes[keys[indexes]] = indexes
    return first_indexes


def _are_distinct(keys: Numbers, count: int) -> bool:
    """Whether no key occurs twice. The keys are numbers below `count`."""
    occurs = np.zeros(count, np.bool_)
    occurs[keys] = True
    return int(np.count_nonzero(occurs)) == len(keys)


def _fill_none(count: int) -> Numbers:
    return np.full(count, NONE, np.int64)
