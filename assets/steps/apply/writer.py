"""Applies a batch to one replica table by Spark: transformed changes -> one commit of their net change.

`in_process` does the same for few changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.applied import Applied, PendingChanges, batch_result, merge_result
from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch
from pgsieve.assets.steps.apply.merging import keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.assets.steps.subscription import Definition
from pgsieve.resources.lake.delta.merge import Clauses, Merge
from pgsieve.resources.lake.delta.records import Commit, quoted
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

    def apply_by_key(self, changes: SparkChanges) -> Applied:
        """Apply to a table with a key: an append if all changes are INSERTs, else a MERGE. Raises KeyConflictError."""
        pending, key, columns = self.pending, self.definition.key, self.definition.names
        soft_delete_columns = self.definition.soft_delete_columns
        keyed = changes.keyed_changes()
        present = changes.present_keys(keyed)
        net, conflict = keyed.net_change(present)
        if self.search:
            self.search.refuse_change(conflict)
        if not (pending.count("update", "delete") or soft_delete_columns):
            return self._append(changes.effective_changes().select("new.*"), pending.count("insert"))
        merge = Merge.flat(key, columns, pending.unchanged, [name for name, _ in soft_delete_columns])
        source = changes.merge_source(keyed, net, merge)
        expected = int(np.count_nonzero(net.expected))
        if not soft_delete_columns and (not expected or pending.truncated_at):
            upserts = source.where("action = 'upsert'")
            rows = upserts.select(*(F.col(v).alias(name) for name, v in merge.values.items()))
            return self._append(rows, int(np.count_nonzero(net.upserted)))
        counts = self._merge(checkpoint(source), merge.clauses(quoted))
        soft_delete_counts = pending.row_counts(net, present) if soft_delete_columns else None
        return merge_result(self.lake, self.path, pending, self.end, counts, expected, soft_delete_counts)

    def _merge(self, source: DataFrame, clauses: Clauses) -> Mapping[str, int]:
        return merge_by_spark(self.lake, self.path, source, clauses, self._base)

    def apply_by_row(self, changes: SparkChanges) -> Applied:
        """Apply to a table without a key: each change removes or adds exactly one of several equal rows."""
        pending = self.pending
        if not pending.count("update", "delete"):
            return self._append(changes.effective_changes().select("new.*"), pending.count("insert"))
        digested = changes.keyless_changes()
        outcome = digested.net_change(changes.count_rows)
        net = outcome.net
        come = changes.rows_at("new", digested.places[net.inserted], np.ones(len(net.inserted), np.int64))
        went, came = int(net.deleted.sum()), len(net.inserted)
        if not went:
            return self._append(come.select("row.*"), came, net.missing)
        # A MERGE deletes all rows that equal a deleted one. Those that have to stay are inserted again.
        going = np.flatnonzero(net.deleted)
        places, stay = digested.places_of_old(going), (outcome.counts - net.deleted)[going]
        gone = changes.rows_at("old", places, np.ones(len(places), np.int64))
        again = changes.rows_at("old", places[stay > 0], stay[stay > 0])
        source = gone.select(F.lit("delete").alias("action"), "row").unionByName(
            again.unionByName(come).select(F.lit("insert").alias("action"), "row")
        )
        counts = self._merge(checkpoint(source), keyless_merge(source, self.definition.names))
        reinserted = counts.get("inserted", 0) - came
        return self._result(inserted=came, deleted=counts.get("deleted", 0) - reinserted, missing=net.missing)

    def _append(self, rows: DataFrame, count: int, missing: int = 0) -> Applied:
        truncated, names = self.pending.truncated_at is not None, self.definition.names
        if count or truncated:
            commit = Commit(self.end, overwrite=truncated, base=self._base)
            chosen = rows.select(*(F.col(quoted(c)) for c in names))
            self.lake.write(chosen, self.path, commit, size=self.size)
        return self._result(inserted=count, missing=missing)

    @property
    def _base(self) -> int:
        """The version of the replica from which the batch was planned: the commit fails if there is a later one."""
        return self.pending.head.version

    def _result(self, **counts: int) -> Applied:
        return batch_result(self.lake, self.path, self.pending, self.end, **counts)
