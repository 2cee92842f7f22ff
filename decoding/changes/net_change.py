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
                                                                                  key 1, the tenure's `base`

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

#: The operations of changes. A change is one event, but a move is two events: `_LEAVE` and `_ARRIVE`.
INSERT, UPDATE, DELETE = range(3)
_LEAVE, _ARRIVE = 3, 4
#: Where the row of a tenure comes from: an INSERT (`INSERT`), a move (`_ARRIVE`), the replica (`_REPLICA`), or nowhere,
#: because the changes found no row (`_NOTHING`). If tenures are split by commits, `_CONTINUED` means that the row comes
#: from the previous part of the tenure.
_REPLICA, _NOTHING, _CONTINUED = -1, -2, -3
#: Stands for "no key", "no change" and "no row" in arrays of numbers.
NONE = -1
#: Events are sorted as integers: the high bits are the key, and this number of low bits is the place of the event.
_PLACE_BITS = 33


@dataclass(frozen=True)
class KeyChanges:
    """The changes of a table in order, with numbers of their keys (0, 1, …).

    - `operations` are `INSERT`, `UPDATE` and `DELETE`.
    - `old` is the key before a DELETE or a move, and `NONE` for other changes.
    - `new` is the key after an INSERT or an UPDATE, and `NONE` for other changes.
    - `sent` has the columns that some change did not send, because their TOASTed value did not change. It maps such a
      column to the mask of the changes that sent it.
    """

    operations: npt.NDArray[np.int8]
    old: Numbers
    new: Numbers
    sent: Mapping[str, Mask]

    @property
    def is_move(self) -> Mask:
        """The mask of UPDATEs from one key to another."""
        is_move: Mask = (self.operations == UPDATE) & (self.old != NONE)
        return is_move

    def lookup_masks(self, keys: int) -> tuple[Mask, Mask]:
        """Return two masks of keys, which say for which keys the caller must look into the replica.

        The first mask has the keys that need a row before the changes: their first change is an UPDATE or a DELETE. The
        second mask has the keys for which it matters whether the replica has a row. These are the keys that a row leaves
        by a move. They are also the keys that get a new row before a row of the key ends, because the new row conflicts
        with a row of the replica.
        """
        first_begins = _first_places(
            np.where((self.operations == INSERT) | self.is_move, self.new, NONE), keys
        )
        first_ends = _first_places(self.old, keys)
        first_updates = _first_places(
            np.where((self.operations == UPDATE) & ~self.is_move, self.new, NONE), keys
        )
        has_relevant_row = first_begins < first_ends
        has_relevant_row[self.old[self.is_move]] = True
        return np.minimum(first_ends, first_updates) < np.minimum(
            first_begins, len(self.operations)
        ), has_relevant_row


@dataclass(frozen=True)
class NetChange:
    """The outcome of changes for their keys; each array has one element per key.

    - `upserted`: after the changes, the key has a new row.
    - `updated`: after the changes, the key has the replica's row with the key `base`, which was updated. If the replica
      has no such row, the key has no row.
    - `expected`: the replica should have a row with this key before the changes.
    - `last` is the last change that has the row's values.
    - `sent` has the columns that some change did not send. It maps such a column to the change that has the column's
      value, or to `NONE` if only the replica's row with the key `base` has it.
    - `ended` is the change that ended the row, if the replica retains ended rows, otherwise `NONE`. An ended row keeps
      its last values. If the first change of a replica's row ended it, `last` is `NONE`.

    A key that is neither upserted nor updated has no row after the changes.
    """

    keys: Numbers
    upserted: Mask
    updated: Mask
    expected: Mask
    last: Numbers
    base: Numbers
    sent: Mapping[str, Numbers]
    ended: Numbers

    @property
    def has_row(self) -> Mask:
        """The mask of the keys with a row after the changes; ended rows that the replica retains count as rows."""
        has_row: Mask = self.upserted | self.updated
        return has_row

    def counts(self, before: Mask) -> dict[str, int]:
        """Count the rows that the changes insert, update and delete, and the rows that they do not find.

        `before` is the mask of the keys with a row in the replica. Ended rows do not count as rows.
        """
        has_living_row = (self.upserted | (self.updated & before[self.base])) & (self.ended == NONE)
        had_row = before[self.keys]
        masks = {
            "inserted": has_living_row & ~had_row,
            "updated": has_living_row & had_row,
            "deleted": ~has_living_row & had_row,
            "missing": self.expected & ~had_row,
        }
        return {kind: int(np.count_nonzero(rows)) for kind, rows in masks.items()}


