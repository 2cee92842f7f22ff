"""Apply to one replica table: a batch's transformed changes -> its net change, in one commit.

Few rows of a local lake are merged in this process, the others by Spark; both run the same MERGE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.equal_rows import (
    exact_values,
    net_rows,
    numbered_rows,
    replayed,
    row_changes,
    same_row,
)
from pgsieve.assets.steps.apply.merging import FlatChanges, keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.net_change import (
    changed_rows,
    decided_changes,
    net_changes_with_moves,
)
from pgsieve.assets.steps.checkpoint import checkpointed
from pgsieve.assets.steps.observed import aggregated, checkpointed_and_observed
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.records.transformed import TableChanges
from pgsieve.assets.steps.subscription import Definition
from pgsieve.resources.lake.delta_rs import writable
from pgsieve.resources.lake.lake import Lake, column_mapping
from pgsieve.resources.lake.merge import Clauses
from pgsieve.resources.lake.records import Standing, quoted
from pgsieve.resources.lake.way import Way

#: Up to so many changes in a batch, what becomes of their keys is sent to every executor.
BROADCAST_ROWS = 4_000_000


@dataclass(frozen=True)
class Applied:
    """What was done to one replica table: rows by kind, its Delta version with the position, and conflicts seen.

    `missing` counts rows that an UPDATE or DELETE expected and did not find (update_missing and
    delete_missing in PostgreSQL's terms, section 29.8), `insert_exists` and `update_exists` changes that met a row of
    their key; the first is of the transaction at `conflict_lsn`. `damaged` says that the problem is a file that is missing,
    `overrun` that another process works on the table, which may lack the batch.
    """

    schema: str
    table: str
    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    truncated: bool = False
    missing: int = 0
    insert_exists: int = 0
    update_exists: int = 0
    conflict_lsn: int | None = None
    standing: Standing = field(default_factory=Standing)
    problem: str | None = None
    damaged: bool = False
    overrun: bool = False

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.schema, self.table


@dataclass(frozen=True)
class Pending:
    """A table's changes in the slices that its replica lacks, oldest first; `standing` is where the replica was then."""

    slices: Sequence[TableChanges]
    standing: Standing

    @property
    def name(self) -> Name:
        """(schema, table)."""
        return self.slices[0].name

    @property
    def size(self) -> int:
        """At most so many bytes of messages."""
        return sum(c.size for c in self.slices)

    @property
    def truncated_at(self) -> tuple[int, int] | None:
        """The order key of the last TRUNCATE; changes before it have no effect."""
        since = (self.standing.position or 0, -1)
        return max(
            (c.truncated_at for c in self.slices if c.truncated_at and c.truncated_at > since), default=None
        )

    @property
    def key_changes(self) -> int:
        """How many UPDATEs move a row to another key."""
        return sum(c.key_changes for c in self.slices)

    @property
    def unchanged(self) -> frozenset[str]:
        """The columns that some change left out as unchanged."""
        return frozenset(column for c in self.slices for column in c.unchanged)

    def sent(self, *operations: str) -> int:
        """How many changes of these kinds there are, also before a TRUNCATE."""
        return sum(c.sent.get(o, 0) for c in self.slices for o in operations)


@dataclass(frozen=True)
class ReplicaWriter:
    """Brings the net change of a batch into one replica table, in one commit."""

    lake: Lake
    path: str
    definition: Definition
    pending: Pending
    end: int
    size: int

    def keyed(self, rows: DataFrame) -> Applied:
        """Apply to a table with a key: append what is surely new, else MERGE."""
        pending, key, columns = self.pending, self.definition.key, self.definition.names
        if not pending.sent("update", "delete"):
            return self._append(rows.select("new.*"), pending.sent("insert"))
        flat = FlatChanges(key, columns, pending.unchanged)
        types = dict(self.definition.columns)
        way = self.lake.way(self.path, columns, self.size, key=[types[name] for name in key])
        slices = [c.slice for c in pending.slices]
        if pending.key_changes:
            replica = self.lake.current(self.path)
            base = replica.limit(0) if pending.truncated_at else replica
            decided = net_changes_with_moves(rows, base, key, columns, pending.unchanged)
        else:
            decided = decided_changes(rows, key, pending.unchanged, slices)
        totals: Mapping[str, int] = {}
        if way is Way.SPARK:
            decided, totals = checkpointed_and_observed(decided, _counts())
        net = decided
        if not pending.key_changes:
            few = pending.sent("insert", "update", "delete") <= BROADCAST_ROWS
            net = changed_rows(decided, rows, key, columns, pending.unchanged, slices, few=few)
        if way is Way.IN_PROCESS:
            return self._keyed_locally(flat, writable(flat.of(net).toArrow()))
        expected = totals["expected"] or 0
        if not expected or pending.truncated_at:
            upserts = net.where(F.col("action") == "upsert").select("row.*")
            return self._append(upserts, totals["upserts"] or 0)
        return self._merged(self._execute(flat.of(net), flat.merge.clauses(quoted)), expected)

    def _keyed_locally(self, flat: FlatChanges, net: pa.Table) -> Applied:
        """The same for few rows, which pass through this process."""
        local = self.lake.local
        assert local is not None
        expected = pc.sum(net["expected"]).as_py() or 0
        if expected and not self.pending.truncated_at:
            counts = local.merge(self.path, net, flat.merge, self.end, self._base)
            return self._merged(counts, expected)
        upserts = net.filter(pc.equal(net["action"], "upsert"))
        rows = pa.table({name: upserts[value] for name, value in flat.merge.values.items()})
        truncated = self.pending.truncated_at is not None
        if rows.num_rows or truncated:
            local.write(self.path, rows, self.end, overwrite=truncated, base=self._base)
        return self._applied(inserted=rows.num_rows)

    def _execute(self, source: DataFrame, clauses: Clauses) -> Mapping[str, int]:
        return merge_by_spark(self.lake, self.path, source, clauses, self._base)

    def _merged(self, counts: Mapping[str, int], expected: int) -> Applied:
        matched = counts.get("updated", 0) + counts.get("deleted", 0)
        return self._applied(**counts, missing=max(0, expected - matched) if counts else 0)

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

    def _applied(self, *, inserted: int = 0, updated: int = 0, deleted: int = 0, missing: int = 0) -> Applied:
        standing = self.lake.records.standing(self.path)
        # Where there was nothing to write, what another process wrote is not the batch.
        if (standing.position or 0) < self.end:
            standing = self.pending.standing
        return Applied(
            *self.pending.name,
            inserted=inserted,
            updated=updated,
            deleted=deleted,
            truncated=self.pending.truncated_at is not None,
            missing=missing,
            standing=standing,
        )


def _counts() -> list[Column]:
    """How many keys are expected in the replica, and how many rows exist afterwards."""
    upsert = F.col("action") == "upsert"
    return [
        F.sum(F.when(F.col("expected"), 1).otherwise(0)).alias("expected"),
        F.sum(F.when(upsert, 1).otherwise(0)).alias("upserts"),
    ]


def _repeated(rows: DataFrame, times: Column) -> DataFrame:
    """Each row as often as `times` says."""
    return rows.select("row", F.explode(F.sequence(F.lit(1), times.cast("int"))).alias("copy")).select("row")
