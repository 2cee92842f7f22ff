"""Applies a batch of few changes to one replica table by delta-rs, in this process: one commit of their net change.

In: a batch's changes as an Arrow table, in order. Out: `TableResult`. Raises LakeError. This module is for replicas whose
files `by_files` cannot write. `writer` does the same by Spark, for any number of changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges, keyed_changes
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, batch_result
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.decoding.changes.merge_source import merge_source
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp, mask_living_rows
from pgsieve.decoding.changes.net_change import NONE, NetChange
from pgsieve.resources.lake.committers import InProcessCommitter
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import DRIVER, add_costs

#: In a MERGE in this process, the replica may have this many times the bytes that the changes may have.
MAX_REPLICA_FACTOR = 4


@dataclass(frozen=True)
class FewChanges:
    """A batch's changes in order (`rows`), and the committer that reads and writes the replica."""

    rows: pa.Table
    committer: InProcessCommitter

    def present_keys(self, path: str, keys: pa.Table, deleted: str | None) -> PresentKeys:
        """The rows of the replica that have one of the keys.

        `deleted` is the name of the column that marks deleted rows; None if the replica does not keep them.
        """
        deleted_field = [] if deleted is None else [pa.field(deleted, pa.bool_())]
        numbers, rows = self.committer.find_rows(path, keys, pa.schema([*keys.schema, *deleted_field]))
        return PresentKeys(
            numbers, rows.select(keys.column_names), np.asarray(mask_living_rows(rows, deleted))
        )


def few_changes(
    lake: Lake, path: str, log: str, definition: Definition, pending: PendingChanges
) -> FewChanges | None:
    """A batch's changes, if this process may merge them into the replica; None if Spark has to.

    `path` is the replica, `log` its change history.
    """
    finds_rows = bool(definition.soft_delete_columns or pending.count("update", "delete"))
    if finds_rows and not definition.key:
        return None
    is_truncated = pending.truncated_at is not None
    if is_truncated and definition.soft_delete_columns:
        return None  # All rows of the replica change.
    types = dict(definition.columns)
    key_types = [types[name] for name in definition.key] if finds_rows else []
    replica_size = lake.records.size_bytes(path) if finds_rows and not is_truncated else 0
    # A byte of the replica takes less memory in a MERGE than a byte of the changes.
    size = max(pending.size, replica_size // MAX_REPLICA_FACTOR)
    committer = lake.policy.choose_in_process_committer(
        path, definition.names, size, overwrite=is_truncated, key=key_types
    )
    if committer is None:
        return None
    rows = lake.read_slice_rows(log, pending.slice_ends, pending.size, must_exist=True)
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
        changes = self._effective_changes(self.few_changes.rows)
        if not (self.pending.count("update", "delete") or self.definition.soft_delete_columns):
            rows = self._rows(changes, self.definition.names)
            return self._append(rows, {"inserted": rows.num_rows}, changes=bool(rows.num_rows))
        return self._merge_by_key(changes)

    def _effective_changes(self, changes: pa.Table) -> pa.Table:
        return changes.filter(pa.array(self.pending.extent.effective_changes(changes)))

    def _merge_by_key(self, changes: pa.Table) -> TableResult:
        """Merge the net change of each key."""
        key, columns, pending = self.definition.key, self.definition.names, self.pending
        schema = pa.schema([(name, struct_field(changes["new"], name).type) for name in columns])
        key_schema, soft_delete_columns = (
            pa.schema([schema.field(name) for name in key]),
            self.definition.soft_delete_columns,
        )
        keyed = keyed_changes(
            [changes],
            key_schema,
            sorted(pending.unchanged),
            pending.extent,
            soft_delete_columns=soft_delete_columns,
        )
        assert keyed is not None
        present = self._present_keys(keyed)
        decided = keyed.decide([present.living], empties=False)
        merge = Merge.from_numbered_columns(
            key, columns, pending.unchanged, [name for name, _ in soft_delete_columns]
        )
        source = self._merge_source(changes, schema, keyed, present, decided.net, merge)
        counts = pending.row_counts(decided.net.counts(decided.before))
        if len(present.numbers):
            commit = Commit(self.end, expected_version=pending.head.version)
            self.few_changes.committer.merge(self.path, source, merge, commit)
            return batch_result(self.lake, self.path, pending, self.end, **counts)
        upserts = source.filter(pc.equal(source["action"], "upsert"))
        rows = pa.table({name: upserts[merge.value_source_by_column[name]] for name in columns})
        return self._append(rows, counts, changes=decided.changes_rows)

    def _present_keys(self, keyed: KeyedChanges) -> PresentKeys:
        """The rows of the replica that have one of the keys; none after a TRUNCATE."""
        if self.pending.truncated_at:
            return PresentKeys.empty(keyed.keys)
        return keyed.present(
            lambda keys: self.few_changes.present_keys(self.path, keys, self.definition.deleted_column)
        )

    def _merge_source(
        self,
        changes: pa.Table,
        schema: pa.Schema,
        keyed: KeyedChanges,
        present: PresentKeys,
        net: NetChange,
        merge: Merge,
    ) -> pa.Table:
        """The net change in the columns of `merge`, as the source of a MERGE."""
        merged = merge_source(net, retain_ended=keyed.end_metadata is not None)
        # If an UPDATE moved a row to another key, the replica's row with the former key has the values that were not sent.
        bases = np.flatnonzero(merged.base != NONE)
        numbers, former_rows = self.few_changes.committer.find_rows(
            self.path, keyed.keys.take(pa.array(merged.base[bases])), schema
        )
        base_rows = np.full(len(merged.keys), NONE)
        base_rows[bases[numbers]] = changes.num_rows + np.arange(len(numbers))
        rows = pa.concat_tables([self._rows(changes, schema.names), former_rows])

        end_metadata = keyed.ended_metadata(merged.ended, self._stamp)

        def value(name: str) -> pa.ChunkedArray:
            places = merged.sent.get(name, merged.last)
            places = np.where(places == NONE, base_rows, places)
            values = rows[name].take(pa.array(places, mask=places == NONE))
            return (
                pc.if_else(pa.array(merged.ended != NONE), end_metadata[name].cast(values.type), values)
                if name in end_metadata.column_names
                else values
            )

        keys = present.stored_keys(keyed.keys).take(pa.array(merged.keys))
        return pa.table(
            {
                **{k: keys[name] for name, k in merge.key_source_by_column.items()},
                **{v: value(name) for name, v in merge.value_source_by_column.items()},
                **{u: merged.retains_value[name] for name, u in merge.unsent_flag_by_column.items()},
                "action": merged.actions,
            }
        )

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.definition.metadata_column(APPLIED_AT))

    def _rows(self, changes: pa.Table, columns: Sequence[str]) -> pa.Table:
        """The new row of each change, with the time of the apply. A DELETE has no new row: all its values are NULL."""
        rows = pa.table({name: struct_field(changes["new"], name) for name in columns})
        return self._stamp.apply(rows)

    def _append(self, rows: pa.Table, counts: Mapping[str, int], *, changes: bool) -> TableResult:
        """Append the rows, or replace the replica by them after a TRUNCATE.

        `changes` is False if there is nothing to commit.
        """
        truncated = self.pending.truncated_at is not None
        if changes or truncated:
            commit = Commit(self.end, overwrite=truncated, expected_version=self.pending.head.version)
            self.few_changes.committer.write(self.path, rows, commit)
        return batch_result(self.lake, self.path, self.pending, self.end, **counts)
