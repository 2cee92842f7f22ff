"""The net change: a table's changes in their order in, the outcome for each key, and a conflict, out.

In: changes by the numbers of their keys (`KeyChanges`). Out: one element per key (`NetChange`). Everything is
an integer, so the same few operations over whole columns serve ten changes and ten million. Raises nothing.

A key belongs to one row after another. The time in which a row has a key is a *tenure*. Four changes, over a
replica that has rows of the keys 1 and 2:

    change       UPDATE of 1   DELETE of 2   UPDATE of 1 to 2   INSERT of 1       net change
    sends        b                           c                  b and c

    key 1    ──────── b ──────────────────────── left              ┌─ b, c ──►    upsert: b and c as inserted
             the replica's row                    │                its own row
                                                  ▼
    key 2    ──────────────────── ended          arrived: c ──────────────────►   update: c as moved, b inherited,
             the replica's row                   the row of key 1                 the rest of the replica's row of
                                                                                  key 1, the tenure's `base`

An UPDATE that changes the key is a *move*: the row leaves its old key, then arrives at its new one. The
tenures of one row form a chain. A tenure has the columns that its changes sent, and inherits the others along
the chain. It takes nothing from earlier tenures of the same key. A move that finds no row does nothing, like
a DELETE that finds none (PostgreSQL documentation, section 29.8, update_missing).

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

#: The effect of a change; an UPDATE that changes its key is two events, `_LEAVE` and `_ARRIVE`.
INSERT, UPDATE, DELETE = range(3)
_LEAVE, _ARRIVE = 3, 4
#: Other origins of a tenure's row than `INSERT` and `_ARRIVE`: the replica, or none (changes of a missing
#: row). If tenures are split by commits, `_CONTINUED` stands for the tenure's previous part.
_REPLICA, _NOTHING, _CONTINUED = -1, -2, -3
#: No key, no change, no row.
NONE = -1
#: A key and an event's place as one integer, for sorting.
_PLACE_BITS = 33


@dataclass(frozen=True)
class KeyChanges:
    """The changes of a table in their order, by numbers of their keys (0, 1, …).

    `operations` are `INSERT`, `UPDATE` and `DELETE`. `old` is the key before a DELETE or a move, else `NONE`.
    `new` is the key after an INSERT or an UPDATE, else `NONE`. `sent` has the columns that some change left
    out as unchanged, and which changes sent them.
    """

    operations: npt.NDArray[np.int8]
    old: Numbers
    new: Numbers
    sent: Mapping[str, Mask]

    @property
    def moves(self) -> Mask:
        """The mask of UPDATEs from one key to another."""
        moved: Mask = (self.operations == UPDATE) & (self.old != NONE)
        return moved

    def lookups(self, keys: int) -> tuple[Mask, Mask]:
        """The keys that must have a row before the changes, and those whose row in the replica matters.

        The replica's row of a key matters if a new row of the key begins before a row ends, because the two
        conflict, and if a move takes the row to another key.
        """
        begun = _first(np.where((self.operations == INSERT) | self.moves, self.new, NONE), keys)
        ended = _first(self.old, keys)
        stays = _first(np.where((self.operations == UPDATE) & ~self.moves, self.new, NONE), keys)
        matters = begun < ended
        matters[self.old[self.moves]] = True
        return np.minimum(ended, stays) < np.minimum(begun, len(self.operations)), matters


@dataclass(frozen=True)
class NetChange:
    """The outcome for the keys that changes have; each array has one element per key.

    Afterwards the key has a row, `upserted` or `updated`, or it has none. `upserted`: the row is new.
    `updated`: the row is the replica's row of the key `base`, changed; if the replica has no such row, the
    key has none. `last` is the change that has the row. For each column that some change left out, `sent` is
    the change that has the value, or `NONE` if only the replica's row of `base` has it. `expected`: the
    replica should have a row of this key before the changes.

    If ended rows are kept, `ended` is the change that ended the row, or `NONE` if the row lives; an ended row
    has its last values. A row of the replica that was ended without an earlier change has no `last`.
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
    def remains(self) -> Mask:
        """The keys that have a row afterwards, also an ended row that is kept."""
        remains: Mask = self.upserted | self.updated
        return remains

    def counts(self, before: Mask) -> dict[str, int]:
        """The numbers of living rows that come, change, go or are missing.

        `before` marks keys of living rows in the replica.
        """
        lives = (self.upserted | (self.updated & before[self.base])) & (self.ended == NONE)
        present = before[self.keys]
        counted = {
            "inserted": lives & ~present,
            "updated": lives & present,
            "deleted": ~lives & present,
            "missing": self.expected & ~present,
        }
        return {kind: int(np.count_nonzero(rows)) for kind, rows in counted.items()}


