"""Applies a batch of few changes to one replica table, in one commit. delta-rs makes it in this process.

The commit has the net change: what all changes do together to each key, or to each row of a table without a key. A
table's change history is the Delta table that has all its changes.

In: a batch's changes as an Arrow table, in order. Out: `TableResult`. Raises LakeError. This module is for replicas
that need a MERGE, for example because they have constraints. `by_files` writes the files of other replicas. `writer`
applies any number of changes by Spark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, make_batch_result
from pgsieve.assets.steps.apply.unordered_changes import make_keyed_changes
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.arrays import NONE
from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.decoding.changes.merge_source import make_merge_source
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp, mask_living_rows
from pgsieve.decoding.changes.net_change import NetChange
from pgsieve.resources.lake.committers import InProcessCommitter
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.policy import estimate_merge_bytes
from pgsieve.resources.work import DRIVER, add_costs


@dataclass(frozen=True)
class FewChanges:
    """A batch's changes in order (`rows`), and the committer that reads and writes the replica."""

    rows: pa.Table
    committer: InProcessCommitter

    def find_present_keys(self, path: str, keys: pa.Table, deleted_column: str | None) -> PresentKeys:
        """Find the rows of the replica that have one of the keys.

        `deleted_column` is the name of the column that marks deleted rows; None if the replica does not keep them.
        """
        deleted_field = [] if deleted_column is None else [pa.field(deleted_column, pa.bool_())]
        numbers, rows = self.committer.find_rows(path, keys, pa.schema([*keys.schema, *deleted_field]))
        return PresentKeys(
            numbers, rows.select(keys.column_names), np.asarray(mask_living_rows(rows, deleted_column))
        )


def read_few_changes(
    lake: Lake, path: str, changes_path: str, definition: Definition, pending: PendingChanges
) -> FewChanges | None:
    """Read the changes of a batch, if this process may merge them into the replica; None if Spark has to merge them.

    `path` is the replica, `changes_path` its change history.
    """
    needs_replica_rows = bool(definition.soft_delete_columns or pending.count("update", "delete"))
    if needs_replica_rows and not definition.key:
        return None
    is_truncated = pending.truncated_at is not None
    if is_truncated and definition.soft_delete_columns:
        return None  # The TRUNCATE changes all rows of the replica, however few the changes are.
    type_by_column = dict(definition.columns)
    key_types = [type_by_column[name] for name in definition.key] if needs_replica_rows else []
    replica_size = lake.records.size_bytes(path) if needs_replica_rows and not is_truncated else 0
    merge_bytes = estimate_merge_bytes(pending.size_bytes, replica_size)
    committer = lake.policy.choose_in_process_committer(
        path, definition.names, merge_bytes, overwrite=is_truncated, key_types=key_types
    )
    if committer is None:
        return None
    rows = lake.read_slice_rows(changes_path, pending.slice_ends, pending.size_bytes, must_exist=True)
    return None if rows is None else FewChanges(rows, committer)