@dataclass(frozen=True)
class _Tenures:
    """The tenures of all keys and their events. Both are ordered by key, then by time.

    - `key`, `place` and `kind` have one element per event. `place` is the index of the change.
    - `starts` and `last_event` have one element per tenure: the indexes of its first and its last event.
    - `origin` says for each tenure where its row comes from.
    - `keys` has the key of each tenure. The mask `is_first` has the tenures that are the first tenure of their key, and
      the mask `is_ended` has the tenures that end within the changes.
    """

    key: Numbers
    place: Numbers
    kind: npt.NDArray[np.int8]
    starts: Numbers
    last_event: Numbers
    origin: Numbers
    keys: Numbers
    is_first: Mask
    is_ended: Mask

    @property
    def is_left(self) -> Mask:
        """The mask of the tenures that end because the row moves to another key."""
        is_left: Mask = self.kind[self.last_event] == _LEAVE
        return is_left


def net_changes(
    changes: KeyChanges, present: Mask, *, retain_ended: bool = False
) -> tuple[NetChange, int | None]:
    """Return the outcome for each key, and the first change that conflicts with a row of its key, or None.

    `present` says for each key whether the replica has a row. If there is a conflict, the outcome has no meaning. With
    `retain_ended`, a key without a row after the changes keeps its last ended row. In that case `present` must be
    right for all keys.
    """
    changes = _replace_lost_moves(changes, present)
    tenures = _tenures(changes)
    last, sent = _last_changes(changes, tenures)
    origin, base, sent = _inherit(tenures, sent)
    final = np.flatnonzero(np.append(tenures.is_first[1:], True)) if len(last) else _nones(0)
    firsts = np.flatnonzero(tenures.is_first)
    is_gone, ended = tenures.is_ended[final], _nones(len(final))
    if retain_ended and len(final):
        has_row = (origin == INSERT) | ((origin == _REPLICA) & present[base])
        latest = np.maximum.reduceat(np.where(has_row, np.arange(len(origin)), NONE), firsts)
        is_gone = latest == NONE
        final = np.where(is_gone, final, latest)
        ended = np.where(tenures.is_ended[final] & ~is_gone, tenures.place[tenures.last_event[final]], NONE)
    net = NetChange(
        keys=tenures.keys[final],
        upserted=~is_gone & (origin[final] == INSERT),
        updated=~is_gone & (origin[final] == _REPLICA),
        expected=~_is_begin(tenures.kind[tenures.starts[firsts]]),
        last=np.where(is_gone, NONE, last[final]),
        base=base[final],
        sent={name: places[final] for name, places in sent.items()},
        ended=ended,
    )
    return net, _conflict(tenures, origin, base, present)


@dataclass(frozen=True)
class RowVersions:
    """The versions of rows that changes make, and the ends of earlier versions.

    A commit makes a version of each key that it changes and that has a row after the commit. `keys`, `last`, `sent`,
    `base` and `until` have one element per version.

    - `keys`, `last`, `sent` and `base` have the same meaning as in `NetChange`.
    - `until` is the number of the commit that ends the version, or `NONE` if no commit ends it.
    - `ends` has one element per key: the commit that ends the row that the key had before the changes, or `NONE`.
    """

    keys: Numbers
    last: Numbers
    base: Numbers
    sent: Mapping[str, Numbers]
    until: Numbers
    ends: Numbers