@dataclass(frozen=True)
class _Tenures:
    """The tenures of all keys, by key and time.

    `starts` and `ends_at` are places among the events in the same order.
    """

    key: Numbers
    place: Numbers
    kind: npt.NDArray[np.int8]
    starts: Numbers
    ends_at: Numbers
    origin: Numbers

    @property
    def keys(self) -> Numbers:
        """The key of each tenure."""
        return self.key[self.starts]

    @property
    def ended(self) -> Mask:
        """The mask of tenures that have ended."""
        return _ends(self.kind[self.ends_at])

    @property
    def left(self) -> Mask:
        """The mask of tenures that a move has ended."""
        left: Mask = self.kind[self.ends_at] == _LEAVE
        return left

    @property
    def is_first(self) -> Mask:
        """The mask of tenures that are the first of their key."""
        return _changes(self.keys)


def net_changes(changes: KeyChanges, present: Mask, *, keeps: bool = False) -> tuple[NetChange, int | None]:
    """The outcome for each key, and the first change that conflicts with a row of its key, None without one.

    `present` says for each key whether the replica has a row of it. After a conflict the net change is
    meaningless. With `keeps`, the last row of each key that ends stays; then `present` must be known for
    every key.
    """
    changes = _without_lost_moves(changes, present)
    tenures = _tenures(changes)
    last, sent = _written(changes, tenures)
    origin, base, sent = _inherited(tenures, sent)
    final = np.flatnonzero(np.append(tenures.is_first[1:], True)) if len(last) else _none(0)
    begins = np.flatnonzero(tenures.is_first)
    is_gone, ended = tenures.ended[final], _none(len(final))
    if keeps and len(final):
        has_row = (origin == INSERT) | ((origin == _REPLICA) & present[base])
        latest = np.maximum.reduceat(np.where(has_row, np.arange(len(origin)), NONE), begins)
        is_gone = latest == NONE
        final = np.where(is_gone, final, latest)
        ended = np.where(tenures.ended[final] & ~is_gone, tenures.place[tenures.ends_at[final]], NONE)
    net = NetChange(
        keys=tenures.keys[final],
        upserted=~is_gone & (origin[final] == INSERT),
        updated=~is_gone & (origin[final] == _REPLICA),
        expected=~_begins(tenures.kind[tenures.starts[begins]]),
        last=np.where(is_gone, NONE, last[final]),
        base=base[final],
        sent={name: places[final] for name, places in sent.items()},
        ended=ended,
    )
    return net, _conflict(tenures, origin, base, present)


@dataclass(frozen=True)
class RowVersions:
    """The versions of rows that changes make, and the ends of earlier versions.

    A version is made for each key and commit that leaves a row. Each array except `ends` has one element per
    version. `keys`, `last`, `sent` and `base` are as in `NetChange`. `until` is the number of the commit that
    ends the version, `NONE` for the present one. `ends` has for each key the commit that ends the row from
    before the changes.
    """

    keys: Numbers
    last: Numbers
    base: Numbers
    sent: Mapping[str, Numbers]
    until: Numbers
    ends: Numbers


