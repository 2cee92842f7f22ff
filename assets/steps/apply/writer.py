"""Applies a batch to one replica table by a MERGE or an append: one commit with the net change of the batch.

A batch is the changes that one commit applies, and its net change is what they do together.

In: the batch's changes, which delta-rs merges in this process (`FewChanges`), or Spark (`SparkChanges`). Out: `TableResult`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.by_files import empties_replica
from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch
from pgsieve.assets.steps.apply.merge_rows import ChangesToMerge, MergeRows, Rows
from pgsieve.assets.steps.apply.merging import make_keyless_clauses
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.apply.table_result import PendingChanges, TableResult, make_batch_result
from pgsieve.assets.steps.subscription import Definition
from pgsieve.decoding.changes.keys import PresentKeys
from pgsieve.decoding.changes.metadata_columns import APPLIED_AT, Stamp
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class ReplicaWriter:
    """Writes the net change of a batch to one replica table, in one commit.

    - `end`: the LSN at which the batch ends; None for a repair, which keeps the replica's position
    - `conflict_search`: searches the batch for key conflicts; None if the batch was searched already
    - `metadata`: is added to the user metadata of the commit
    """

    lake: Lake
    path: str
    definition: Definition
    pending: PendingChanges
    end: int | None
    conflict_search: ConflictSearch | None
    metadata: Mapping[str, Any] | None = None

    def apply_by_key(self, changes: ChangesToMerge[Rows]) -> TableResult:
        """Apply the changes to a table with a key, or only INSERTs.

        If no row of the replica changes, this is an append, otherwise a MERGE.

        Raises KeyConflictError.
        """
        pending, soft_delete_columns = self.pending, self.definition.soft_delete_columns
        only_inserts = not (pending.count("update", "delete") or soft_delete_columns)
        if only_inserts and (self.conflict_search is None or not self.definition.key):
            return self._append_inserts(changes, None)
        keyed_changes = changes.read_keyed_changes()
        present_keys = changes.find_present_keys(keyed_changes)
        is_emptied = empties_replica(self.definition, pending)
        outcome = keyed_changes.decide([present_keys.living_numbers], empties_replica=is_emptied)
        if self.conflict_search:
            self.conflict_search.refuse_change(outcome.conflict)
        if only_inserts:
            return self._append_inserts(changes, len(keyed_changes.effective_changes.operations))
        if is_emptied:
            present_keys = PresentKeys.empty(keyed_changes.keys)
        merge = Merge.from_numbered_columns(
            self.definition.key, self.definition.names, [name for name, _ in soft_delete_columns]
        )
        stamp = Stamp(self.definition.metadata_column(APPLIED_AT))
        merge_rows = MergeRows.make(merge, keyed_changes, present_keys, outcome, changes.row_schema, stamp)
        counts = pending.adjust_row_counts(outcome.net.count_rows(outcome.had_row))
        if len(present_keys.numbers) or keyed_changes.truncated_metadata is not None:
            is_merged = changes.merge(merge_rows, keyed_changes, self._make_commit())
            return self._make_result(**(counts if is_merged else {}))
        rows = changes.read_new_rows(merge_rows, keyed_changes)
        return self._append(changes, rows, counts, has_changes=outcome.has_row_changes)

    def apply_by_spark(self, changes: SparkChanges) -> TableResult:
        """Apply changes that Spark reads to a table with or without a key. Raises KeyConflictError."""
        return self.apply_by_key(changes) if self.definition.key else self._apply_by_row(changes)

    def _apply_by_row(self, changes: SparkChanges) -> TableResult:
        """Apply the changes to a table without a key. A DELETE removes only one of several equal rows."""
        pending = self.pending
        if not pending.count("update", "delete"):
            return self._append_inserts(changes, None)
        keyless_changes = changes.read_keyless_changes()
        outcome = keyless_changes.compute_net_change(changes.count_rows)
        net_change = outcome.net_change
        new_rows = changes.read_rows(
            "new",
            keyless_changes.places[net_change.inserting_changes],
            np.ones(len(net_change.inserting_changes), np.int64),
        )
        deleted_count, inserted_count = (
            int(net_change.deletion_counts.sum()),
            len(net_change.inserting_changes),
        )
        if not deleted_count:
            counts = {"inserted": inserted_count, "missing": net_change.missing_count}
            return self._append(changes, new_rows.select("row.*"), counts, has_changes=bool(inserted_count))
        # A MERGE cannot delete only some of several equal rows. So it deletes all of them, and inserts those that remain.
        deleted_rows = np.flatnonzero(net_change.deletion_counts)
        places, remaining_counts = (
            keyless_changes.find_delete_places(deleted_rows),
            (outcome.counts - net_change.deletion_counts)[deleted_rows],
        )
        rows_to_delete = changes.read_rows("old", places, np.ones(len(places), np.int64))
        rows_to_reinsert = changes.read_rows(
            "old", places[remaining_counts > 0], remaining_counts[remaining_counts > 0]
        )
        source = rows_to_delete.select(F.lit("delete").alias("action"), "row").unionByName(
            rows_to_reinsert.unionByName(new_rows).select(F.lit("insert").alias("action"), "row")
        )
        clauses = make_keyless_clauses(source, dict(self.definition.table_columns), self.definition.names)
        merge_metrics = changes.run_merge(source, clauses, self._make_commit())
        counts = {"inserted": inserted_count, "deleted": deleted_count, "missing": net_change.missing_count}
        return self._make_result(**(counts if merge_metrics else {}))

    def _append_inserts(self, changes: ChangesToMerge[Rows], count: int | None) -> TableResult:
        """Append the new rows of the INSERTs after the last TRUNCATE; `count` is their number if it is known."""
        rows = changes.read_inserts()
        if count is None:
            # `pending.count` includes INSERTs before a TRUNCATE.
            is_truncated = self.pending.truncated_at is not None
            count = changes.count(rows) if is_truncated else self.pending.count("insert")
        return self._append(changes, rows, {"inserted": count}, has_changes=bool(count))

    def _append(
        self, changes: ChangesToMerge[Rows], rows: Rows, counts: Mapping[str, int], *, has_changes: bool
    ) -> TableResult:
        """Append the rows, or replace the replica by them after a TRUNCATE.

        `has_changes` is False if the rows change nothing. A TRUNCATE is committed nevertheless.
        """
        is_truncated = self.pending.truncated_at is not None
        if has_changes or is_truncated:
            changes.append(rows, replace(self._make_commit(), overwrite=is_truncated))
        return self._make_result(**counts)

    def _make_commit(self) -> Commit:
        """Make the commit of the batch. It fails if the replica has a later version than when the batch was planned."""
        return Commit(self.end, expected_version=self.pending.head.version, metadata=self.metadata)

    def _make_result(self, **counts: int) -> TableResult:
        return make_batch_result(self.lake, self.path, self.pending, self.end, **counts)
