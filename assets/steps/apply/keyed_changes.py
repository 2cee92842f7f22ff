"""Numbers the keys of a batch's changes, and finds out what the changes do to each key.

In: Parquet files of the change history. Only keys, operations and places are read. The place of a change is one number,
which combines its slice in the batch and its number in this slice. Out: `KeyedChanges`, the changes in order, in the form
that `pgsieve.decoding.changes.net_change` takes. Everything is computed on whole columns; no Python code runs per change.
Raises Arrow's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import COMMIT_TIME, ROW_OPERATIONS, struct_field
from pgsieve.decoding.changes.extent import PLACE_COLUMNS, Extent, change_places
from pgsieve.decoding.changes.keys import PresentKeys, key_numbers
from pgsieve.decoding.changes.metadata_columns import (
    Metadata,
    Stamp,
    metadata_of_truncated_rows,
    metadata_schema,
)
from pgsieve.decoding.changes.net_change import (
    DELETE,
    INSERT,
    NONE,
    UPDATE,
    KeyChanges,
    Mask,
    NetChange,
    Numbers,
    insert_deletes,
    net_changes,
)
from pgsieve.resources.lake.delta.conforming import conform
from pgsieve.resources.lake.stores.store import Store

#: The operations; the index of each is its number (`INSERT`, `UPDATE`, `DELETE`) in `net_change`.
_OPERATIONS = pa.array(ROW_OPERATIONS)
_SORT_KEYS = [("commit_lsn", "ascending"), ("ordinal", "ascending")]


@dataclass(frozen=True)
class KeyConflict:
    """An INSERT or UPDATE whose new key has a row already.

    `inserts` is True for an INSERT. `key` is a table of one row: the new key. `commit_lsn` is the commit LSN of the
    change, and `first_lsn` that of the batch's first change.
    """

    inserts: bool
    key: pa.Table
    commit_lsn: int
    first_lsn: int


@dataclass(frozen=True)
class KeyedChanges:
    """The row changes of a batch in order.

    Keys are numbered: row i of `keys` is the key with the number i, and `changes` names keys by these numbers. `places`
    and `commit_lsns` have an element per change. For each TRUNCATE, `truncates` has the number of changes before it, and
    `truncate_lsns` its commit LSN.

    If the replica keeps deleted rows (`deletes: soft`), `end_metadata` has a row per change: the metadata that a row gets
    if the change ends it. In such a replica a TRUNCATE counts as a DELETE of each key of the batch that may have a row.
    `truncated_metadata` has one row: the metadata that the first TRUNCATE gives to the replica's other rows.
    """

    keys: pa.Table
    changes: KeyChanges
    places: Numbers
    commit_lsns: Numbers
    truncates: Sequence[int] = ()
    truncate_lsns: Sequence[int] = ()
    end_metadata: pa.Table | None = None
    truncated_metadata: pa.Table | None = None
    # Not a cached_property: before Python 3.12 it has a lock, and a class with a lock cannot be sent to executors.
    _lookups: list[tuple[Mask, Mask]] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        changes, rows = self.changes, [self.keys, *([] if self.end_metadata is None else [self.end_metadata])]
        numbers = sum(array.nbytes for array in (self.places, self.commit_lsns, changes.old, changes.new))
        masks = changes.operations.nbytes + sum(is_sent.nbytes for is_sent in changes.sent.values())
        return sum(int(array.nbytes) for array in rows) + numbers + masks

    @property
    def lookups(self) -> tuple[Mask, Mask]:
        """Two masks of the keys to look up in the replica.

        The first has the keys that the changes expect there, for example the key of a DELETE. The second has the keys
        whose row in the replica matters otherwise, for example because an UPDATE moves it to another key.
        """
        if not self._lookups:
            self._lookups.append(self.changes.lookup_masks(self.keys.num_rows))
        return self._lookups[0]

    @property
    def sought(self) -> Numbers:
        """The numbers of the keys that are looked up in the replica."""
        expected, matters = self.lookups
        return np.flatnonzero(expected | matters)

    @property
    def first_effective(self) -> int:
        """The number of changes before the last TRUNCATE; the changes from this number on are effective."""
        return self.truncates[-1] if self.truncates else 0

    @property
    def since_truncate(self) -> KeyChanges:
        """The changes after the last TRUNCATE."""
        return self._part(self.first_effective, len(self.places))

    def _part(self, begin: int, end: int) -> KeyChanges:
        changes, part = self.changes, slice(begin, end)
        sent = {name: is_sent[part] for name, is_sent in changes.sent.items()}
        return KeyChanges(changes.operations[part], changes.old[part], changes.new[part], sent)

    def present(self, lookup: Callable[[pa.Table], PresentKeys]) -> PresentKeys:
        """The rows of the replica that have one of the keys in `sought`.

        `lookup` gets a table of keys, and returns the replica's rows that have one of them.
        """
        sought = self.sought
        if not len(sought):
            return PresentKeys.empty(self.keys)
        present = lookup(self.keys.take(pa.array(sought)))
        return replace(present, numbers=sought[present.numbers])

    def ended_metadata(self, ended: Numbers, stamp: Stamp) -> pa.Table:
        """The metadata of rows; `ended` has for each row the number of the change that ends it.

        The metadata is NULL where this number is NONE. The table has no columns if the replica does not keep deleted rows.
        """
        if self.end_metadata is None:
            return pa.table({})
        return stamp.apply(self.end_metadata.take(pa.array(ended, mask=ended == NONE)))

    def _conflict(self, change: int) -> KeyConflict:
        key = self.keys.take(pa.array(self.changes.new[change : change + 1]))
        lsns, inserts = self.commit_lsns, bool(self.changes.operations[change] == INSERT)
        return KeyConflict(inserts, key, int(lsns[change]), int(lsns[0]))

    def decide(self, present_keys: Iterable[Numbers], *, empties: bool) -> "DecidedChanges":
        """The outcome for each key.

        `present_keys` are the numbers of the keys that the replica has, in several arrays. `empties` is True if the batch
        has a TRUNCATE that removes all rows of the replica.
        """
        before = self.presence(present_keys)
        net, conflict = self._net_change(before)
        if empties:
            before = np.zeros_like(before)
        return DecidedChanges(net, conflict, before, net.upserted | (net.updated & before[net.base]))

    def presence(self, present_keys: Iterable[Numbers]) -> Mask:
        """A mask of the keys that are among `present_keys`.

        It has one more element, which is False, so that the key number NONE (-1) may be looked up too.
        """
        present = np.zeros(self.keys.num_rows + 1, np.bool_)
        for keys in present_keys:
            present[keys] = True
        return present

    def _net_change(self, present: Mask) -> tuple[NetChange, KeyConflict | None]:
        """The net change of each key by the changes after the last TRUNCATE, and the first conflict of all changes.

        In the net change, the first change after the last TRUNCATE has the number 0. `present` is a mask of the keys that
        the replica had before the batch.
        """
        conflict: KeyConflict | None = None
        for begin, end in zip((0, *self.truncates), (*self.truncates, len(self.places)), strict=True):
            net, conflicting = net_changes(
                self._part(begin, end), present, retain_ended=self.end_metadata is not None
            )
            if conflict is None and conflicting is not None:
                conflict = self._conflict(begin + conflicting)
            present = np.zeros_like(present)
        return net, conflict


@dataclass(frozen=True)
class DecidedChanges:
    """The outcome of changes for each key (`net`), and the first conflict; None if there is none.

    `before` is the mask of the keys that had a row of the replica before the changes. No key counts if a TRUNCATE has
    removed all rows. `remains` is the mask of the keys of `net` that have a row after the changes.
    """

    net: NetChange
    conflict: KeyConflict | None
    before: Mask
    remains: Mask

    @property
    def changes_rows(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.net.expected.any() or self.remains.any())


@dataclass(frozen=True)
class ChangesOfKeys:
    """Some changes of a change history, in any order.

    `keys` has the key of each change: the old key of a DELETE, the new key of any other change. `moves` are the numbers of
    the UPDATEs that sent an old key, and `moved` has these old keys. `sent` has a mask for each column that some change did
    not send: the changes that sent it. `end_metadata` and `truncates` have the metadata of ended rows and the TRUNCATEs.
    """

    places: Numbers
    commit_lsns: Numbers
    ordinals: Numbers
    operations: npt.NDArray[np.int8]
    keys: pa.Table
    moves: Numbers
    moved: pa.Table
    sent: Sequence[Mask]
    end_metadata: pa.Table
    truncates: pa.Table

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        numbers = sum(array.nbytes for array in (self.places, self.commit_lsns, self.ordinals))
        masks = self.operations.nbytes + sum(mask.nbytes for mask in self.sent)
        return sum(int(rows.nbytes) for rows in (self.keys, self.moved, self.end_metadata)) + numbers + masks


def stored_changes(
    store: Store,
    files: Iterable[str],
    keys: pa.Schema,
    unsent: Sequence[str],
    soft_delete_columns: Metadata = (),
) -> Iterator[pa.Table]:
    """Read the columns that `keyed_changes` needs from the files of a change history, file by file.

    The other columns are not read: they may be large.
    """
    columns = [*PLACE_COLUMNS, *(f"{side}.{name}" for side in ("new", "old") for name in keys.names)]
    columns += (
        ["commit_time", *(f"old.{name}" for name, _ in soft_delete_columns)] if soft_delete_columns else []
    )
    return (store.read_columns(file, [*columns, "unchanged"] if unsent else columns) for file in files)


def keyed_changes(
    changes: Iterable[pa.Table],
    keys: pa.Schema,
    unsent: Sequence[str],
    extent: Extent,
    max_bytes: int | None = None,
    soft_delete_columns: Metadata = (),
) -> KeyedChanges | None:
    """The row changes of a change history within an extent; None if they take more than `max_bytes`.

    `keys` has the names and types of the key's columns. `unsent` are the columns that some change did not send.
    `soft_delete_columns` are the metadata columns of a replica that keeps deleted rows; empty for other replicas.
    """
    parts, size = (
        [
            changes_of_keys(
                _empty_changes(keys, soft_delete_columns), keys, unsent, extent, soft_delete_columns
            )
        ],
        0,
    )
    for part in changes:
        parts.append(changes_of_keys(part, keys, unsent, extent, soft_delete_columns))
        size += parts[-1].nbytes
        if max_bytes is not None and size > max_bytes:
            return None
    return join_changes(parts, unsent, soft_delete_columns)


def join_changes(
    parts: Sequence[ChangesOfKeys], unsent: Sequence[str] = (), soft_delete_columns: Metadata = ()
) -> KeyedChanges:
    """Join parts of a batch's changes, at least one; the other parameters are those of `keyed_changes`."""
    # Parts whose changes are not interleaved are ordered as parts, so that their changes need no sorting.
    parts = sorted(parts, key=lambda part: int(part.places[0]) if len(part.places) else NONE)
    begins = np.cumsum([0, *(len(part.places) for part in parts)])
    moves = np.concatenate([part.moves + begin for part, begin in zip(parts, begins, strict=False)])
    keys = [*(part.keys for part in parts), *(part.moved for part in parts)]
    numbers = key_numbers(pa.concat_tables(keys))
    count = int(begins[-1])
    operations = np.concatenate([part.operations for part in parts])
    new, old = np.where(operations == DELETE, NONE, numbers[:count]), np.full(count, NONE, np.int64)
    old[operations == DELETE] = numbers[:count][operations == DELETE]
    # Under REPLICA IDENTITY FULL an UPDATE sends the old key even if the key did not change.
    differs = numbers[count:] != new[moves]
    old[moves[differs]] = numbers[count:][differs]
    sent = [np.concatenate([part.sent[number] for part in parts]) for number in range(len(unsent))]
    keyed = KeyedChanges(
        _distinct_keys(pa.concat_tables(keys), numbers),
        KeyChanges(operations, old, new, dict(zip(unsent, sent, strict=True))),
        np.concatenate([part.places for part in parts]),
        np.concatenate([part.commit_lsns for part in parts]),
        end_metadata=pa.concat_tables([part.end_metadata for part in parts]) if soft_delete_columns else None,
    )
    truncates = pa.concat_tables([part.truncates for part in parts]).sort_by(_SORT_KEYS)
    keyed = _sort_changes(keyed, np.concatenate([part.ordinals for part in parts]), truncates)
    return _with_ended_rows(keyed, truncates, soft_delete_columns) if soft_delete_columns else keyed