def row_versions(changes: KeyChanges, commits: Numbers, present: Mask) -> RowVersions:
    """The versions that changes without conflicts make; `commits` has a number for each change, in order.

    A commit leaves one version of a row at most: no other transaction saw the rows that the same commit
    replaces.
    """
    changes = _without_lost_moves(changes, present)
    tenures = _tenures(changes, commits)
    last, sent = _written(changes, tenures)
    origin, base, sent = _inherited(tenures, sent)
    keys, of_commit = tenures.keys, commits[tenures.place[tenures.starts]]
    lives = ~tenures.ended & ((origin == INSERT) | ((origin == _REPLICA) & present[base]))
    final = (
        np.flatnonzero(np.append(_changes(keys)[1:] | _changes(of_commit)[1:], True))
        if len(keys)
        else _none(0)
    )
    is_first = _changes(keys[final])
    until = np.append(np.where(is_first[1:], NONE, of_commit[final][1:]), NONE)[: len(final)]
    ends = _none(len(present))
    ends[keys[final][is_first]] = of_commit[final][is_first]
    ends[~present] = NONE
    left = lives[final]
    chosen = final[left]
    return RowVersions(
        keys=keys[chosen],
        last=last[chosen],
        base=np.where(origin[chosen] == _REPLICA, base[chosen], NONE),
        sent={name: places[chosen] for name, places in sent.items()},
        until=until[left],
        ends=ends,
    )


def with_deletes(changes: KeyChanges, truncates: Sequence[int], keys: int) -> tuple[KeyChanges, Numbers]:
    """The changes with DELETEs in the place of each TRUNCATE, and the number of each change or TRUNCATE.

    `truncates` has for each TRUNCATE the number of changes before it, in order. The first TRUNCATE deletes
    all `keys` keys; a later one deletes the keys of the changes since the previous one. A DELETE has the
    number of its TRUNCATE; TRUNCATEs have the numbers after the last change's.
    """
    at, deleted, which, begin = list[Numbers](), list[Numbers](), list[Numbers](), 0
    for number, end in enumerate(truncates, len(changes.operations)):
        concerned = np.concatenate([changes.old[begin:end], changes.new[begin:end]])
        concerned = np.unique(concerned[concerned != NONE]) if at else np.arange(keys)
        deleted.append(concerned)
        at.append(np.full(len(concerned), end))
        which.append(np.full(len(concerned), number))
        begin = end
    if not at:
        return changes, np.arange(len(changes.operations))
    where = np.concatenate(at)
    with_deleted = KeyChanges(
        np.insert(changes.operations, where, DELETE),
        np.insert(changes.old, where, np.concatenate(deleted)),
        np.insert(changes.new, where, NONE),
        {name: np.insert(is_sent, where, False) for name, is_sent in changes.sent.items()},
    )
    return with_deleted, np.insert(np.arange(len(changes.operations)), where, np.concatenate(which))


def _tenures(changes: KeyChanges, commits: Numbers | None = None) -> _Tenures:
    """The tenures of all keys.

    If `commits` has the number of each change's commit, tenures are split by commits.
    """
    move = changes.moves
    stays, goes = np.flatnonzero(~move), np.flatnonzero(move)
    key = np.where(changes.operations[stays] == DELETE, changes.old[stays], changes.new[stays])
    key = np.concatenate([key, changes.old[goes], changes.new[goes]])
    at = np.concatenate([2 * stays, 2 * goes, 2 * goes + 1])
    packed = np.sort(key << _PLACE_BITS | at)
    key, at = packed >> _PLACE_BITS, packed & ((1 << _PLACE_BITS) - 1)
    place = at >> 1
    kind = np.where(move[place], _LEAVE + (at & 1), changes.operations[place]).astype(np.int8)
    begins, ends, is_first = _begins(kind), _ends(kind), _changes(key)
    after_end = np.zeros(len(key), np.bool_)
    after_end[1:] = ends[:-1]
    parted = _changes(commits[place]) if commits is not None else False
    starts = np.flatnonzero(is_first | begins | after_end | parted)
    origin = np.select([begins, is_first, after_end], [kind, _REPLICA, _NOTHING], _CONTINUED)
    origin = origin[starts].astype(np.int64)
    ends_at = np.append(starts[1:], len(key)) - 1 if len(starts) else starts
    return _Tenures(key, place, kind, starts, ends_at, origin)


def _written(changes: KeyChanges, tenures: _Tenures) -> tuple[Numbers, dict[str, Numbers]]:
    """For each tenure the last change that has the row, and the last one with each column of `sent`."""
    if not len(tenures.starts):
        return _none(0), {name: _none(0) for name in changes.sent}
    writes = np.where(_ends(tenures.kind), NONE, tenures.place)
    last = np.maximum.reduceat(writes, tenures.starts)
    sent = {
        name: np.maximum.reduceat(np.where(is_sent[tenures.place], writes, NONE), tenures.starts)
        for name, is_sent in changes.sent.items()
    }
    return last, sent