def row_versions(changes: KeyChanges, commits: Numbers, present: Mask) -> RowVersions:
    """Return the versions that changes make; the changes must have no conflict.

    `commits` has the number of each change's commit. A commit makes at most one version of a row. Other transactions
    never see a row that the same transaction has replaced.
    """
    key = np.where(changes.operations == DELETE, changes.old, changes.new)
    if not changes.is_move.any() and np.bincount(key).max(initial=0) <= 1:
        return _versions_of_single_changes(changes, key, commits, present)
    changes = _replace_lost_moves(changes, present)
    tenures = _tenures(changes, commits)
    last, sent = _last_changes(changes, tenures)
    origin, base, sent = _inherit(tenures, sent)
    keys, tenure_commits = tenures.keys, commits[tenures.place[tenures.starts]]
    has_row = ~tenures.is_ended & ((origin == INSERT) | ((origin == _REPLICA) & present[base]))
    final = (
        np.flatnonzero(np.append(_is_new_key(keys)[1:] | _is_new_key(tenure_commits)[1:], True))
        if len(keys)
        else _nones(0)
    )
    is_first = _is_new_key(keys[final])
    until = np.append(np.where(is_first[1:], NONE, tenure_commits[final][1:]), NONE)[: len(final)]
    ends = _nones(len(present))
    ends[keys[final][is_first]] = tenure_commits[final][is_first]
    ends[~present] = NONE
    has_version = has_row[final]
    version_indexes = final[has_version]
    return RowVersions(
        keys=keys[version_indexes],
        last=last[version_indexes],
        base=np.where(origin[version_indexes] == _REPLICA, base[version_indexes], NONE),
        sent={name: places[version_indexes] for name, places in sent.items()},
        until=until[has_version],
        ends=ends,
    )


def _versions_of_single_changes(
    changes: KeyChanges, key: Numbers, commits: Numbers, present: Mask
) -> RowVersions:
    """Return the versions if no change is a move, and all changes have different keys.

    `key` is the key of each change. In this case there is no order of changes to consider.
    """
    ends = _nones(len(present))
    ends[key] = np.where(present[key], commits, NONE)
    is_update = changes.operations == UPDATE
    last = np.flatnonzero((changes.operations == INSERT) | (is_update & present[key]))
    return RowVersions(
        keys=key[last],
        last=last,
        base=np.where(is_update[last], key[last], NONE),
        sent={name: np.where(is_sent[last], last, NONE) for name, is_sent in changes.sent.items()},
        until=_nones(len(last)),
        ends=ends,
    )


def insert_deletes(changes: KeyChanges, truncates: Sequence[int], keys: int) -> tuple[KeyChanges, Numbers]:
    """Replace each TRUNCATE by DELETEs of keys.

    `truncates` has the number of changes before each TRUNCATE, in order. The first TRUNCATE becomes DELETEs of all
    `keys` keys. A later TRUNCATE becomes DELETEs of the keys of the changes since the previous TRUNCATE.

    Returns the changes with these DELETEs, and the number of each change's origin. The origin of an inserted DELETE is
    its TRUNCATE, and the origin of any other change is the change itself. The numbers of TRUNCATEs follow the number of
    the last change.
    """
    positions, deleted, origins, start = list[Numbers](), list[Numbers](), list[Numbers](), 0
    for number, end in enumerate(truncates, len(changes.operations)):
        deleted_keys = np.concatenate([changes.old[start:end], changes.new[start:end]])
        deleted_keys = np.unique(deleted_keys[deleted_keys != NONE]) if positions else np.arange(keys)
        deleted.append(deleted_keys)
        positions.append(np.full(len(deleted_keys), end))
        origins.append(np.full(len(deleted_keys), number))
        start = end
    if not positions:
        return changes, np.arange(len(changes.operations))
    indexes = np.concatenate(positions)
    expanded = KeyChanges(
        np.insert(changes.operations, indexes, DELETE),
        np.insert(changes.old, indexes, np.concatenate(deleted)),
        np.insert(changes.new, indexes, NONE),
        {name: np.insert(is_sent, indexes, False) for name, is_sent in changes.sent.items()},
    )
    return expanded, np.insert(np.arange(len(changes.operations)), indexes, np.concatenate(origins))


