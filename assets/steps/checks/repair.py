"""Repair: makes replicas equal to the publisher's filtered tables by rewriting the rows that differ.

At the LSN of a new snapshot the segments that differ are read from both sides
(`pgsieve.assets.steps.checks.comparison`). A row whose number of copies differs is deleted, and inserted
as often as the publisher has it: one Delta commit per table. In a replica that keeps deleted rows, the row is marked as
deleted instead of deleted. A repair does not move the replica's position, which has reached that LSN before. So it can
be repeated, and no change is left out. Then histories of rows are brought up to date, and the newest cut names the new
versions.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.merging import keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.replica_tables import apply, renew_cut
from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.assets.steps.checks.comparison import TableSides
from pgsieve.assets.steps.checks.consistency import (
    ALTERED,
    REWRITTEN,
    Names,
    SubscriptionAtLsn,
    at_one_lsn,
    retry_altered,
)
from pgsieve.assets.steps.checks.difference import OCTETS, add_octets, differing_row_counts
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observations import aggregate_metrics
from pgsieve.assets.steps.records.columns import field
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.changes.deleted_rows import DELETED
from pgsieve.decoding.changes.metadata_columns import metadata_type
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.merge import Clauses, Merge
from pgsieve.resources.lake.delta.records import REPAIRED, quoted
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class RepairResult:
    """The result for one replica: the numbers of rows inserted and deleted, and the Delta version for the cut.

    The version is None if the replica is beyond the LSN, or was put back meanwhile. `problem` says why nothing was
    repaired.
    """

    schema: str
    table: str
    lsn: int
    inserted: int = 0
    deleted: int = 0
    version: int | None = None
    problem: str | None = None


def repair(subscription: Subscription, lake: Lake, names: Collection[Name], log: Log) -> list[RepairResult]:
    """Make the named replicas equal to the publisher's tables at one LSN; a result may have a problem, as for unknown names.

    A table that is altered or rewritten while it is read is repaired at a later LSN.
    """
    results: dict[Name, RepairResult] = {}

    def repair_tables(names: Names) -> list[Name]:
        with at_one_lsn(subscription, lake, log) as moment:
            results_of_attempt = {name: _repair_table(moment, name, log) for name in names or ()}
            versions = {
                name: repaired.version
                for name, repaired in results_of_attempt.items()
                if repaired.version is not None
            }
            if any(repaired.inserted or repaired.deleted for repaired in results_of_attempt.values()):
                # The apply also brings histories up to date. If this process dies here, the next run does it.
                apply(subscription, lake, log)
            renew_cut(lake, subscription, versions)
        results.update(results_of_attempt)
        return [
            name for name, repaired in results_of_attempt.items() if repaired.problem in {ALTERED, REWRITTEN}
        ]

    retry_altered(repair_tables, names)
    return list(results.values())


def _repair_table(moment: SubscriptionAtLsn, name: Name, log: Log) -> RepairResult:
    lsn, lake = moment.snapshot.lsn, moment.lake
    if problem := moment.problem(name):
        return RepairResult(*name, lsn, problem=problem)
    table = moment.tables[name]
    if not table.columns:
        return RepairResult(*name, lsn, problem="it has no columns, so its rows cannot be told apart")
    log(f"repairing {table.table.qualified} of {moment.subscription.name}")
    with moment.translate_errors(name, "repair"):
        sides = moment.sides(name)
        net = _differing_rows(sides)
        # A rewritten table may have been read as empty: nothing is written then, so that the replica's rows stay.
        if net is not None and moment.rewritten_tables([name]):
            return RepairResult(*name, lsn, problem=REWRITTEN)
        inserted, deleted = (0, 0) if net is None else _merge(sides, net, lsn)
        head = lake.records.head(sides.path)
        # A cut must not name a version after a RESTORE: later checks would miss the RESTORE.
        is_whole = head.version == sides.version or not lake.records.is_restored(sides.path, sides.version)
    version = head.version if is_whole and (head.position or 0) <= lsn else None
    return RepairResult(*name, lsn, inserted, deleted, version)


def _differing_rows(sides: TableSides) -> DataFrame | None:
    """The rows that one side has more often, as `differing_row_counts`; None if the sides are equal."""
    segments = sides.differing_segments()
    if segments is not None and not segments.segments.any():
        return None
    columns = [c.name for c in sides.columns]
    net = checkpoint(differing_row_counts(*sides.frames(segments), columns))
    return None if net.isEmpty() else net


def _merge(sides: TableSides, net: DataFrame, lsn: int) -> tuple[int, int]:
    """Correct a replica's rows in one commit; returns the numbers of rows inserted and deleted."""
    totals = aggregate_metrics(net, [F.sum("expected").alias("expected"), F.sum("actual").alias("actual")])
    source, clauses = _soft_merge(sides, net) if sides.soft_delete_columns else _hard_merge(sides, net)
    vectors = bool(sides.lake.records.has_deletion_vectors(sides.path))
    with sides.lake.idempotent_writes(None, vectors=vectors, metadata={REPAIRED: lsn}):
        merge_by_spark(sides.lake, sides.path, source, clauses, sides.version)
    reach(Failpoint.REPLICA_COMMITTED)
    return int(totals["expected"]), int(totals["actual"])


def _hard_merge(sides: TableSides, net: DataFrame) -> tuple[DataFrame, Clauses]:
    """The source and clauses of the MERGE that deletes and inserts rows."""
    removed_rows = net.where("actual > 0").select(F.lit("delete").alias("action"), "row")
    added_rows = net.where("expected > 0").select(
        F.lit("insert").alias("action"), "row", F.explode(F.sequence(F.lit(1), F.col("expected").cast("int")))
    )
    source = removed_rows.unionByName(added_rows.select("action", "row"))
    return source, keyless_merge(source, [c.name for c in sides.columns])


def _soft_merge(sides: TableSides, net: DataFrame) -> tuple[DataFrame, Clauses]:
    """The source and clauses of the MERGE by key that marks rows as deleted; an insert may revive a deleted row."""
    kinds, names = dict(sides.soft_delete_columns), [c.name for c in sides.columns]
    merge = Merge.flat([c.name for c in sides.columns if c.is_key], [*names, *kinds], (), list(kinds))
    end_metadata = {"deleted_at": F.current_timestamp(), "filtered": F.lit(False)}

    def rows(side: str, action: str) -> DataFrame:
        metadata = end_metadata if action == "end" else {"filtered": F.lit(False)}
        values = {name: field("row", name) for name in names}
        values |= {
            name: metadata.get(kind, F.lit(None)).cast(metadata_type(kind).spark)
            for name, kind in kinds.items()
        }
        values |= {name: F.lit(action == "end") for name, kind in kinds.items() if kind == DELETED}
        return net.where(f"{side} > 0").select(
            *(values[name].alias(k) for name, k in merge.key.items()),
            *(values[name].alias(v) for name, v in merge.values.items()),
            F.lit(action).alias("action"),
        )

    key, added_rows = list(merge.key.values()), rows("expected", "upsert")
    removed_rows = add_octets(rows("actual", "end"), key, one_zero=True)
    ended_rows = removed_rows.join(add_octets(added_rows, key, one_zero=True), OCTETS, "left_anti")
    return added_rows.unionByName(ended_rows.drop(OCTETS)), merge.clauses(quoted)