def _empty_changes(keys: pa.Schema, soft_delete_columns: Metadata) -> pa.Table:
    kinds = dict.fromkeys(PLACE_COLUMNS, pa.int64()) | {"operation": pa.string(), "commit_time": COMMIT_TIME}
    row = pa.struct([*keys, *metadata_schema(soft_delete_columns)])
    return pa.schema({**kinds, "unchanged": pa.list_(pa.string()), "new": row, "old": row}).empty_table()


def changes_of_keys(
    changes: pa.Table,
    keys: pa.Schema,
    unsent: Sequence[str],
    extent: Extent,
    soft_delete_columns: Metadata = (),
) -> ChangesOfKeys:
    """The row changes and the TRUNCATEs among some changes; the parameters are those of `keyed_changes`."""
    places, lsns = change_places(changes, extent.slices), np.asarray(changes["commit_lsn"])
    is_chosen, is_truncate = extent.mask(changes), pc.equal(changes["operation"], "truncate")
    columns = ["commit_lsn", "ordinal", *(["commit_time"] if soft_delete_columns else [])]
    truncates = changes.select(columns).filter(pc.and_(is_truncate, pa.array(is_chosen)))
    is_chosen &= ~np.asarray(is_truncate)
    if not is_chosen.all():
        changes, places, lsns = changes.filter(pa.array(is_chosen)), places[is_chosen], lsns[is_chosen]
    operations = np.asarray(pc.index_in(changes["operation"], _OPERATIONS)).astype(np.int8)
    new, old = _keys_of(changes, keys)
    moves = np.flatnonzero((operations == UPDATE) & np.asarray(pc.is_valid(changes["old"])))
    return ChangesOfKeys(
        places,
        lsns,
        np.asarray(changes["ordinal"]),
        operations,
        new,
        moves,
        old.take(pa.array(moves)),
        _sent_masks(changes["unchanged"], unsent) if unsent else (),
        conform(
            pa.table({name: struct_field(changes["old"], name) for name, _ in soft_delete_columns}),
            metadata_schema(soft_delete_columns),
        ),
        truncates,
    )