@dataclass(frozen=True)
class FewChangesWriter:
    """Writes the net change of few changes to one replica table, in one commit."""

    lake: Lake
    few_changes: FewChanges
    path: str
    definition: Definition
    pending: PendingChanges
    end: int

    def apply(self) -> TableResult:
        """Apply the changes after the last TRUNCATE: an append if all are INSERTs, else a MERGE."""
        add_costs(DRIVER, 1, self.few_changes.rows.nbytes)
        changes = self._select_effective_changes(self.few_changes.rows)
        if not (self.pending.count("update", "delete") or self.definition.soft_delete_columns):
            rows = self._make_new_rows(changes, self.definition.names)
            return self._append(rows, {"inserted": rows.num_rows}, has_changes=bool(rows.num_rows))
        return self._merge_by_key(changes)

    def _select_effective_changes(self, changes: pa.Table) -> pa.Table:
        return changes.filter(pa.array(self.pending.extent.mask_effective_changes(changes)))

    def _merge_by_key(self, changes: pa.Table) -> TableResult:
        """Merge the net change of each key."""
        key, columns, pending = self.definition.key, self.definition.names, self.pending
        schema = pa.schema([(name, struct_field(changes["new"], name).type) for name in columns])
        key_schema, soft_delete_columns = (
            pa.schema([schema.field(name) for name in key]),
            self.definition.soft_delete_columns,
        )
        keyed_changes = make_keyed_changes(
            [changes],
            key_schema,
            sorted(pending.unsent_columns),
            pending.extent,
            soft_delete_columns=soft_delete_columns,
        )
        assert keyed_changes is not None
        present_keys = self._find_present_keys(keyed_changes)
        outcome = keyed_changes.decide([present_keys.living_numbers], empties_replica=False)
        merge = Merge.from_numbered_columns(
            key, columns, pending.unsent_columns, [name for name, _ in soft_delete_columns]
        )
        source = self._make_merge_source(changes, schema, keyed_changes, present_keys, outcome.net, merge)
        counts = pending.adjust_row_counts(outcome.net.count_rows(outcome.had_row))
        if len(present_keys.numbers):
            commit = Commit(self.end, expected_version=pending.head.version)
            self.few_changes.committer.merge(self.path, source, merge, commit)
            return make_batch_result(self.lake, self.path, pending, self.end, **counts)
        upserts = source.filter(pc.equal(source["action"], "upsert"))
        rows = pa.table({name: upserts[merge.value_source_by_column[name]] for name in columns})
        return self._append(rows, counts, has_changes=outcome.has_row_changes)

    def _find_present_keys(self, keyed_changes: KeyedChanges) -> PresentKeys:
        """Find the rows of the replica that have one of the keys; none after a TRUNCATE."""
        if self.pending.truncated_at:
            return PresentKeys.empty(keyed_changes.keys)
        return keyed_changes.find_present_keys(
            lambda keys: self.few_changes.find_present_keys(self.path, keys, self.definition.deleted_column)
        )

    def _make_merge_source(
        self,
        changes: pa.Table,
        schema: pa.Schema,
        keyed_changes: KeyedChanges,
        present_keys: PresentKeys,
        net_change: NetChange,
        merge: Merge,
    ) -> pa.Table:
        """Make the rows that the MERGE reads: the net change, in the columns that `merge` names."""
        source = make_merge_source(net_change, retain_ended=keyed_changes.end_metadata is not None)
        # An UPDATE may give a row another key, and leave out TOASTed values that it does not change. Take these values
        # from the replica's row with the former key.
        former_key_indices = np.flatnonzero(source.base_keys != NONE)
        numbers, former_rows = self.few_changes.committer.find_rows(
            self.path, keyed_changes.keys.take(pa.array(source.base_keys[former_key_indices])), schema
        )
        former_row_indices = np.full(len(source.keys), NONE)
        former_row_indices[former_key_indices[numbers]] = changes.num_rows + np.arange(len(numbers))
        rows = pa.concat_tables([self._make_new_rows(changes, schema.names), former_rows])

        end_metadata = keyed_changes.make_ended_metadata(source.end_changes, self._stamp)

        def take_values(name: str) -> pa.ChunkedArray:
            row_indices = source.changes_by_column.get(name, source.last_changes)
            row_indices = np.where(row_indices == NONE, former_row_indices, row_indices)
            values = rows[name].take(pa.array(row_indices, mask=row_indices == NONE))
            return (
                pc.if_else(pa.array(source.end_changes != NONE), end_metadata[name].cast(values.type), values)
                if name in end_metadata.column_names
                else values
            )

        keys = present_keys.take_stored_keys(keyed_changes.keys).take(pa.array(source.keys))
        return pa.table(
            {
                **{source_column: keys[name] for name, source_column in merge.key_source_by_column.items()},
                **{
                    source_column: take_values(name)
                    for name, source_column in merge.value_source_by_column.items()
                },
                **{
                    source_column: source.retains_value_by_column[name]
                    for name, source_column in merge.unsent_flag_by_column.items()
                },
                "action": source.actions,
            }
        )

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.definition.metadata_column(APPLIED_AT))

    def _make_new_rows(self, changes: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Make the new row of each change, with the time at which it is applied. The row of a DELETE has only NULLs."""
        rows = pa.table({name: struct_field(changes["new"], name) for name in columns})
        return self._stamp.set_time(rows)

    def _append(self, rows: pa.Table, counts: Mapping[str, int], *, has_changes: bool) -> TableResult:
        """Append the rows, or replace the replica by them after a TRUNCATE.

        `has_changes` is False if there is nothing to append. A TRUNCATE is committed nevertheless.
        """
        is_truncated = self.pending.truncated_at is not None
        if has_changes or is_truncated:
            commit = Commit(self.end, overwrite=is_truncated, expected_version=self.pending.head.version)
            self.few_changes.committer.write(self.path, rows, commit)
        return make_batch_result(self.lake, self.path, self.pending, self.end, **counts)