def _inherited(tenures: _Tenures, sent: Mapping[str, Numbers]) -> tuple[Numbers, Numbers, dict[str, Numbers]]:
    """The origin of each tenure's row, the key of the replica's row, and the changes with its columns.

    Chains of moves are followed by pointer doubling. In each round every tenure takes over its parent's
    present columns, and then points to the parent of its parent. So a chain of n moves takes log2(n) rounds.
    A row that moved from tenure a to b, c, d and e, and where each tenure points:

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
        by_move = _none(int(tenures.place.max()) + 1)
        by_move[tenures.place[tenures.ends_at[tenures.left]]] = np.flatnonzero(tenures.left)
        parent[arrived] = by_move[tenures.place[tenures.starts[arrived]]]
    while len(child := np.flatnonzero(parent != NONE)):
        above = parent[child]
        for name, places in sent.items():
            inherited = places.copy()
            inherited[child] = np.where(places[child] == NONE, places[above], places[child])
            sent[name] = inherited
        origin, base, parent = (_taken_over(values, child, above) for values in (origin, base, parent))
    return origin, base, sent


def _taken_over(values: Numbers, child: Numbers, above: Numbers) -> Numbers:
    taken = values.copy()
    taken[child] = values[above]
    return taken


def _conflict(tenures: _Tenures, origin: Numbers, base: Numbers, present: Mask) -> int | None:
    """The first INSERT or move that meets a row: a tenure begins while the previous one has its row."""
    if not len(origin):
        return None
    has_row = ~tenures.ended & ((origin == INSERT) | ((origin == _REPLICA) & present[base]))
    before = np.where(tenures.is_first, present[tenures.keys], np.concatenate([[False], has_row[:-1]]))
    met = tenures.place[tenures.starts[_begins(tenures.kind[tenures.starts]) & before]]
    return int(met.min()) if len(met) else None


def _without_lost_moves(changes: KeyChanges, present: Mask) -> KeyChanges:
    """The changes, with a DELETE of the old key in place of each move that finds no row.

    Such a DELETE finds no row either.
    """
    if not changes.moves.any():
        return changes
    tenures = _tenures(changes)
    lacks = (tenures.origin == _NOTHING) | ((tenures.origin == _REPLICA) & ~present[tenures.keys])
    if not (tenures.left & lacks).any():
        return changes
    lost = _lost_moves(changes, present)
    operations, new = changes.operations.copy(), changes.new.copy()
    operations[lost], new[lost] = DELETE, NONE
    return replace(changes, operations=operations, new=new)


def _lost_moves(changes: KeyChanges, present: Mask) -> Numbers:
    """The moves that find no row.

    Such a move leaves no row for a later one, so the changes are followed one by one.
    """
    exists, lost = bytearray(present.tobytes()), list[int]()
    begun_or_ended = np.flatnonzero((changes.operations != UPDATE) | changes.moves)
    old, new = changes.old[begun_or_ended].tolist(), changes.new[begun_or_ended].tolist()
    for change, left, begun in zip(begun_or_ended.tolist(), old, new, strict=True):
        if left != NONE:
            is_there = exists[left]
            exists[left] = 0
            if not is_there:
                if begun != NONE:
                    lost.append(change)
                continue
        if begun != NONE:
            exists[begun] = 1
    return np.array(lost, np.int64)


def _begins(kind: npt.NDArray[np.int8]) -> Mask:
    begins: Mask = (kind == INSERT) | (kind == _ARRIVE)
    return begins


def _ends(kind: npt.NDArray[np.int8]) -> Mask:
    ends: Mask = (kind == DELETE) | (kind == _LEAVE)
    return ends


def _changes(key: Numbers) -> Mask:
    """The mask of places at which another key begins."""
    begins = np.ones(len(key), np.bool_)
    begins[1:] = key[1:] != key[:-1]
    return begins


def _first(keys: Numbers, count: int) -> Numbers:
    """The first place of each key; for a key without a place the number of places."""
    first = np.full(count, len(keys), np.int64)
    places = np.flatnonzero(keys != NONE)[::-1]
    # For equal indices NumPy keeps the last value.
    first[keys[places]] = places
    return first


def _none(count: int) -> Numbers:
    return np.full(count, NONE, np.int64)
