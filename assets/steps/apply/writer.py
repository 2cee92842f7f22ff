"""Apply to one replica table by Spark: a batch's transformed changes -> its net change, in one commit.

`in_process` does the same with few changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.applied import Applied, Pending, merged, outcome
from pgsieve.assets.steps.apply.equal_rows import (
    exact_values,
    net_rows,
    numbered_rows,
    row_changes,
    same_row,
)
from pgsieve.assets.steps.apply.exact_rows import replayed
from pgsieve.assets.steps.apply.key_conflicts import ConflictSearch
from pgsieve.assets.steps.apply.merging import keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.spark_changes import SparkChanges
from pgsieve.assets.steps.checkpoint import checkpointed
from pgsieve.assets.steps.observed import aggregated
from pgsieve.assets.steps.subscription import Definition
from pgsieve.resources.lake.delta.merge import Clauses, Merge
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.way import column_mapping


@dataclass(frozen=True)
class ReplicaWriter:
    """Brings the net change of a batch into one replica table, in one commit."""

    lake: Lake
    path: str
    definition: Definition
    pending: Pending
    end: int
    size: int
    #: Where the batch has not been looked through for conflicts.
    search: ConflictSearch | None

    def keyed(self, changes: SparkChanges) -> Applied:
        """Apply to a table with a key: append what is surely new, else MERGE. Raises KeyConflictError."""
        pending, key, columns = self.pending, self.definition.key, self.definition.names
        keyed = changes.keyed()
        net, conflict = keyed.net(changes.present(keyed))
        if self.search:
            self.search.refuse_change(keyed, conflict)
        if not pending.sent("update", "delete"):
            return self._append(changes.effective().select("new.*"), pending.sent("insert"))
        merge = Merge.flat(key, columns, pending.unchanged)
        source = changes.merge_source(keyed, net, merge)
        expected = int(np.count_nonzero(net.expected))
        if not expected or pending.truncated_at:
            upserts = source.where("action = 'upsert'")
            rows = upserts.select(*(F.col(v).alias(name) for name, v in merge.values.items()))
            return self._append(rows, int(np.count_nonzero(net.upserted)))
        counts = self._execute(checkpointed(source), merge.clauses(quoted))
        return merged(self.lake, self.path, pending, self.end, counts, expected)

    def _execute(self, source: DataFrame, clauses: Clauses) -> Mapping[str, int]:
        return merge_by_spark(self.lake, self.path, source, clauses, self._base)

    def keyless(self, rows: DataFrame) -> Applied:
        """Apply to a multiset of rows: each change touches exactly one of several equal rows."""
        pending, columns = self.pending, self.definition.names
        if not pending.sent("update", "delete"):
            return self._append(rows.select("new.*"), pending.sent("insert"))
        every = checkpointed(net_rows(rows, columns))
        base = self.lake.current(self.path)
        net, missing = every, 0
        if self._lacks_rows(every, base):
            net, missing = self._replayed(rows, every, base)
        net = net.where("count <> 0")
        count = F.col("count")
        counts = [
            F.coalesce(F.sum(F.greatest(count, F.lit(0))), F.lit(0)).alias("come"),
            F.coalesce(F.sum(F.greatest(-count, F.lit(0))), F.lit(0)).alias("go"),
        ]
        totals = aggregated(net, counts)
        come = _repeated(net.where(count > 0), count)
        if not totals["go"] or pending.truncated_at:
            applied = self._append(come.select("row.*"), int(totals["come"]))
        else:
            applied = self._replace_rows(net, come, base, int(totals["come"]))
        return replace(applied, missing=missing)

    def _held(self, rows: DataFrame, base: DataFrame) -> DataFrame:
        """How many of each of some rows the replica holds, as `held`."""
        columns = self.definition.names
        if self.pending.truncated_at:
            return rows.withColumn("held", F.lit(0))
        kept = base.select(F.struct(*(F.col(quoted(c)).alias(c) for c in columns)).alias("kept"))
        joined = rows.join(kept, same_row(rows, "row", "kept"), "left")
        counted = joined.groupBy(*exact_values(rows, "row")).agg(
            *(F.first(c).alias(c) for c in rows.columns), F.count("kept").alias("held")
        )
        return counted.select(*rows.columns, "held")

    def _lacks_rows(self, net: DataFrame, base: DataFrame) -> bool:
        """Whether some UPDATE or DELETE finds no row, as its INSERT was not published or it was taken out."""
        return bool(self._held(net.where("needed > 0"), base).where("held < needed").limit(1).count())

    def _replayed(self, rows: DataFrame, net: DataFrame, base: DataFrame) -> tuple[DataFrame, int]:
        """The net change where some change finds no row: one change after the other, by numbers of rows."""
        numbered = checkpointed(numbered_rows(net))
        counted = self._held(numbered, base).select("number", "held").orderBy("number").toArrow()
        before_counts: list[int] = counted["held"].to_pylist()
        changes = row_changes(rows, numbered).toArrow()
        counts, missing = replayed(
            list(zip(changes["old"].to_pylist(), changes["new"].to_pylist(), strict=True)), before_counts
        )
        became = pa.table(
            {
                "number": counted["number"],
                "count": pa.array(
                    [now - before for now, before in zip(counts, before_counts, strict=True)], pa.int64()
                ),
            }
        )
        return numbered.join(self.lake.spark.createDataFrame(became), "number").select(
            "row", "count"
        ), missing

    def _replace_rows(self, net: DataFrame, come: DataFrame, replica: DataFrame, came: int) -> Applied:
        """Delete all rows equal to one that goes, and put back those that stay, in one MERGE."""
        columns = self.definition.names
        going = net.where(F.col("count") < 0)
        counted = self._held(going.select("row", "count"), replica)
        stay = _repeated(counted.where(F.col("held") + F.col("count") > 0), F.col("held") + F.col("count"))
        source = (
            going.select(F.lit("delete").alias("action"), "row")
            .unionByName(stay.select(F.lit("insert").alias("action"), "row"))
            .unionByName(come.select(F.lit("insert").alias("action"), "row"))
        )
        # Rows that stay are read from the replica itself: read them before the MERGE begins.
        counts = self._execute(checkpointed(source), keyless_merge(source, columns))
        put_back = counts.get("inserted", 0) - came
        return self._applied(inserted=came, deleted=counts.get("deleted", 0) - put_back)

    def _append(self, rows: DataFrame, count: int) -> Applied:
        truncated, names = self.pending.truncated_at is not None, self.definition.names
        if count or truncated:
            self.lake.write(
                rows.select(*(F.col(quoted(c)) for c in names)),
                self.path,
                position=self.end,
                overwrite=truncated,
                properties=column_mapping(names),
                size=self.size,
                base=self._base,
            )
        return self._applied(inserted=count)

    @property
    def _base(self) -> int:
        """The replica's version that the batch was planned from: it is written to no other."""
        return self.pending.standing.version

    def _applied(self, *, inserted: int = 0, deleted: int = 0) -> Applied:
        return outcome(self.lake, self.path, self.pending, self.end, inserted=inserted, deleted=deleted)


def _repeated(rows: DataFrame, times: Column) -> DataFrame:
    """Each row as often as `times` says."""
    return rows.select("row", F.explode(F.sequence(F.lit(1), times.cast("int"))).alias("copy")).select("row")
