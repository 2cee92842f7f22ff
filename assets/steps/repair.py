"""Repair: replicas are made what the publisher's filtered tables are, by the rows that differ.

At the LSN of a new snapshot the segments that differ are read from both sides (`assets.steps.comparison`), and each
row that one side has oftener is deleted and put back as often as the publisher has it: one Delta commit a table. A
repair moves no position, as the rows are those of the LSN that the replica holds; so it can be repeated, and nothing
that is applied before or after is left out. The newest cut gets the new versions.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from uuid import uuid4

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.checkpoint import checkpointed
from assets.frames.difference import differing_row_counts
from assets.frames.equal_rows import same_row_sql
from assets.frames.observed import aggregated
from assets.steps.comparison import Sides
from assets.steps.consistency import at_one_lsn
from assets.steps.replica_tables import renew_cut
from assets.steps.subscription import Subscription
from assets.steps.table_states import Name
from resources.delta import Lake
from resources.records import quoted

Log = Callable[[str], None]


@dataclass(frozen=True)
class Repaired:
    """What was done to one replica: rows written and rows taken out, and its Delta version.

    `problem` says why the table has to be copied again instead.
    """

    schema: str
    table: str
    lsn: int
    inserted: int = 0
    deleted: int = 0
    version: int = 0
    problem: str | None = None


def repair(subscription: Subscription, lake: Lake, names: Collection[Name], log: Log) -> list[Repaired]:
    """Make the named replicas equal to the publisher's tables at one LSN; unknown names are problems, too."""
    results = []
    with at_one_lsn(subscription, lake, log) as moment:
        for name in names:
            lsn = moment.snapshot.lsn
            if problem := moment.problem(name):
                results.append(Repaired(*name, lsn, problem=problem))
                continue
            if not moment.tables[name].columns:
                results.append(Repaired(*name, lsn, problem="it has no columns by which rows differ"))
                continue
            log(f"repairing {moment.tables[name].table.qualified} of {subscription.name}")
            with moment.refusing(name, "repair"):
                sides = moment.sides(name)
                inserted, deleted = _repair(sides, lsn)
                version = lake.records.version(sides.path)
            results.append(Repaired(*name, lsn, inserted, deleted, version))
        renew_cut(lake, subscription, {(r.schema, r.table): r.version for r in results if r.problem is None})
    return results


def _repair(sides: Sides, lsn: int) -> tuple[int, int]:
    """Bring a replica's rows in order in one commit; how many come and go."""
    chosen = sides.differing()
    if chosen is not None and not chosen.segments.any():
        return 0, 0
    spark, columns = sides.lake.spark, [c.name for c in sides.columns]
    net = checkpointed(differing_row_counts(*sides.frames(chosen), columns))
    totals = aggregated(net, [F.sum("expected").alias("expected"), F.sum("held").alias("held")])
    if totals["expected"] is None:
        return 0, 0
    gone = net.where("held > 0").select(F.lit("delete").alias("action"), "row")
    come = net.where("expected > 0").select(
        F.lit("insert").alias("action"), "row", F.explode(F.sequence(F.lit(1), F.col("expected").cast("int")))
    )
    source = gone.unionByName(come.select("action", "row"))
    view = f"pgsieve_{uuid4().hex}"
    source.createOrReplaceTempView(view)
    listed = ", ".join(quoted(c) for c in columns)
    values = ", ".join(f"s.row.{quoted(c)}" for c in columns)
    vectors = sides.lake.records.has_deletion_vectors(sides.path)
    with sides.lake.committing(None, vectors=vectors, metadata={"repaired": lsn}):
        spark.sql(
            f"merge into delta.{quoted(sides.path)} t using {view} s"
            f" on s.action = 'delete' and {same_row_sql(source, 'row', 't', 's.row')}"
            " when matched then delete"
            f" when not matched and s.action = 'insert' then insert ({listed}) values ({values})"
        ).collect()
    spark.catalog.dropTempView(view)
    return int(totals["expected"]), int(totals["held"])