def _tenures(changes: KeyChanges, commits: Numbers | None = None) -> _Tenures:
    """Return the tenures of all keys.

    If `commits` is given, it has the commit of each change, and each commit begins a new part of a tenure.
    """
    is_move = changes.is_move
    row_changes, moves = np.flatnonzero(~is_move), np.flatnonzero(is_move)
    key = np.where(
        changes.operations[row_changes] == DELETE, changes.old[row_changes], changes.new[row_changes]
    )
    key = np.concatenate([key, changes.old[moves], changes.new[moves]])
    event_place = np.concatenate([2 * row_changes, 2 * moves, 2 * moves + 1])
    events = np.sort(key << _PLACE_BITS | event_place)
    key, event_place = events >> _PLACE_BITS, events & ((1 << _PLACE_BITS) - 1)
    place = event_place >> 1
    kind = np.where(is_move[place], _LEAVE + (event_place & 1), changes.operations[place]).astype(np.int8)
    begins, ends, is_first = _is_begin(kind), _is_end(kind), _is_new_key(key)
    after_end = np.zeros(len(key), np.bool_)
    after_end[1:] = ends[:-1]
    begins_commit = _is_new_key(commits[place]) if commits is not None else False
    starts = np.flatnonzero(is_first | begins | after_end | begins_commit)
    origin = np.select([begins, is_first, after_end], [kind, _REPLICA, _NOTHING], _CONTINUED)
    origin = origin[starts].astype(np.int64)
    last_event = np.append(starts[1:], len(key)) - 1 if len(starts) else starts
    keys, is_ended = key[starts], ends[last_event]
    return _Tenures(key, place, kind, starts, last_event, origin, keys, is_first[starts], is_ended)


def _last_changes(changes: KeyChanges, tenures: _Tenures) -> tuple[Numbers, dict[str, Numbers]]:
    """Return the last change of each tenure that has the row's values, and the last change that sent each column."""
    if not len(tenures.starts):
        return _nones(0), {name: _nones(0) for name in changes.sent}
    writes = np.where(_is_end(tenures.kind), NONE, tenures.place)
    last = np.maximum.reduceat(writes, tenures.starts)
    sent = {
        name: np.maximum.reduceat(np.where(is_sent[tenures.place], writes, NONE), tenures.starts)
        for name, is_sent in changes.sent.items()
    }
    return last, sent


def _inherit(tenures: _Tenures, sent: Mapping[str, Numbers]) -> tuple[Numbers, Numbers, dict[str, Numbers]]:
    """Follow the chains of moves, and let each tenure inherit from the tenures before it in its chain.

    Returns for each tenure where its row comes from, the key of the replica's row that the chain begins with, and the
    changes that have the values of the columns.

    This is done by pointer doubling. In each round, every tenure takes over the columns that its parent has so far, and
    then points to its parent's parent. So a chain of n moves takes log2(n) rounds. For example, a row moves from tenure
    a to b, c, d and e. After each round the tenures point to:

        round    b       c                 d                 e
        0        a       b                 c                 d
        1        done    a, having b's     b, having c's     c, having d's
        2                done              done              a, having d's, c's and b's
        3                                                    done
    """
    origin, sent = tenures.origin.copy(), dict(sent)
    base = np.where(origin == _REPLICA, tenures.keys, NONE)
    parent = np.where(origin == _CONTINUED, np.arange(len(origin)) - 1, NONE)
    if (arrived := origin == _ARRIVE).any():
        by_move = _nones(int(tenures.place.max()) + 1)
        by_move[tenures.place[tenures.last_event[tenures.is_left]]] = np.flatnonzero(tenures.is_left)
        parent[arrived] = by_move[tenures.place[tenures.starts[arrived]]]
    while len(child := np.flatnonzero(parent != NONE)):
        ancestor = parent[child]
        for name, places in sent.items():
            inherited = places.copy()
            inherited[child] = np.where(places[child] == NONE, places[ancestor], places[child])
            sent[name] = inherited
        origin, base, parent = (
            _take_from_parent(values, child, ancestor) for values in (origin, base, parent)
        )
    return origin, base, sent


