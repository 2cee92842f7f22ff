"""Repair: makes replicas equal to the publisher's filtered tables, by the rows that differ.

At the LSN of a new snapshot the segments that differ are read from both sides
(`pgsieve.assets.steps.checks.comparison`). Each row that one side has more often is deleted and inserted as
often as the publisher has it: one Delta commit per table. A repair moves no position, as the rows are those
of the replica's LSN. So it can be repeated, and no change that is applied before or after it is left out. The
newest cut gets the new versions.
"""

from collections.abc import Collection
from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.merging import keyless_merge, merge_by_spark
from pgsieve.assets.steps.apply.replica_tables import renew_cut
from pgsieve.assets.steps.checkpoint import checkpointed
from pgsieve.assets.steps.checks.comparison import Sides
from pgsieve.assets.steps.checks.consistency import (
    ALTERED,
    REWRITTEN,
    Moment,
    Names,
    at_one_lsn,
    while_altered,
)
from pgsieve.assets.steps.checks.difference import differing_row_counts
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.observed import aggregated
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.resources.lake.lake import Lake


@dataclass(frozen=True)
class Repaired:
    """The result for one replica: rows written and rows deleted, and its Delta version.

    The version is None where the replica is beyond the LSN, or was put back meanwhile. `problem` says why
    nothing was done.
    """

    schema: str
    table: str
    lsn: int
    inserted: int = 0
    deleted: int = 0
    version: int | None = None
    problem: str | None = None


def repair(subscription: Subscription, lake: Lake, names: Collection[Name], log: Log) -> list[Repaired]:
    """Make the named replicas equal to the publisher's tables at one LSN; unknown names are problems too.

    A table that is altered or rewritten while it is read is repaired at a later LSN.
    """
    results: dict[Name, Repaired] = {}

    def mend(names: Names) -> list[Name]:
        with at_one_lsn(subscription, lake, log) as moment:
            done = {name: _repaired(moment, name, log) for name in names or ()}
            versions = {
                name: repaired.version for name, repaired in done.items() if repaired.version is not None
            }
            renew_cut(lake, subscription, versions)
        results.update(done)
        return [name for name, repaired in done.items() if repaired.problem in {ALTERED, REWRITTEN}]

    while_altered(mend, names)
    return list(results.values())


def _repaired(moment: Moment, name: Name, log: Log) -> Repaired:
    lsn, lake = moment.snapshot.lsn, moment.lake
    if problem := moment.problem(name):
        return Repaired(*name, lsn, problem=problem)
    table = moment.tables[name]
    if not table.columns:
        return Repaired(*name, lsn, problem="it has no columns by which rows differ")
    log(f"repairing {table.table.qualified} of {moment.subscription.name}")
    with moment.refusing(name, "repair"):
        sides = moment.sides(name)
        net = _net(sides)
        # Checked after the rows were read, and before they are written: rows of a table that was read as
        # empty stay.
        if net is not None and moment.rewritten([name]):
            return Repaired(*name, lsn, problem=REWRITTEN)
        inserted, deleted = (0, 0) if net is None else _merged(sides, net, lsn)
        head = lake.records.head(sides.path)
        # A cut of a version that follows a RESTORE would hide the RESTORE: the compared version is gone.
        is_known = head.version == sides.version or not lake.records.is_restored(sides.path, sides.version)
    version = head.version if is_known and (head.position or 0) <= lsn else None
    return Repaired(*name, lsn, inserted, deleted, version)


def _net(sides: Sides) -> DataFrame | None:
    """The rows that one side has more often; None where there is none."""
    chosen = sides.differing()
    if chosen is not None and not chosen.segments.any():
        return None
    columns = [c.name for c in sides.columns]
    net = checkpointed(differing_row_counts(*sides.frames(chosen), columns))
    return None if net.isEmpty() else net


def _merged(sides: Sides, net: DataFrame, lsn: int) -> tuple[int, int]:
    """Correct a replica's rows in one commit; returns how many are inserted and deleted."""
    totals = aggregated(net, [F.sum("expected").alias("expected"), F.sum("held").alias("held")])
    gone = net.where("held > 0").select(F.lit("delete").alias("action"), "row")
    come = net.where("expected > 0").select(
        F.lit("insert").alias("action"), "row", F.explode(F.sequence(F.lit(1), F.col("expected").cast("int")))
    )
    source = gone.unionByName(come.select("action", "row"))
    vectors = bool(sides.lake.records.has_deletion_vectors(sides.path))
    with sides.lake.committing(None, vectors=vectors, metadata={"repaired": lsn}):
        merge_by_spark(
            sides.lake,
            sides.path,
            source,
            keyless_merge(source, [c.name for c in sides.columns]),
            sides.version,
        )
    return int(totals["expected"]), int(totals["held"])
