"""Applies a batch of few changes to one replica table by delta-rs, in this process: one commit of their net change.

In: a batch's changes as an Arrow table, in order. Out: `Applied`. It is for tables whose files `by_files` cannot
write. `writer` does the same by Spark, for any number of changes. Raises LakeError.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.apply.applied import Applied, PendingChanges, batch_result, merge_result
from pgsieve.assets.steps.apply.keyed_changes import KeyedChanges, keyed_changes
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.columns import struct_field
from pgsieve.decoding.changes.merge_source import merge_source
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.decoding.changes.net_change import NONE, Mask, NetChange, Numbers
from pgsieve.resources.lake.committers import InProcessCommitter
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.work import DRIVER, add_costs

#: The limit for changes in this process also limits the replica of a MERGE, to this many times the bytes.
MAX_REPLICA_FACTOR = 4


@dataclass(frozen=True)
class FewChanges:
    """A batch's changes in order, and the reader and writer of the replica."""

    rows: pa.Table
    local: LocalRecords

    def present_keys(self, path: str, keys: pa.Table, deleted: str | None) -> Numbers:
        """The numbers of the `keys` that the replica has in a row that is not marked as deleted in the column `deleted`."""
        if deleted is None:
            return self.local.rows_of(path, keys, keys.schema)[0]
        numbers, rows = self.local.rows_of(path, keys, keys.schema.append(pa.field(deleted, pa.bool_())))
        living: Numbers = numbers[~np.asarray(rows[deleted].fill_null(False))]
        return living


