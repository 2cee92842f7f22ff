"""Computes the net change: the outcome of a table's changes for each key.

In: changes in order, with numbers of their keys (`KeyChanges`). Out: one element per key (`NetChange`), and the first
change that conflicts with an existing row. `tenures` finds the row that a key has after each change. Raises nothing.

Source: apply_handle_insert(), apply_handle_update() and apply_handle_delete() in
src/backend/replication/logical/worker.c, and CheckAndReportConflict() in
src/backend/executor/execReplication.c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pgsieve.decoding.changes.arrays import NONE, Mask, Numbers, fill_none
from pgsieve.decoding.changes.key_changes import INSERT, KeyChanges
from pgsieve.decoding.changes.tenures import REPLICA, TenureRows, Tenures, replace_lost_moves


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

        These keys have a row after the changes, or an ended row that the replica retains. There is one exception: an
        updated key has no row if the replica has none with the key `base_keys`.
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
    """Rows that moves (UPDATEs that change the key) take away from their keys; each array has one element per row.

    A move can be given as two changes, `LEAVE` and `INSERT` (`KeyChanges`). `leaves` is the LEAVE. The other fields have
    the same meaning as in `NetChange`, just before the move.
    """

    leaves: Numbers
    base_keys: Numbers
    changes_by_column: Mapping[str, Numbers]
    begin_changes: Numbers


def compute_net_change(
    changes: KeyChanges, has_row_before: Mask, *, retain_ended: bool = False
) -> tuple[NetChange, int | None]:
    """Return the outcome for each key, and the first change that conflicts with a row of its key, or None.

    `has_row_before` says for each key whether the replica has a row. If there is a conflict, the outcome has no
    meaning. With `retain_ended`, a key without a row after the changes keeps its last ended row. For that,
    `has_row_before` must be right for all keys, and otherwise only for those of `KeyChanges.compute_lookup_masks`.
    """
    changes = replace_lost_moves(changes, has_row_before)
    tenures = Tenures.from_changes(changes)
    rows = tenures.find_rows(changes)
    final_tenures = (
        np.flatnonzero(np.append(tenures.is_first[1:], True)) if len(tenures.keys) else fill_none(0)
    )
    first_tenures = np.flatnonzero(tenures.is_first)
    is_gone, end_changes = tenures.is_ended[final_tenures], fill_none(len(final_tenures))
    if retain_ended and len(final_tenures):
        has_row = rows.mask_rows(has_row_before)
        latest_tenures = np.maximum.reduceat(np.where(has_row, np.arange(len(has_row)), NONE), first_tenures)
        is_gone = latest_tenures == NONE
        final_tenures = np.where(is_gone, final_tenures, latest_tenures)
        end_changes = np.where(
            tenures.is_ended[final_tenures] & ~is_gone,
            tenures.last_changes[final_tenures],
            NONE,
        )
    net = NetChange(
        keys=tenures.keys[final_tenures],
        is_upserted=~is_gone & (rows.origins[final_tenures] == INSERT),
        is_updated=~is_gone & (rows.origins[final_tenures] == REPLICA),
        is_expected=~tenures.brings_row[first_tenures],
        last_changes=np.where(is_gone, NONE, rows.value_changes[final_tenures]),
        base_keys=rows.base_keys[final_tenures],
        changes_by_column=rows.select_columns(final_tenures),
        begin_changes=rows.begin_changes[final_tenures],
        end_changes=end_changes,
    )
    return net, _find_conflict(tenures, rows, has_row_before)


def find_left_rows(changes: KeyChanges, has_row_before: Mask) -> LeftRows:
    """Find the rows that moves take away from their keys. Moves that send all columns are left out.

    In `changes`, each move is a `LEAVE` and an `INSERT`. `has_row_before` is that of `compute_net_change`.
    """
    tenures, lacks_value = Tenures.from_changes(changes), np.zeros(len(changes.operations), np.bool_)
    for is_sent in changes.is_sent_by_column.values():
        lacks_value |= ~is_sent
    rows, last_changes = tenures.find_rows(changes), tenures.last_changes
    left_tenures = np.flatnonzero(
        tenures.is_left & lacks_value[last_changes] & rows.mask_rows(has_row_before)
    )
    return LeftRows(
        last_changes[left_tenures],
        rows.base_keys[left_tenures],
        rows.select_columns(left_tenures),
        rows.begin_changes[left_tenures],
    )


def _find_conflict(tenures: Tenures, rows: TenureRows, has_row_before: Mask) -> int | None:
    """Return the first INSERT, or move to a key, that finds a row with its key; None if there is no such change."""
    if not len(tenures.keys):
        return None
    has_row = ~tenures.is_ended & rows.mask_rows(has_row_before)
    had_row = np.where(
        tenures.is_first, has_row_before[tenures.keys], np.concatenate([[False], has_row[:-1]])
    )
    conflicts = tenures.first_changes[tenures.brings_row & had_row]
    return int(conflicts.min()) if len(conflicts) else None
