"""The changes of a batch by their keys: files of the change history -> `KeyedChanges`.

In: Parquet files; only keys, operations and places are read of them. Out: the changes in their order, in the
form of `net_change`. All reductions work on whole columns, so Python runs nothing per change. Raises Arrow's
errors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import COMMIT_TIME, ROW_OPERATIONS, field_of
from pgsieve.decoding.changes.keys import key_numbers
from pgsieve.decoding.changes.metadata_columns import Metadata, Stamp, metadata_schema, truncated_metadata
from pgsieve.decoding.changes.net_change import (
    DELETE,
    INSERT,
    NONE,
    UPDATE,
    KeyChanges,
    Mask,
    NetChange,
    Numbers,
    net_changes,
    with_deletes,
)
from pgsieve.resources.lake.delta.conforming import conformed
from pgsieve.resources.lake.stores.store import Store

#: An operation's place is its number in `net_change`.
_OPERATIONS = pa.array(ROW_OPERATIONS)
#: The columns that are read of a change, besides its rows and its unchanged columns.
PLACED = ("slice", "number", "commit_lsn", "ordinal", "operation")
_IN_ORDER = [("commit_lsn", "ascending"), ("ordinal", "ascending")]
#: How many bits of a change's place are its number in the slice; the bits above are the slice's number in the batch.
_TURN = 56


@dataclass(frozen=True)
class KeyConflict:
    """A change that meets a row of its key.

    It is an INSERT or an UPDATE. `key` is its key (a row), `commit_lsn` its commit, and `first_lsn` the commit of
    the batch's first change.
    """

    inserts: bool
    key: pa.Table
    commit_lsn: int
    first_lsn: int


@dataclass(frozen=True)
class KeyedChanges:
    """The row changes of a batch in their order; each key has a number.

    `keys` has the key of each number. `places` are the places of the changes, `commit_lsns` their commits.
    `truncates` has for each TRUNCATE the number of changes before it, in order, `truncated` its commit.

    Where ended rows are kept, `ended` has the metadata of a row that the change ends, one row per change. Then a
    TRUNCATE is a DELETE of each key that may have a row, and `emptied` is the metadata of all other rows of the
    replica.
    """

    keys: pa.Table
    changes: KeyChanges
    places: Numbers
    commit_lsns: Numbers
    truncates: Sequence[int] = ()
    truncated: Sequence[int] = ()
    ended: pa.Table | None = None
    emptied: pa.Table | None = None

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        every, rows = self.changes, [self.keys, *([] if self.ended is None else [self.ended])]
        numbers = sum(each.nbytes for each in (self.places, self.commit_lsns, every.old, every.new))
        masks = every.operations.nbytes + sum(is_sent.nbytes for is_sent in every.sent.values())
        return sum(int(each.nbytes) for each in rows) + numbers + masks

    @cached_property
    def lookups(self) -> tuple[Mask, Mask]:
        """Masks of the keys that the changes expect in the replica, and of the keys for which a row there matters."""
        return self.changes.lookups(self.keys.num_rows)

    @property
    def effective(self) -> int:
        """How many changes come before the last TRUNCATE: none of their rows is left."""
        return self.truncates[-1] if self.truncates else 0

    @property
    def since_truncate(self) -> KeyChanges:
        """The effective changes."""
        return self._part(self.effective, len(self.places))

    def _part(self, begin: int, end: int) -> KeyChanges:
        every, part = self.changes, slice(begin, end)
        sent = {name: is_sent[part] for name, is_sent in every.sent.items()}
        return KeyChanges(every.operations[part], every.old[part], every.new[part], sent)

    def present(self, lookup: Callable[[pa.Table], Numbers]) -> Mask:
        """Whether the replica has a row of each key that matters; one element more, for no key.

        `lookup` gets a table of keys, and returns the numbers of the keys that the replica has.
        """
        expected, matters = self.lookups
        wanted = np.flatnonzero(matters if self.ended is None else matters | expected)
        present = np.zeros(self.keys.num_rows + 1, np.bool_)
        if len(wanted):
            present[wanted[lookup(self.keys.take(pa.array(wanted)))]] = True
        return present

    def ended_metadata(self, ended: Numbers, stamp: Stamp) -> pa.Table:
        """The metadata of rows by the changes that end them (NONE: NULL); no columns if ended rows are not kept."""
        if self.ended is None:
            return pa.table({})
        return stamp.of(self.ended.take(pa.array(ended, mask=ended == NONE)))

    def _conflict(self, change: int) -> KeyConflict:
        key = self.keys.take(pa.array(self.changes.new[change : change + 1]))
        lsns, inserts = self.commit_lsns, bool(self.changes.operations[change] == INSERT)
        return KeyConflict(inserts, key, int(lsns[change]), int(lsns[0]))

    def net(self, present: Mask) -> tuple[NetChange, KeyConflict | None]:
        """The outcome for each key, and the first conflict.

        Only the changes after the last TRUNCATE are effective; places count from the first of them. `present` says for
        each key whether the replica had a row of it before.
        """
        conflict: KeyConflict | None = None
        for begin, end in zip((0, *self.truncates), (*self.truncates, len(self.places)), strict=True):
            net, conflicting = net_changes(self._part(begin, end), present, keeps=self.ended is not None)
            if conflict is None and conflicting is not None:
                conflict = self._conflict(begin + conflicting)
            present = np.zeros_like(present)
        return net, conflict


def places_of(changes: pa.Table, slices: Sequence[int]) -> Numbers:
    """The places of changes in some slices, ascending in the order of the changes; -1 for changes of other slices."""
    # A TRUNCATE has no number, and must not have the place of a change.
    slice_of, number = np.asarray(changes["slice"]), np.asarray(changes["number"].fill_null((1 << _TURN) - 1))
    places = np.full(len(slice_of), -1, np.int64)
    for turn, end in enumerate(slices):
        places = np.where(slice_of == end, (turn << _TURN) + number, places)
    return places


@dataclass(frozen=True)
class _Part:
    """The changes of a file.

    `keys` are the keys of the INSERTs, UPDATEs and DELETEs. `moves` are the UPDATEs that sent an old key, `moved` the
    old keys.
    """

    places: Numbers
    commit_lsns: Numbers
    ordinals: Numbers
    operations: npt.NDArray[np.int8]
    keys: pa.Table
    moves: Numbers
    moved: pa.Table
    sent: Sequence[Mask]
    ended: pa.Table
    truncates: pa.Table

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        numbers = sum(each.nbytes for each in (self.places, self.commit_lsns, self.ordinals))
        masks = self.operations.nbytes + sum(mask.nbytes for mask in self.sent)
        return sum(int(rows.nbytes) for rows in (self.keys, self.moved, self.ended)) + numbers + masks


def stored_changes(
    store: Store, files: Iterable[str], keys: pa.Schema, unsent: Sequence[str], kept: Metadata = ()
) -> Iterator[pa.Table]:
    """The columns of a change history's files that `keyed_changes` needs; the others may be large."""
    read = [*PLACED, *(f"{side}.{name}" for side in ("new", "old") for name in keys.names)]
    read += ["commit_time", *(f"old.{name}" for name, _ in kept)] if kept else []
    return (store.columns(file, [*read, "unchanged"] if unsent else read) for file in files)