def few_changes(
    lake: Lake, path: str, log: str, definition: Definition, pending: PendingChanges
) -> FewChanges | None:
    """A batch's changes, if this process may merge them into the replica; None if Spark has to.

    `path` is the replica, `log` its change history.
    """
    finds_rows = bool(definition.soft_delete_columns or pending.count("update", "delete"))
    if finds_rows and not definition.key:
        return None
    truncated = pending.truncated_at is not None
    if truncated and definition.soft_delete_columns:
        return None  # All rows of the replica change.
    types = dict(definition.columns)
    key = [types[name] for name in definition.key] if finds_rows else []
    replica_size = lake.records.size(path) if finds_rows and not truncated else 0
    # A byte of the replica takes less memory in a MERGE than a byte of the changes.
    size = max(pending.size, replica_size // MAX_REPLICA_FACTOR)
    committer = lake.policy.committer(path, definition.names, size, overwrite=truncated, key=key)
    if not isinstance(committer, InProcessCommitter):
        return None
    rows = lake.slice_rows(log, pending.slice_ends, pending.size, every=True)
    return None if rows is None else FewChanges(rows, committer.local)


@dataclass(frozen=True)
class FewChangesWriter:
    """Writes the net change of few changes to one replica table, in one commit."""

    lake: Lake
    few: FewChanges
    path: str
    definition: Definition
    pending: PendingChanges
    end: int

    @property
    def local(self) -> LocalRecords:
        """The committer."""
        return self.few.local

    def apply(self) -> Applied:
        """Apply the changes after the last TRUNCATE: an append if all are INSERTs, else a MERGE."""
        add_costs(DRIVER, 1, self.few.rows.nbytes)
        changes = self._effective_changes(self.few.rows)
        if not (self.pending.count("update", "delete") or self.definition.soft_delete_columns):
            return self._append(self._rows(changes, self.definition.names), changes.num_rows)
        return self._merge_by_key(changes)

    def _effective_changes(self, changes: pa.Table) -> pa.Table:
        # A slice that was transformed for an earlier copy may have changes that a later copy contains.
        since = pc.greater_equal(changes["commit_lsn"], self.pending.since)
        changes = changes.filter(pc.and_(since, pc.not_equal(changes["operation"], "truncate")))
        if self.pending.truncated_at:
            lsn, ordinal = self.pending.truncated_at
            later = pc.and_(pc.equal(changes["commit_lsn"], lsn), pc.greater(changes["ordinal"], ordinal))
            changes = changes.filter(pc.or_(pc.greater(changes["commit_lsn"], lsn), later))
        return changes

    def _merge_by_key(self, changes: pa.Table) -> Applied:
        """Merge the net change of each key."""
        key, columns, pending = self.definition.key, self.definition.names, self.pending
        schema = pa.schema([(name, struct_field(changes["new"], name).type) for name in columns])
        of_key, slices = pa.schema([schema.field(name) for name in key]), pending.slice_ends
        soft_delete_columns = self.definition.soft_delete_columns
        keyed = keyed_changes(
            [changes], of_key, sorted(pending.unchanged), slices, 0, soft_delete_columns=soft_delete_columns
        )
        assert keyed is not None
        present = self._present_keys(keyed)
        net, _ = keyed.net_change(present)
        merge = Merge.flat(key, columns, pending.unchanged, [name for name, _ in soft_delete_columns])
        source = self._merge_source(changes, schema, keyed, net, merge)
        expected = int(np.count_nonzero(net.expected))
        if (expected or soft_delete_columns) and not pending.truncated_at:
            counts = self.local.merge(self.path, source, merge, self.end, pending.head.version)
            soft_delete_counts = pending.row_counts(net, present) if soft_delete_columns else None
            return merge_result(self.lake, self.path, pending, self.end, counts, expected, soft_delete_counts)
        upserts = source.filter(pc.equal(source["action"], "upsert"))
        return self._append(
            pa.table({name: upserts[merge.values[name]] for name in columns}), upserts.num_rows
        )

    def _present_keys(self, keyed: KeyedChanges) -> Mask:
        """A mask of the keys that the replica has, as far as the changes depend on them."""
        if self.pending.truncated_at:
            return np.zeros(keyed.keys.num_rows + 1, np.bool_)
        return keyed.present_keys(
            lambda keys: self.few.present_keys(self.path, keys, self.definition.deleted_column)
        )

    def _merge_source(
        self, changes: pa.Table, schema: pa.Schema, keyed: KeyedChanges, net: NetChange, merge: Merge
    ) -> pa.Table:
        """The net change as the source of a MERGE."""
        of = merge_source(net, retain_ended=keyed.ended is not None)
        # A row that an UPDATE moved to another key takes values that were not sent from the replica's former row.
        bases = np.flatnonzero(of.base != NONE)
        numbers, base = self.local.rows_of(self.path, keyed.keys.take(pa.array(of.base[bases])), schema)
        base_of = np.full(len(of.keys), NONE)
        base_of[bases[numbers]] = changes.num_rows + np.arange(len(numbers))
        rows = pa.concat_tables([self._rows(changes, schema.names), base])

        endings = keyed.ended_metadata(of.ended, self._stamp)

        def value(name: str) -> pa.ChunkedArray:
            places = of.sent.get(name, of.last)
            places = np.where(places == NONE, base_of, places)
            values = rows[name].take(pa.array(places, mask=places == NONE))
            return (
                pc.if_else(pa.array(of.ended != NONE), endings[name].cast(values.type), values)
                if name in endings.column_names
                else values
            )

        keys = keyed.keys.take(pa.array(of.keys))
        return pa.table(
            {
                **{k: keys[name] for name, k in merge.key.items()},
                **{v: value(name) for name, v in merge.values.items()},
                **{u: of.retains_value[name] for name, u in merge.unknown.items()},
                "action": of.actions,
                "expected": of.expected,
            }
        )

    @property
    def _stamp(self) -> Stamp:
        return Stamp(self.definition.metadata_column(APPLIED_AT))

    def _rows(self, changes: pa.Table, columns: Sequence[str]) -> pa.Table:
        """The new rows of the changes, with the time of the apply; all NULL for a change without a new row."""
        rows = pa.table({name: struct_field(changes["new"], name) for name in columns})
        return self._stamp.apply(rows)

    def _append(self, rows: pa.Table, count: int) -> Applied:
        truncated = self.pending.truncated_at is not None
        if count or truncated:
            commit = Commit(self.end, overwrite=truncated, base=self.pending.head.version)
            self.local.write(self.path, rows, commit)
        return batch_result(self.lake, self.path, self.pending, self.end, inserted=count)
