"""The net change: a table's changes in order in, the outcome for each key out, and the first conflict.

In: changes with numbers of keys (`KeyChanges`). Out: one element per key (`NetChange`). All data are
integers, so a few numpy operations on whole columns do the work. Raises nothing.

A key belongs to one row after another. The time during which a row has a key is a *tenure*. This example has
four changes of a replica with rows of the keys 1 and 2:

    change       UPDATE of 1   DELETE of 2   UPDATE of 1 to 2   INSERT of 1       net change
    sends        b                           c                  b and c

    key 1    ──────── b ──────────────────────── left              ┌─ b, c ──►    upsert: b and c as inserted
             the replica's row                    │                its own row
                                                  ▼
    key 2    ──────────────────── ended          arrived: c ──────────────────►   update: c as moved, b inherited,
             the replica's row                   the row of key 1                 the rest of the replica's row of
                                                                                  key 1, the tenure's `base`

An UPDATE that changes the key is a *move*: the row leaves its old key, then arrives at its new one. The
tenures of one row form a chain. A tenure has the columns that its changes sent, and inherits all others along
the chain, but nothing from earlier tenures of the same key. A move or a DELETE that finds no row does nothing
(PostgreSQL documentation, Logical Replication: Conflicts, update_missing and delete_missing).

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

#: The operations of changes. A move is two events, `_LEAVE` and `_ARRIVE`.
INSERT, UPDATE, DELETE = range(3)
_LEAVE, _ARRIVE = 3, 4
#: The origin of a tenure's row is `INSERT`, `_ARRIVE`, the replica, or nothing (changes of a missing row). If
#: tenures are split by commits, `_CONTINUED` refers to the tenure's previous part.
_REPLICA, _NOTHING, _CONTINUED = -1, -2, -3
#: No key, no change, no row.
NONE = -1
#: For sorting, a key and the place of an event form one integer; the place has this number of low bits.
_PLACE_BITS = 33


@dataclass(frozen=True)
class KeyChanges:
    """The changes of a table in order, with numbers of their keys (0, 1, …).

    - `operations` are `INSERT`, `UPDATE` and `DELETE`.
    - `old` is the key before a DELETE or a move, else `NONE`.
    - `new` is the key after an INSERT or an UPDATE, else `NONE`.
    - `sent` has, for each column that some change omitted as unchanged, the mask of the changes that sent it.
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
        """Mask the keys that need a row before the changes, and the keys whose row in the replica is relevant.

        The replica's row of a key is relevant if a move takes the row to another key. It is also relevant if a
        new row of the key begins before a row of the key ends, because these two rows conflict.
        """
        begun = _first_places(np.where((self.operations == INSERT) | self.is_move, self.new, NONE), keys)
        ended = _first_places(self.old, keys)
        kept = _first_places(np.where((self.operations == UPDATE) & ~self.is_move, self.new, NONE), keys)
        has_relevant_row = begun < ended
        has_relevant_row[self.old[self.is_move]] = True
        return np.minimum(ended, kept) < np.minimum(begun, len(self.operations)), has_relevant_row


@dataclass(frozen=True)
class NetChange:
    """The outcome for the keys of changes; each array has one element per key.

    - `upserted`: afterwards the key has a new row.
    - `updated`: afterwards the key has the replica's row of the key `base`, with changes. If the replica has
      no such row, the key has no row.
    - `expected`: the replica should have a row of this key before the changes.
    - `last` is the change that has the row.
    - `sent` is, for each column that some change omitted, the change that has the value, or `NONE` if only
      the replica's row of `base` has it.
    - `ended` is the change that ended the row, if ended rows are retained, else `NONE`. An ended row keeps its
      last values. A row of the replica has no `last` if its first change ended it.

    A key that is neither upserted nor updated has no row afterwards.
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
        """The mask of keys with a row afterwards, also one that ended and is retained."""
        has_row: Mask = self.upserted | self.updated
        return has_row

    def counts(self, before: Mask) -> dict[str, int]:
        """Count the rows that are inserted, updated, deleted or missing; `before` masks keys with rows.

        Rows that ended do not count as rows.
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
    """The tenures of all keys and the events of all tenures, both ordered by key and time.

    `key`, `place` (the index of the change) and `kind` have one element per event. `starts` and `last_event`
    have the indexes of each tenure's first and last event. `origin` has the origin of each tenure's row.
    """

    key: Numbers
    place: Numbers
    kind: npt.NDArray[np.int8]
    starts: Numbers
    last_event: Numbers
    origin: Numbers

    @property
    def keys(self) -> Numbers:
        """The key of each tenure."""
        return self.key[self.starts]

    @property
    def is_ended(self) -> Mask:
        """The mask of tenures that have ended."""
        return _is_end(self.kind[self.last_event])

    @property
    def is_left(self) -> Mask:
        """The mask of tenures that end with a move."""
        is_left: Mask = self.kind[self.last_event] == _LEAVE
        return is_left

    @property
    def is_first(self) -> Mask:
        """The mask of each key's first tenure."""
        return _is_new_key(self.keys)