def keyed_changes(
    changes: Iterable[pa.Table],
    keys: pa.Schema,
    unsent: Sequence[str],
    slices: Sequence[int],
    since: int,
    most_bytes: int | None = None,
    kept: Metadata = (),
) -> KeyedChanges | None:
    """The row changes of a change history that committed at or after `since`; None if their keys have more bytes.

    `keys` has the names and types of the key, `unsent` the columns that some change left out. `kept` are the metadata
    columns of a table whose ended rows are kept.
    """
    parts, size = [_part(_no_changes(keys, kept), keys, unsent, slices, since, kept)], 0
    for part in changes:
        parts.append(_part(part, keys, unsent, slices, since, kept))
        size += parts[-1].nbytes
        if most_bytes is not None and size > most_bytes:
            return None
    begins = np.cumsum([0, *(len(part.places) for part in parts)])
    moves = np.concatenate([part.moves + begin for part, begin in zip(parts, begins, strict=False)])
    every = [*(part.keys for part in parts), *(part.moved for part in parts)]
    numbers = key_numbers(pa.concat_tables(every))
    count = int(begins[-1])
    operations = np.concatenate([part.operations for part in parts])
    new, old = np.where(operations == DELETE, NONE, numbers[:count]), np.full(count, NONE, np.int64)
    old[operations == DELETE] = numbers[:count][operations == DELETE]
    # Under REPLICA IDENTITY FULL an UPDATE sends the old key even if the key did not change.
    differs = numbers[count:] != new[moves]
    old[moves[differs]] = numbers[count:][differs]
    sent = [np.concatenate([part.sent[n] for part in parts]) for n in range(len(unsent))]
    keyed = KeyedChanges(
        _distinct(pa.concat_tables(every), numbers),
        KeyChanges(operations, old, new, dict(zip(unsent, sent, strict=True))),
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.commit_lsns for part in parts]),
        ended=pa.concat_tables([part.ended for part in parts]) if kept else None,
    )
    truncates = pa.concat_tables([part.truncates for part in parts]).sort_by(_IN_ORDER)
    keyed = _in_order(keyed, np.concatenate([part.ordinals for part in parts]), truncates)
    return _kept(keyed, truncates, kept) if kept else keyed


