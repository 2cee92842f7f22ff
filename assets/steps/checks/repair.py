"""Repair: replicas are made what the publisher's filtered tables are, by the rows that differ.

At the LSN of a new snapshot the segments that differ are read from both sides (`pgsieve.assets.steps.checks.comparison`), and each
row that one side has oftener is deleted and put back as often as the publisher has it: one Delta commit a table. A
repair moves no position, as the rows are those of the LSN that the replica holds; so it can be repeated, and nothing
that is applied before or after is left out. The newest cut gets the new versions.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.merging import keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.replica_tables import renew_cut
from pgsieve.assets.steps.checkpoint import checkpointed
from pgsieve.assets.steps.checks.comparison import Sides
from pgsieve.assets.steps.checks.consistency import at_one_lsn
from pgsieve.assets.steps.checks.difference import differing_row_counts
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observed import aggregated
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.lake.lake import Lake


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
    results, versions = [], dict[Name, int]()
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
                standing = lake.records.standing(sides.path)
            results.append(Repaired(*name, lsn, inserted, deleted, standing.version))
            if (standing.position or 0) <= lsn:
                versions[name] = standing.version
        renew_cut(lake, subscription, versions)
    return results


def _repair(sides: Sides, lsn: int) -> tuple[int, int]:
    """Bring a replica's rows in order in one commit; how many come and go."""
    chosen = sides.differing()
    if chosen is not None and not chosen.segments.any():
        return 0, 0
    columns = [c.name for c in sides.columns]
    net = checkpointed(differing_row_counts(*sides.frames(chosen), columns))
    totals = aggregated(net, [F.sum("expected").alias("expected"), F.sum("held").alias("held")])
    if totals["expected"] is None:
        return 0, 0
    gone = net.where("held > 0").select(F.lit("delete").alias("action"), "row")
    come = net.where("expected > 0").select(
        F.lit("insert").alias("action"), "row", F.explode(F.sequence(F.lit(1), F.col("expected").cast("int")))
    )
    source = gone.unionByName(come.select("action", "row"))
    vectors = sides.lake.records.has_deletion_vectors(sides.path)
    with sides.lake.committing(None, vectors=vectors, metadata={"repaired": lsn}):
        merge_by_spark(sides.lake, sides.path, source, keyless_merge(source, columns), sides.version)
    return int(totals["expected"]), int(totals["held"])