def net_changes(
    changes: KeyChanges, present: Mask, *, retain_ended: bool = False
) -> tuple[NetChange, int | None]:
    """Return the outcome for each key, and the first change that conflicts with a row of its key, or None.

    `present` says for each key whether the replica has a row. If there is a conflict, the outcome is
    meaningless. With `retain_ended`, the last ended row of each key is retained; this needs `present` of all
    keys.
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

    There is a version for each key and commit after which the key has a row. Each array except `ends` has one
    element per version. `keys`, `last`, `sent` and `base` are as in `NetChange`. `until` is the number of the
    commit that ends the version, or `NONE`. `ends` has for each key the commit that ends its row from before
    the changes.
    """

    keys: Numbers
    last: Numbers
    base: Numbers
    sent: Mapping[str, Numbers]
    until: Numbers
    ends: Numbers


def row_versions(changes: KeyChanges, commits: Numbers, present: Mask) -> RowVersions:
    """Return the versions that changes without conflicts make.

    `commits` has for each change the number of its commit. A commit makes at most one version of a row: other
    transactions never see rows that the same commit replaces.
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
    chosen = final[has_version]
    return RowVersions(
        keys=keys[chosen],
        last=last[chosen],
        base=np.where(origin[chosen] == _REPLICA, base[chosen], NONE),
        sent={name: places[chosen] for name, places in sent.items()},
        until=until[has_version],
        ends=ends,
    )


def _versions_of_single_changes(
    changes: KeyChanges, key: Numbers, commits: Numbers, present: Mask
) -> RowVersions:
    """The versions if no change is a move, and none has the `key` of another: no changes need be put in order."""
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
    """Insert DELETEs for each TRUNCATE, and return the changes and the number of each change's origin.

    `truncates` has, in order, the number of changes before each TRUNCATE. The first TRUNCATE deletes all
    `keys` keys; a later one deletes the keys of the changes since the previous one. The origin of a DELETE is
    its TRUNCATE, of any other change the change itself; TRUNCATEs are numbered after the last change.
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
    """Return the tenures of all keys; `commits`, if given, has the commit of each change and splits them."""
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
    return _Tenures(key, place, kind, starts, last_event, origin)


def _last_changes(changes: KeyChanges, tenures: _Tenures) -> tuple[Numbers, dict[str, Numbers]]:
    """For each tenure, return the last change that has the row, and the last one that sent each column."""
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
    """Return the origin of each tenure's row, the key of the replica's row, and the changes with its columns.

    Pointer doubling follows chains of moves. In each round, every tenure takes over the columns that its
    parent has so far, and then points to its parent's parent. So a chain of n moves takes log2(n) rounds. For
    a row that moved from tenure a to b, c, d and e, each tenure points to:

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
    """The first INSERT or move to a key that has a row: a tenure begins before the previous one ends."""
    if not len(origin):
        return None
    has_row = ~tenures.is_ended & ((origin == INSERT) | ((origin == _REPLICA) & present[base]))
    had_row = np.where(tenures.is_first, present[tenures.keys], np.concatenate([[False], has_row[:-1]]))
    conflicts = tenures.place[tenures.starts[_is_begin(tenures.kind[tenures.starts]) & had_row]]
    return int(conflicts.min()) if len(conflicts) else None


def _replace_lost_moves(changes: KeyChanges, present: Mask) -> KeyChanges:
    """Replace each move that finds no row by a DELETE of its old key, which finds no row either."""
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

    A loop is needed because such a move brings no row to its new key, which a later change may need.
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
    """The mask of elements that differ from the previous one."""
    is_new_key = np.ones(len(key), np.bool_)
    is_new_key[1:] = key[1:] != key[:-1]
    return is_new_key


def _first_places(keys: Numbers, count: int) -> Numbers:
    """The first index of each key among `keys`, or the number of keys if there is none."""
    first = np.full(count, len(keys), np.int64)
    places = np.flatnonzero(keys != NONE)[::-1]
    # For equal indices NumPy keeps the last value.
    first[keys[places]] = places
    return first


def _nones(count: int) -> Numbers:
    return np.full(count, NONE, np.int64)