def _take_from_parent(values: Numbers, child: Numbers, parent: Numbers) -> Numbers:
    result = values.copy()
    result[child] = values[parent]
    return result


def _conflict(tenures: _Tenures, origin: Numbers, base: Numbers, present: Mask) -> int | None:
    """Return the first INSERT, or move to a key, that finds a row with its key; None if there is no such change."""
    if not len(origin):
        return None
    has_row = ~tenures.is_ended & ((origin == INSERT) | ((origin == _REPLICA) & present[base]))
    had_row = np.where(tenures.is_first, present[tenures.keys], np.concatenate([[False], has_row[:-1]]))
    conflicts = tenures.place[tenures.starts[_is_begin(tenures.kind[tenures.starts]) & had_row]]
    return int(conflicts.min()) if len(conflicts) else None


def _replace_lost_moves(changes: KeyChanges, present: Mask) -> KeyChanges:
    """Replace each move that finds no row by a DELETE of its old key. The DELETE finds no row either, so it does nothing."""
    if not changes.is_move.any():
        return changes
    tenures = _tenures(changes)
    lacks_row = (tenures.origin == _NOTHING) | ((tenures.origin == _REPLICA) & ~present[tenures.keys])
    if not (tenures.is_left & lacks_row).any():
        return changes
    lost_moves = _lost_moves(changes, present)
    operations, new = changes.operations.copy(), changes.new.copy()
    operations[lost_moves], new[lost_moves] = DELETE, NONE
    return replace(changes, operations=operations, new=new)


def _lost_moves(changes: KeyChanges, present: Mask) -> Numbers:
    """Return the moves that find no row, in a loop over all changes.

    Operations on whole columns cannot do this. A move that finds no row brings no row to its new key, and so a later
    move may find no row.
    """
    has_row, lost_moves = bytearray(present.tobytes()), list[int]()
    begun_or_ended = np.flatnonzero((changes.operations != UPDATE) | changes.is_move)
    old, new = changes.old[begun_or_ended].tolist(), changes.new[begun_or_ended].tolist()
    for change, old_key, new_key in zip(begun_or_ended.tolist(), old, new, strict=True):
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


def _is_begin(kind: npt.NDArray[np.int8]) -> Mask:
    is_begin: Mask = (kind == INSERT) | (kind == _ARRIVE)
    return is_begin


def _is_end(kind: npt.NDArray[np.int8]) -> Mask:
    is_end: Mask = (kind == DELETE) | (kind == _LEAVE)
    return is_end


def _is_new_key(key: Numbers) -> Mask:
    """Return the mask of the elements that differ from the element before them; the first element is masked, too."""
    is_new_key = np.ones(len(key), np.bool_)
    is_new_key[1:] = key[1:] != key[:-1]
    return is_new_key


def _first_places(keys: Numbers, count: int) -> Numbers:
    """Return the index of the first occurrence of each key in `keys`, or the length of `keys` if it does not occur.

    The keys are the numbers below `count`.
    """
    first = np.full(count, len(keys), np.int64)
    places = np.flatnonzero(keys != NONE)[::-1]
    # The places descend. If a key occurs several times, NumPy keeps the value that is assigned last: the first place.
    first[keys[places]] = places
    return first


def _nones(count: int) -> Numbers:
    return np.full(count, NONE, np.int64)
