"""Writes the rows that a batch adds to a replica and removes from it into the replica's change data feed.

A batch is the changes that one commit applies. Each row of the feed has a type: `insert`, `delete`, or for an updated row
`update_preimage` before and `update_postimage` after the update. The place of a change is a number that orders the changes
of a batch. If the replica keeps deleted rows, these are called ended rows.

In: the rows to remove, and the task that writes the new rows. Out: a row (`FILE_SCHEMA`) for each file of the feed. Raises
OSError, and Arrow's errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.decoding.changes.arrays import Mask, Numbers, is_in
from pgsieve.decoding.changes.net_rows import NetRows
from pgsieve.resources.lake.delta.change_data import (
    CHANGE_TYPE_SCHEMA,
    DELETE,
    INSERT,
    UPDATE_POSTIMAGE,
    UPDATE_PREIMAGE,
    write_change_files,
)
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.file_rows import read_rows
from pgsieve.resources.lake.stores.store import join_path
from pgsieve.resources.parts import Guard


@dataclass(frozen=True)
class NewRowTypes:
    """Adds types to new rows. The changes at the ascending `update_places` give a new row to a key that had one."""

    update_places: Numbers

    @property
    def schema(self) -> pa.Schema:
        """The column that is added."""
        return CHANGE_TYPE_SCHEMA

    def add_to(self, rows: pa.RecordBatch, places: Numbers) -> pa.RecordBatch:
        """Add the types; `places` has the place of each row's change."""
        return _add_types(rows, is_in(places, self.update_places), UPDATE_POSTIMAGE, INSERT)


@dataclass(frozen=True)
class ChangeFeed:
    """The types of the rows that a batch adds and removes.

    - `removed_rows`: the rows that are removed, by file
    - `replaced_masks`: maps the name of a file to a mask of its removed rows: those in whose place the batch adds a row
    - `new_row_types`: the types of the new rows
    """

    removed_rows: Sequence[FileMatches]
    replaced_masks: Mapping[str, Mask]
    new_row_types: NewRowTypes

    @classmethod
    def make(
        cls,
        removed_rows: Sequence[FileMatches],
        new_rows: NetRows,
        keyed_changes: KeyedChanges | None,
        *,
        retain_ended: bool,
    ) -> "ChangeFeed":
        """Find the types. A row is updated if a row of its key is removed, and another one is added.

        `keyed_changes` are the changes by key; None for a table without a key, whose rows are never updated. In a replica
        that keeps deleted rows (`retain_ended`), a row is added for each one that is removed.
        """
        if keyed_changes is None:
            unreplaced = {match.name: np.zeros(len(match.row_numbers), np.bool_) for match in removed_rows}
            return cls(removed_rows, unreplaced, NewRowTypes(np.empty(0, np.int64)))
        new_keys = keyed_changes.find_new_keys(new_rows.places)
        is_removed = keyed_changes.mask_present_keys(match.key_indices for match in removed_rows)
        is_added = keyed_changes.mask_present_keys([new_keys])
        replaced_masks = {match.name: is_added[match.key_indices] | retain_ended for match in removed_rows}
        return cls(removed_rows, replaced_masks, NewRowTypes(new_rows.places[is_removed[new_keys]]))


@dataclass(frozen=True)
class FilesTaskWithFeed:
    """Writes the files of a batch, and those of the feed, part by part. The task is sent to executors.

    The first parts are those of `files_task`. The other parts write the feed: a part for each file with removed rows, then
    the parts of ended rows, then those of new rows.
    """

    files_task: FilesTask
    feed: ChangeFeed

    @property
    def part_count(self) -> int:
        """The number of parts."""
        task = self.files_task
        return task.part_count + len(self.feed.removed_rows) + len(task.ended_rows) + len(task.change_parts)

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write one part; yields a row (`FILE_SCHEMA`) per file."""
        if number < self.files_task.part_count:
            return self.files_task(number, guard)
        return self._write_feed(number - self.files_task.part_count, guard)

    def _write_feed(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        task, schema = self.files_task, self.files_task.replica_schema
        if (ended_part := number - len(self.feed.removed_rows)) < 0:
            rows = self._read_removed_rows(self.feed.removed_rows[number])
        elif ended_part < len(task.ended_rows):
            rows = (
                _add_types(batch, np.ones(batch.num_rows, np.bool_), UPDATE_POSTIMAGE, INSERT)
                for batch in task.read_ended_rows(task.ended_rows[ended_part])
            )
        else:
            selection = replace(task.row_selection, added_columns=self.feed.new_row_types)
            rows = replace(task, row_selection=selection).read_new_rows(
                task.change_parts[ended_part - len(task.ended_rows)]
            )
            schema = task.schema
        columns = pa.schema([*schema, *CHANGE_TYPE_SCHEMA])
        return write_change_files(task.path, columns, guard(rows), task.store, task.target_file_bytes)

    def _read_removed_rows(self, match: FileMatches) -> Iterator[pa.RecordBatch]:
        task, is_replaced = self.files_task, self.feed.replaced_masks[match.name]
        file = join_path(task.path, match.name)
        for part, rows in read_rows(task.store, file, task.replica_schema, match.row_numbers):
            yield _add_types(rows, is_replaced[part], UPDATE_PREIMAGE, DELETE)


def _add_types(rows: pa.RecordBatch, is_update: Mask, update_type: str, other_type: str) -> pa.RecordBatch:
    types = pa.array(np.where(is_update, update_type, other_type), pa.string())
    return pa.RecordBatch.from_arrays(
        [*rows.columns, types], schema=pa.schema([*rows.schema, *CHANGE_TYPE_SCHEMA])
    )