def _no_changes(keys: pa.Schema, kept: Metadata) -> pa.Table:
    kinds = dict.fromkeys(PLACED, pa.int64()) | {"operation": pa.string(), "commit_time": COMMIT_TIME}
    row = pa.struct([*keys, *metadata_schema(kept)])
    return pa.schema({**kinds, "unchanged": pa.list_(pa.string()), "new": row, "old": row}).empty_table()


def _part(
    changes: pa.Table,
    keys: pa.Schema,
    unsent: Sequence[str],
    slices: Sequence[int],
    since: int,
    kept: Metadata,
) -> _Part:
    places, lsns = places_of(changes, slices), np.asarray(changes["commit_lsn"])
    concerned, truncate = (places >= 0) & (lsns >= since), pc.equal(changes["operation"], "truncate")
    placed = ["commit_lsn", "ordinal", *(["commit_time"] if kept else [])]
    truncates = changes.select(placed).filter(pc.and_(truncate, pa.array(concerned)))
    concerned &= ~np.asarray(truncate)
    if not concerned.all():
        changes, places, lsns = changes.filter(pa.array(concerned)), places[concerned], lsns[concerned]
    operations = np.asarray(pc.index_in(changes["operation"], _OPERATIONS)).astype(np.int8)
    new, old = (
        conformed(pa.table({name: field_of(changes[side], name) for name in keys.names}), keys)
        for side in ("new", "old")
    )
    deleted = operations == DELETE
    if deleted.any():
        at = pa.array(deleted)
        new = pa.table({name: pc.if_else(at, old[name], new[name]) for name in keys.names}, keys)
    moves = np.flatnonzero((operations == UPDATE) & np.asarray(pc.is_valid(changes["old"])))
    return _Part(
        places,
        lsns,
        np.asarray(changes["ordinal"]),
        operations,
        new,
        moves,
        old.take(pa.array(moves)),
        _sent(changes["unchanged"], unsent) if unsent else (),
        conformed(
            pa.table({name: field_of(changes["old"], name) for name, _ in kept}), metadata_schema(kept)
        ),
        truncates,
    )


def _sent(unchanged: pa.ChunkedArray, unsent: Sequence[str]) -> list[Mask]:
    """Which changes sent each of some columns; `unchanged` names the columns that a change left out."""
    lists = unchanged.combine_chunks()
    owners, names = np.asarray(pc.list_parent_indices(lists)), lists.flatten()
    masks = []
    for name in unsent:
        mask = np.ones(len(lists), np.bool_)
        mask[owners[np.asarray(pc.equal(names, name))]] = False
        masks.append(mask)
    return masks


def _distinct(keys: pa.Table, numbers: Numbers) -> pa.Table:
    """One key for each number, in the order of the numbers."""
    first = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return keys.take(pa.array(first))


def _in_order(changes: KeyedChanges, ordinals: Numbers, truncates: pa.Table) -> KeyedChanges:
    if not (np.diff(changes.places) > 0).all():
        order, by_key = np.argsort(changes.places, kind="stable"), changes.changes
        ordinals = ordinals[order]
        changes = KeyedChanges(
            changes.keys,
            KeyChanges(
                by_key.operations[order],
                by_key.old[order],
                by_key.new[order],
                {name: is_sent[order] for name, is_sent in by_key.sent.items()},
            ),
            changes.places[order],
            changes.commit_lsns[order],
            ended=None if changes.ended is None else changes.ended.take(pa.array(order)),
        )
    lsns, before = changes.commit_lsns, []
    for lsn, ordinal in zip(
        truncates["commit_lsn"].to_pylist(), truncates["ordinal"].to_pylist(), strict=True
    ):
        begin, end = (int(at) for at in (np.searchsorted(lsns, lsn), np.searchsorted(lsns, lsn, "right")))
        before.append(begin + int(np.searchsorted(ordinals[begin:end], ordinal)))
    return replace(changes, truncates=tuple(before), truncated=tuple(truncates["commit_lsn"].to_pylist()))


def _kept(changes: KeyedChanges, truncates: pa.Table, kept: Metadata) -> KeyedChanges:
    """The changes with DELETEs in the place of TRUNCATEs, and the metadata of rows that TRUNCATEs end."""
    if not changes.truncates:
        return changes
    by_key, which = with_deletes(changes.changes, changes.truncates, changes.keys.num_rows)
    emptied = truncated_metadata(truncates, kept)
    return KeyedChanges(
        changes.keys,
        by_key,
        # No row comes from a TRUNCATE, so its place is never used.
        np.append(changes.places, np.full(truncates.num_rows, NONE))[which],
        np.append(changes.commit_lsns, np.asarray(truncates["commit_lsn"]))[which],
        ended=pa.concat_tables([changes.ended, emptied]).take(pa.array(which)),
        emptied=emptied.slice(0, 1),
    )
