"""Decides what a batch's changes do to each key.

A batch is the changes that one commit applies to a replica. The net change of a key is what they do to it together. A
conflict is a change that gives a row the key of another row.

In: `KeyedChanges`, the row changes of a batch in order, which refer to keys by numbers. `unordered_changes` makes them from
the change history (the Delta table with all changes). Out: `ChangesOutcome`, the net change of each key, and the first
conflict. Everything is computed on whole columns; no Python code runs per change.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers
from pgsieve.decoding.changes.key_changes import INSERT, KeyChanges
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.decoding.changes.metadata_columns import Stamp
from pgsieve.decoding.changes.net_change import NetChange, compute_net_change


@dataclass(frozen=True)
class KeyConflict:
    """An INSERT or UPDATE whose new key has a row already.

    `is_insert` is True for an INSERT. `key` is a table of one row: the new key. `commit_lsn` is the commit LSN of the
    change, and `first_lsn` that of the batch's first change.
    """

    is_insert: bool
    key: pa.Table
    commit_lsn: int
    first_lsn: int


@dataclass(frozen=True)
class KeyedChanges:
    """The row changes of a batch in order.

    Keys are numbered: row i of `keys` is the key with the number i, and `changes` refers to keys by these numbers.
    `places` (numbers that order the changes) and `commit_lsns` have an element per change. For each TRUNCATE,
    `truncate_indices` has the index of the first change after it, and `truncate_lsns` has the TRUNCATE's commit LSN.

    If the replica keeps deleted rows (`deletes: soft`), `end_metadata` has a row per change: what the metadata columns of a
    row get if this change ends (deletes) the row. In such a replica a TRUNCATE counts as a DELETE of each key of the batch
    that may have a row. The first TRUNCATE also ends the replica's other rows: `truncated_metadata` has one row, for them.
    """

    keys: pa.Table
    changes: KeyChanges
    places: Numbers
    commit_lsns: Numbers
    truncate_indices: Sequence[int] = ()
    truncate_lsns: Sequence[int] = ()
    end_metadata: pa.Table | None = None
    truncated_metadata: pa.Table | None = None
    # Not a cached_property: before Python 3.12 it has a lock, and a class with a lock cannot be sent to executors.
    _cached_lookup_masks: list[tuple[Mask, Mask]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def nbytes(self) -> int:
        """How much memory the arrays take."""
        changes, rows = self.changes, [self.keys, *([] if self.end_metadata is None else [self.end_metadata])]
        numbers = sum(
            array.nbytes for array in (self.places, self.commit_lsns, changes.old_keys, changes.new_keys)
        )
        masks = changes.operations.nbytes + sum(
            is_sent.nbytes for is_sent in changes.is_sent_by_column.values()
        )
        return sum(int(array.nbytes) for array in rows) + numbers + masks

    @property
    def lookup_masks(self) -> tuple[Mask, Mask]:
        """Two masks of the keys to look up in the replica.

        Keys of the first mask should have a row there, for example the key of a DELETE. Keys of the second mask may have a
        row there that matters, for example because it would conflict with an INSERT.
        """
        if not self._cached_lookup_masks:
            self._cached_lookup_masks.append(self.changes.compute_lookup_masks(self.keys.num_rows))
        return self._cached_lookup_masks[0]

    @property
    def sought_keys(self) -> Numbers:
        """The numbers of the keys that are looked up in the replica."""
        is_expected, is_relevant = self.lookup_masks
        return np.flatnonzero(is_expected | is_relevant)

    @property
    def first_effective_index(self) -> int:
        """The index of the first change after the last TRUNCATE. Changes before the last TRUNCATE have no effect."""
        return self.truncate_indices[-1] if self.truncate_indices else 0

    @property
    def effective_changes(self) -> KeyChanges:
        """The changes after the last TRUNCATE."""
        return self._take_changes(self.first_effective_index, len(self.places))

    @property
    def effective_places(self) -> Numbers:
        """The places of the changes after the last TRUNCATE."""
        return self.places[self.first_effective_index :]

    def _take_changes(self, begin: int, end: int) -> KeyChanges:
        changes, part = self.changes, slice(begin, end)
        is_sent_by_column = {name: is_sent[part] for name, is_sent in changes.is_sent_by_column.items()}
        return KeyChanges(
            changes.operations[part], changes.old_keys[part], changes.new_keys[part], is_sent_by_column
        )

    def find_present_keys(self, lookup: Callable[[pa.Table], PresentKeys]) -> PresentKeys:
        """Find the rows of the replica that have one of the keys in `sought_keys`.

        `lookup` is a function that gets a table of keys, and returns the rows of the replica with these keys.
        """
        sought_keys = self.sought_keys
        if not len(sought_keys):
            return PresentKeys.empty(self.keys)
        present_keys = lookup(self.keys.take(pa.array(sought_keys)))
        return replace(present_keys, numbers=sought_keys[present_keys.numbers])

    def make_ended_metadata(self, ending_changes: Numbers, stamp: Stamp) -> pa.Table:
        """Make the metadata columns of rows; `ending_changes` has for each row the index of the change that ends it.

        If this index is NONE, the metadata is NULL. If the replica does not keep deleted rows, the table has no columns.
        """
        if self.end_metadata is None:
            return pa.table({})
        return stamp.set_time(self.end_metadata.take(pa.array(ending_changes, mask=ending_changes == NONE)))

    def _make_conflict(self, change_index: int) -> KeyConflict:
        key = self.keys.take(pa.array(self.changes.new_keys[change_index : change_index + 1]))
        lsns, is_insert = self.commit_lsns, bool(self.changes.operations[change_index] == INSERT)
        return KeyConflict(is_insert, key, int(lsns[change_index]), int(lsns[0]))

    def decide(self, present_keys: Iterable[Numbers], *, empties_replica: bool) -> "ChangesOutcome":
        """Decide what the changes do to each key.

        `present_keys` are the numbers of the keys that the replica has, in several arrays. `empties_replica` is True if
        the batch has a TRUNCATE that removes all rows of the replica.
        """
        had_row = self.mask_present_keys(present_keys)
        net, conflict = self._compute_net_change(had_row)
        if empties_replica:
            had_row = np.zeros_like(had_row)
        return ChangesOutcome(
            net, conflict, had_row, net.is_upserted | (net.is_updated & had_row[net.base_keys])
        )

    def find_new_keys(self, places: Numbers) -> Numbers:
        """Find the numbers of the keys that the changes at these places give to their rows."""
        # DELETEs that stand for a TRUNCATE have no place, and the other places ascend. An UPDATE of the key may be given as
        # two changes at the same place. The second one has the new key.
        has_place = self.places != NONE
        last_indices = np.searchsorted(self.places[has_place], places, "right") - 1
        new_keys: Numbers = self.changes.new_keys[has_place][last_indices]
        return new_keys

    def mask_present_keys(self, present_keys: Iterable[Numbers]) -> Mask:
        """Return a mask of the keys that are among `present_keys`.

        It has one more element, which is False, so that the key number NONE (-1) may be looked up too.
        """
        is_present = np.zeros(self.keys.num_rows + 1, np.bool_)
        for keys in present_keys:
            is_present[keys] = True
        return is_present

    def _compute_net_change(self, is_present: Mask) -> tuple[NetChange, KeyConflict | None]:
        """Compute the net change of the changes after the last TRUNCATE, and the first conflict of all changes.

        The indexes in the net change count from the first change after the last TRUNCATE.

        `is_present` is a mask of the keys that the replica had before the batch.
        """
        conflict: KeyConflict | None = None
        for begin, end in zip(
            (0, *self.truncate_indices), (*self.truncate_indices, len(self.places)), strict=True
        ):
            net, conflict_index = compute_net_change(
                self._take_changes(begin, end), is_present, retain_ended=self.end_metadata is not None
            )
            if conflict is None and conflict_index is not None:
                conflict = self._make_conflict(begin + conflict_index)
            is_present = np.zeros_like(is_present)
        return net, conflict


@dataclass(frozen=True)
class ChangesOutcome:
    """What changes do to each key (`net`), and the first conflict; None if there is none.

    `had_row` is True for each key that had a row in the replica before the changes. It is False for all keys if a TRUNCATE
    has removed all rows. `has_row` is True for each key of `net` that has a row after the changes.
    """

    net: NetChange
    conflict: KeyConflict | None
    had_row: Mask
    has_row: Mask

    def mask_removed_keys(self, *, retain_ended: bool) -> Mask:
        """Return a mask of the keys whose row is removed from its file of the replica.

        In a replica that keeps deleted rows (`retain_ended`), these are only the keys that have a row after the changes.
        A deleted row counts, too: it is written again with its mark.
        """
        if retain_ended:
            return self.mask_keys_with_row()
        is_removed = np.zeros_like(self.had_row)
        is_removed[self.net.keys] = True
        return is_removed

    def mask_keys_with_row(self) -> Mask:
        """Return a mask of the keys that have a row after the changes."""
        has_row = np.zeros_like(self.had_row)
        has_row[self.net.keys[self.has_row]] = True
        return has_row

    @property
    def has_row_changes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.net.is_expected.any() or self.has_row.any())