def _keys_of(changes: pa.Table, keys: pa.Schema) -> tuple[pa.Table, pa.Table]:
    """Two tables with a row per change: the key (the old one of a DELETE), and the old key, NULL if it was not sent."""
    new, old = (
        conform(pa.table({name: struct_field(changes[side], name) for name in keys.names}), keys)
        for side in ("new", "old")
    )
    deleted = pc.equal(changes["operation"], "delete").combine_chunks()
    if pc.any(deleted).as_py():
        new = pa.table({name: pc.if_else(deleted, old[name], new[name]) for name in keys.names}, keys)
    return new, old


def _sent_masks(unchanged: pa.ChunkedArray, unsent: Sequence[str]) -> list[Mask]:
    """For each column in `unsent`, a mask of the changes that sent it.

    `unchanged` has for each change the names of the columns that it did not send.
    """
    lists = unchanged.combine_chunks()
    owners, names = np.asarray(pc.list_parent_indices(lists)), lists.flatten()
    masks = []
    for name in unsent:
        mask = np.ones(len(lists), np.bool_)
        mask[owners[np.asarray(pc.equal(names, name))]] = False
        masks.append(mask)
    return masks


def _distinct_keys(keys: pa.Table, numbers: Numbers) -> pa.Table:
    """The distinct keys in the order of their numbers; `numbers` has the number of each row of `keys`."""
    first = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    return keys.take(pa.array(first))


