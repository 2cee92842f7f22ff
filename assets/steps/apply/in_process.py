"""Reads a batch of few changes, and merges them into one replica table. delta-rs makes the commit in this process.

In: a batch's changes as an Arrow table. Out: the changes by key, and a commit of their net change, which is what they do
together to each key. Raises LakeError. This module is for replicas that need a MERGE, for example because they have
constraints. `by_files` writes the files of other replicas, and `spark_changes` merges any number of changes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.merge_rows import ChangesToMerge, MergeRows
from pgsieve.assets.steps.apply.row_selection import RowSelection, make_reader
from pgsieve.assets.steps.apply.table_result import TableBatch
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes
from pgsieve.assets.steps.apply.ways import UnsuitedWayError
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.extent import compute_places
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp, mask_living_rows
from pgsieve.decoding.changes.value_sources import NumberedValues
from pgsieve.resources.lake.committers import InProcessCommitter
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.slices import SparkSlices
from pgsieve.resources.work import DRIVER, add_costs


@dataclass(frozen=True)
class FewChanges(ChangesToMerge[pa.Table]):
    """A batch's changes (`rows`), and the committer that reads and writes the replica."""

    batch: TableBatch
    rows: pa.Table
    committer: InProcessCommitter

    @cached_property
    def row_schema(self) -> pa.Schema:
        """The replica's columns."""
        return self._make_schema(self.batch.definition.names)

    def _make_schema(self, names: Iterable[str]) -> pa.Schema:
        row_type = self.rows.schema.field("new").type
        return pa.schema([row_type.field(row_type.get_field_index(name)) for name in names])

    def read_keyed_changes(self) -> KeyedChanges:
        """Return the changes by key."""
        return make_keyed_changes(
            [self.rows],
            self._make_schema(self.batch.definition.key),
            sorted(self.batch.pending.unsent_columns),
            self.batch.pending.extent,
            soft_delete_columns=self.batch.definition.soft_delete_columns,
        )

    def find_present_keys(self, keyed_changes: KeyedChanges) -> PresentKeys:
        """Find the rows of the replica that have one of the keys to look up (`KeyedChanges.sought_keys`)."""
        return keyed_changes.find_present_keys(self._look_up_keys)

    def _look_up_keys(self, keys: pa.Table) -> PresentKeys:
        deleted_column = self.batch.definition.deleted_column
        deleted_field = [] if deleted_column is None else [pa.field(deleted_column, pa.bool_())]
        numbers, rows = self.committer.find_rows(
            self.batch.path, keys, pa.schema([*keys.schema, *deleted_field])
        )
        return PresentKeys(
            numbers, rows.select(keys.column_names), np.asarray(mask_living_rows(rows, deleted_column))
        )

    def read_inserts(self) -> pa.Table:
        """Return the new rows of the INSERTs after the last TRUNCATE."""
        return self._make_table(self._select_rows(RowSelection(self.batch.pending.extent, self._stamp)))

    def count(self, rows: pa.Table) -> int:
        """Count rows."""
        return int(rows.num_rows)

    def read_new_rows(self, merge_rows: MergeRows, keyed_changes: KeyedChanges) -> pa.Table:
        """Return the new rows of a net change, in the columns of the replica."""
        return self._make_table(self._read_placed_rows(merge_rows, keyed_changes))

    def append(self, rows: pa.Table, commit: Commit) -> None:
        """Append rows to the replica, or overwrite the replica with them."""
        add_costs(DRIVER, 1, self.rows.nbytes)
        self.committer.write(self.batch.path, rows, commit)

    def merge(self, merge_rows: MergeRows, keyed_changes: KeyedChanges, commit: Commit) -> bool:
        """Merge a net change into the replica."""
        add_costs(DRIVER, 1, self.rows.nbytes)
        sources = [merge_rows.make_source(*self._read_placed_rows(merge_rows, keyed_changes))]
        source = pa.concat_tables(
            [pa.Table.from_batches(sources), merge_rows.other_rows], promote_options="default"
        )
        self.committer.merge(self.batch.path, source, merge_rows.merge, commit)
        return True

    def _read_placed_rows(
        self, merge_rows: MergeRows, keyed_changes: KeyedChanges
    ) -> tuple[pa.RecordBatch, Numbers]:
        """Return the new rows with all their values, and the places of their changes."""
        new_rows = merge_rows.new_rows
        selection = RowSelection(
            self.batch.pending.extent, self._stamp, new_rows.places, completions=merge_rows.ended_metadata
        )
        rows, places = self._select_rows(selection)
        change_places = compute_places(self.rows, self.batch.pending.slice_ends)
        sent_values = {
            name: NumberedValues.collect(
                self.row_schema.field(name).type,
                [(change_places, struct_field(self.rows["new"], name))],
            )
            for name in new_rows.sent_places
        }
        return (
            merge_rows.complete(rows, places, sent_values, self._read_base_values(merge_rows, keyed_changes)),
            places,
        )

    def _read_base_values(
        self, merge_rows: MergeRows, keyed_changes: KeyedChanges
    ) -> Mapping[str, NumberedValues]:
        """Read the values that no change sent from the replica's rows."""
        new_rows = merge_rows.new_rows
        keys = np.unique(new_rows.base_keys[new_rows.is_unsent & (new_rows.base_keys != NONE)])
        if not len(keys):
            no_values = {name: self.row_schema.field(name).type for name in new_rows.sent_places}
            return {name: NumberedValues.collect(no_type, ()) for name, no_type in no_values.items()}
        schema = self._make_schema(dict.fromkeys([*self.batch.definition.key, *new_rows.sent_places]))
        sought_keys = keyed_changes.keys.take(pa.array(keys))
        numbers, rows = self.committer.find_rows(self.batch.path, sought_keys, schema)
        return {
            name: NumberedValues.collect(rows.schema.field(name).type, [(keys[numbers], rows[name])])
            for name in new_rows.sent_places
        }

    def _select_rows(self, selection: RowSelection) -> tuple[pa.RecordBatch, Numbers]:
        """Return the selected rows, and the places of their changes."""
        placed_rows = selection.read_placed_rows(make_reader(self.rows), pa.struct(self.row_schema))
        if placed_rows is None:
            return pa.RecordBatch.from_pylist([], self.row_schema), np.empty(0, np.int64)
        places, rows = placed_rows
        return rows, places

    def _make_table(self, placed_rows: tuple[pa.RecordBatch, Numbers]) -> pa.Table:
        return pa.Table.from_batches(placed_rows[:1])

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.batch.definition.metadata_column(APPLIED_AT))


def read_few_changes(batch: TableBatch, committer: InProcessCommitter) -> FewChanges:
    """Read the changes of a batch, for a MERGE in this process. Raises UnsuitedWayError if only Spark can read them."""
    lake, path = batch.lake, batch.changes_path
    with lake.consistent_read(batch.path, path), lake.access.translate_errors(path):
        slices = lake.find_slices(path, batch.pending.slice_ends, must_exist=True)
        if isinstance(slices, SparkSlices):
            raise UnsuitedWayError("only Spark reads the change history")
        return FewChanges(batch, slices.read_rows(), committer)
