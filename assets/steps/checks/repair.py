"""Repair: makes replicas equal to the publisher's filtered tables, by replacing the rows that differ.

At the LSN of a new snapshot, the segments (parts of the rows) that differ are read from both sides
(`pgsieve.assets.steps.checks.comparison`). A row that one side has more often is deleted from the replica, and inserted
as often as the publisher has it. This is one Delta commit for each table. If a replica keeps deleted rows, a row is not
deleted, but marked as deleted.

The position of the replica (the LSN up to which it has all changes) stays the same, because the replica had reached the
snapshot's LSN before. So later changes are still applied, and a repair can be repeated. After the repair, the table's
change history counts as incomplete, and the versions of its rows (`history: scd2`) begin anew. Then the newest cut gets
the new versions: a cut is an LSN, and for each replica the Delta version that equals the publisher's table at this LSN.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.merging import make_keyless_clauses, merge_by_spark
from pgsieve.assets.steps.apply.replica_tables import apply, renew_cut
from pgsieve.assets.steps.checkpoint import checkpoint
from pgsieve.assets.steps.checks.comparison import TableSides
from pgsieve.assets.steps.checks.consistency import (
    ALTERED_PROBLEM,
    REWRITTEN_PROBLEM,
    OnApplied,
    SubscriptionAtLsn,
    TableNames,
    hold_at_one_lsn,
    ignore_applied,
    repeat_for_altered_tables,
)
from pgsieve.assets.steps.checks.difference import OCTETS, add_octets, count_differing_rows
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observations import aggregate_metrics
from pgsieve.assets.steps.records.columns import get_struct_field
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.changes.deleted_rows import DELETED
from pgsieve.decoding.changes.metadata_columns import metadata_type
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.merge import Clauses, Merge
from pgsieve.resources.lake.delta.records import REPAIRED_KEY, quote_name
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class RepairResult:
    """The result for one replica.

    - `inserted`, `deleted`: the numbers of rows
    - `version`: the Delta version for the cut; None if the replica has changes from after the LSN, or was put back to
      an earlier version meanwhile
    - `problem`: the reason why nothing was repaired
    """

    schema: str
    table: str
    lsn: int
    inserted: int = 0
    deleted: int = 0
    version: int | None = None
    problem: str | None = None


def repair(
    subscription: Subscription,
    lake: Lake,
    names: Collection[Name],
    log: Log,
    receive_applied: OnApplied = ignore_applied,
) -> list[RepairResult]:
    """Make these replicas equal to the publisher's tables at one LSN.

    `receive_applied` gets what was applied to reach the LSN. A result may have a problem, for example if there is no such
    table. If a table is altered or rewritten while it is read, it is repaired at a later LSN.
    """
    final_result_by_table: dict[Name, RepairResult] = {}

    def repair_tables(names: TableNames) -> list[Name]:
        with hold_at_one_lsn(subscription, lake, log) as subscription_at_lsn:
            receive_applied(subscription_at_lsn.applied)
            result_by_table = {name: _repair_table(subscription_at_lsn, name, log) for name in names or ()}
            version_by_table = {
                name: result.version for name, result in result_by_table.items() if result.version is not None
            }
            is_any_changed = any(result.inserted or result.deleted for result in result_by_table.values())
            if is_any_changed:
                # `apply` also begins the versions of the rows anew. If this process dies here, the next run does that.
                apply(subscription, lake, log)
            renew_cut(lake, subscription, version_by_table, has_same_rows=not is_any_changed)
        final_result_by_table.update(result_by_table)
        return [
            name
            for name, result in result_by_table.items()
            if result.problem in {ALTERED_PROBLEM, REWRITTEN_PROBLEM}
        ]

    repeat_for_altered_tables(repair_tables, names)
    return list(final_result_by_table.values())


def _repair_table(subscription_at_lsn: SubscriptionAtLsn, name: Name, log: Log) -> RepairResult:
    """Repair one replica."""
    lsn, lake = subscription_at_lsn.snapshot.lsn, subscription_at_lsn.lake
    if problem := subscription_at_lsn.find_problem(name):
        return RepairResult(*name, lsn, problem=problem)
    replicated_table = subscription_at_lsn.table_by_name[name]
    if not replicated_table.columns:
        return RepairResult(*name, lsn, problem="it has no columns, so its rows cannot be told apart")
    log(f"repairing {replicated_table.table.quoted_name} of {subscription_at_lsn.subscription.name}")
    with subscription_at_lsn.translate_errors(name, "repair"):
        sides = subscription_at_lsn.make_sides(name)
        row_counts = _find_differing_row_counts(sides)
        # A table that was rewritten meanwhile may have been read as empty. A repair would then remove all rows of the
        # replica.
        if row_counts is not None and subscription_at_lsn.find_rewritten_tables([name]):
            return RepairResult(*name, lsn, problem=REWRITTEN_PROBLEM)
        inserted, deleted = (0, 0) if row_counts is None else _merge_rows(sides, row_counts, lsn)
        head = lake.records.head(sides.path)
        # If another writer has restored the replica meanwhile, the cut must not name the version after the RESTORE.
        # Otherwise later checks would not notice the RESTORE.
        is_intact = head.version == sides.version or not lake.records.is_restored(sides.path, sides.version)
    version = head.version if is_intact and (head.position or 0) <= lsn else None
    return RepairResult(*name, lsn, inserted, deleted, version)


def _find_differing_row_counts(sides: TableSides) -> DataFrame | None:
    """Find the rows that one side has more often, as `count_differing_rows` does. None if the sides are equal."""
    segments = sides.find_differing_segments()
    if segments is not None and not segments.is_selected.any():
        return None
    columns = [c.name for c in sides.columns]
    row_counts = checkpoint(count_differing_rows(*sides.read_frames(segments), columns))
    return None if row_counts.isEmpty() else row_counts


def _merge_rows(sides: TableSides, row_counts: DataFrame, lsn: int) -> tuple[int, int]:
    """Correct the rows of a replica in one commit; returns how many rows were inserted and deleted."""
    totals = aggregate_metrics(
        row_counts, [F.sum("expected").alias("expected"), F.sum("actual").alias("actual")]
    )
    source, clauses = (
        _make_soft_merge(sides, row_counts)
        if sides.soft_delete_columns
        else _make_hard_merge(sides, row_counts)
    )
    has_deletion_vectors = bool(sides.lake.records.has_deletion_vectors(sides.path))
    with sides.lake.idempotent_writes(None, can_mark_rows=has_deletion_vectors, metadata={REPAIRED_KEY: lsn}):
        merge_by_spark(sides.lake, sides.path, source, clauses, sides.version)
    reach(Failpoint.REPLICA_COMMITTED)
    return int(totals["expected"]), int(totals["actual"])


def _make_hard_merge(sides: TableSides, row_counts: DataFrame) -> tuple[DataFrame, Clauses]:
    """Make the source and the clauses of a MERGE that deletes rows and inserts rows."""
    removed_rows = row_counts.where("actual > 0").select(F.lit("delete").alias("action"), "row")
    added_rows = row_counts.where("expected > 0").select(
        F.lit("insert").alias("action"), "row", F.explode(F.sequence(F.lit(1), F.col("expected").cast("int")))
    )
    source = removed_rows.unionByName(added_rows.select("action", "row"))
    return source, make_keyless_clauses(source, [c.name for c in sides.columns])


def _make_soft_merge(sides: TableSides, row_counts: DataFrame) -> tuple[DataFrame, Clauses]:
    """Make the source and the clauses of a MERGE by key. It marks rows as deleted, or makes a deleted row live again."""
    kind_by_column, names = dict(sides.soft_delete_columns), [c.name for c in sides.columns]
    merge = Merge.from_numbered_columns(
        [c.name for c in sides.columns if c.is_key], [*names, *kind_by_column], (), list(kind_by_column)
    )
    end_metadata = {"deleted_at": F.current_timestamp(), "filtered": F.lit(False)}

    def make_rows(side: str, action: str) -> DataFrame:
        metadata = end_metadata if action == "end" else {"filtered": F.lit(False)}
        values = {name: get_struct_field("row", name) for name in names}
        values |= {
            name: metadata.get(kind, F.lit(None)).cast(metadata_type(kind).spark_type)
            for name, kind in kind_by_column.items()
        }
        values |= {name: F.lit(action == "end") for name, kind in kind_by_column.items() if kind == DELETED}
        return row_counts.where(f"{side} > 0").select(
            *(values[name].alias(column) for name, column in merge.key_source_by_column.items()),
            *(values[name].alias(column) for name, column in merge.value_source_by_column.items()),
            F.lit(action).alias("action"),
        )

    key_columns, added_rows = list(merge.key_source_by_column.values()), make_rows("expected", "upsert")
    removed_rows = add_octets(make_rows("actual", "end"), key_columns, unify_zeros=True)
    ended_rows = removed_rows.join(add_octets(added_rows, key_columns, unify_zeros=True), OCTETS, "left_anti")
    return added_rows.unionByName(ended_rows.drop(OCTETS)), merge.make_clauses(quote_name)