def _sort_changes(changes: KeyedChanges, ordinals: Numbers, truncates: pa.Table) -> KeyedChanges:
    if not (np.diff(changes.places) > 0).all():
        order, key_changes = np.argsort(changes.places, kind="stable"), changes.changes
        ordinals = ordinals[order]
        changes = KeyedChanges(
            changes.keys,
            KeyChanges(
                key_changes.operations[order],
                key_changes.old[order],
                key_changes.new[order],
                {name: is_sent[order] for name, is_sent in key_changes.sent.items()},
            ),
            changes.places[order],
            changes.commit_lsns[order],
            end_metadata=None if changes.end_metadata is None else changes.end_metadata.take(pa.array(order)),
        )
    lsns, positions = changes.commit_lsns, []
    for lsn, ordinal in zip(
        truncates["commit_lsn"].to_pylist(), truncates["ordinal"].to_pylist(), strict=True
    ):
        begin, end = (
            int(index) for index in (np.searchsorted(lsns, lsn), np.searchsorted(lsns, lsn, "right"))
        )
        positions.append(begin + int(np.searchsorted(ordinals[begin:end], ordinal)))
    return replace(
        changes, truncates=tuple(positions), truncate_lsns=tuple(truncates["commit_lsn"].to_pylist())
    )


def _with_ended_rows(
    changes: KeyedChanges, truncates: pa.Table, soft_delete_columns: Metadata
) -> KeyedChanges:
    """Replace each TRUNCATE by a DELETE of each key that may have a row, with the metadata of the rows that it ends."""
    if not changes.truncates:
        return changes
    key_changes, origins = insert_deletes(changes.changes, changes.truncates, changes.keys.num_rows)
    truncated_metadata = metadata_of_truncated_rows(truncates, soft_delete_columns)
    return KeyedChanges(
        changes.keys,
        key_changes,
        # A TRUNCATE has no new row, so its place is never used.
        np.append(changes.places, np.full(truncates.num_rows, NONE))[origins],
        np.append(changes.commit_lsns, np.asarray(truncates["commit_lsn"]))[origins],
        end_metadata=pa.concat_tables([changes.end_metadata, truncated_metadata]).take(pa.array(origins)),
        truncated_metadata=truncated_metadata.slice(0, 1),
    )
