"""Applies a batch to one replica table by Spark: one commit with the net change of the batch.

In: the transformed changes (`SparkChanges`). Out: `TableResult`. `in_process` does the same for few changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.by_files import empties_replica
from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch
from pgsieve.assets.steps.apply.merging import keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, batch_result
from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.resources.lake.delta.merge import Clauses, Merge
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class ReplicaWriter:
    """Writes the net change of a batch to one replica table, in one commit."""

    lake: Lake
    path: str
    definition: Definition
    pending: PendingChanges
    end: int
    size: int
    #: The search for conflicts; None if the batch was searched already.
    search: ConflictSearch | None

    def apply_by_key(self, changes: SparkChanges) -> TableResult:
        """Apply to a table with a key: by an append if no row of the replica changes, otherwise by a MERGE.

        Raises KeyConflictError.
        """
        pending, names, soft_delete_columns = (
            self.pending,
            self.definition.names,
            self.definition.soft_delete_columns,
        )
        keyed = changes.keyed_changes()
        present = changes.present(keyed)
        empties = empties_replica(self.definition, pending)
        decided = keyed.decide([present.living], empties=empties)
        if self.search:
            self.search.refuse_change(decided.conflict)
        if not (pending.count("update", "delete") or soft_delete_columns):
            return self._append_inserted(changes, len(keyed.since_truncate.operations))
        if empties:
            present = PresentKeys.empty(keyed.keys)
        merge = Merge.from_numbered_columns(
            self.definition.key, names, pending.unchanged, [name for name, _ in soft_delete_columns]
        )
        source = changes.merge_source(keyed, present, decided.net, merge)
        counts = pending.row_counts(decided.net.counts(decided.before))
        if len(present.numbers) or keyed.truncated_metadata is not None:
            is_merged = self._merge(checkpoint(source), merge.clauses(quote_name))
            return self._result(**(counts if is_merged else {}))
        rows = source.where("action = 'upsert'")
        rows = rows.select(*(F.col(v).alias(name) for name, v in merge.value_source_by_column.items()))
        return self._append(rows, counts, changes=decided.changes_rows)

    def _merge(self, source: DataFrame, clauses: Clauses) -> Mapping[str, int]:
        return merge_by_spark(self.lake, self.path, source, clauses, self._base)

    def apply_by_row(self, changes: SparkChanges) -> TableResult:
        """Apply to a table without a key. If the table has several equal rows, a DELETE removes only one of them."""
        pending = self.pending
        if not pending.count("update", "delete"):
            return self._append_inserted(changes, None)
        digested = changes.keyless_changes()
        outcome = digested.net_change(changes.count_rows)
        net = outcome.net
        new_rows = changes.rows_at("new", digested.places[net.inserted], np.ones(len(net.inserted), np.int64))
        deleted, inserted = int(net.deleted.sum()), len(net.inserted)
        if not deleted:
            counts = {"inserted": inserted, "missing": net.missing}
            return self._append(new_rows.select("row.*"), counts, changes=bool(inserted))
        # A MERGE cannot delete only some of several equal rows. So it deletes all of them, and inserts those that remain.
        deleted_rows = np.flatnonzero(net.deleted)
        places, remaining = digested.places_of_old(deleted_rows), (outcome.counts - net.deleted)[deleted_rows]
        all_deleted = changes.rows_at("old", places, np.ones(len(places), np.int64))
        reinserted = changes.rows_at("old", places[remaining > 0], remaining[remaining > 0])
        source = all_deleted.select(F.lit("delete").alias("action"), "row").unionByName(
            reinserted.unionByName(new_rows).select(F.lit("insert").alias("action"), "row")
        )
        is_merged = self._merge(checkpoint(source), keyless_merge(source, self.definition.names))
        counts = {"inserted": inserted, "deleted": deleted, "missing": net.missing}
        return self._result(**(counts if is_merged else {}))

    def _append_inserted(self, changes: SparkChanges, count: int | None) -> TableResult:
        """Append the rows of the effective INSERTs; `count` is their number if it is known."""
        rows = changes.inserted()
        if count is None:
            # The other counts include changes before a TRUNCATE.
            truncated = self.pending.truncated_at is not None
            count = rows.count() if truncated else self.pending.count("insert")
        return self._append(rows, {"inserted": count}, changes=bool(count))

    def _append(self, rows: DataFrame, counts: Mapping[str, int], *, changes: bool) -> TableResult:
        """Append the rows, or replace the replica by them after a TRUNCATE.

        `changes` is False if there is nothing to commit.
        """
        truncated, names = self.pending.truncated_at is not None, self.definition.names
        if changes or truncated:
            commit = Commit(self.end, overwrite=truncated, expected_version=self._base)
            chosen = rows.select(*(F.col(quote_name(c)) for c in names))
            self.lake.write(chosen, self.path, commit, size=self.size)
        return self._result(**counts)

    @property
    def _base(self) -> int:
        """The Delta version from which the batch was planned. If the replica has a later version, the commit fails."""
        return self.pending.head.version

    def _result(self, **counts: int) -> TableResult:
        return batch_result(self.lake, self.path, self.pending, self.end, **counts)
