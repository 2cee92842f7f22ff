"""Subscriber consistency: the replica is what the publisher's filtered table holds at the same LSN.

A snapshot is exported at an LSN, the subscription is brought up to just that LSN, and the rows that the
publisher selects at the snapshot are compared with the replica's, all of them. Keys of differing rows are
told, other values are not.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.copy import ReplicaColumn, copied_rows
from assets.frames.difference import differing_rows
from assets.steps.change_log import drain
from assets.steps.initial_sync import select_list
from assets.steps.replica_tables import apply
from assets.steps.subscription import Subscription
from assets.steps.table_changes import transform
from assets.steps.table_states import MEANING, READY, Name, TableState, table_states
from decoding.publication import ReplicatedTable
from resources.delta import Lake
from resources.postgres import read_catalog
from resources.snapshot import Snapshot, chunk_queries, exported_snapshot

#: At most so many differing keys are told.
SAMPLE = 10

Log = Callable[[str], None]


@dataclass(frozen=True)
class TableConsistency:
    """One table's comparison: row counts at `lsn`, the number of differing rows, and keys of some of them."""

    schema: str
    table: str
    lsn: int
    publisher_rows: int = 0
    replica_rows: int = 0
    differing: int = 0
    keys: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def equal(self) -> bool:
        """Whether the replica holds just the publisher's rows."""
        return self.problem is None and self.differing == 0


def check_consistency(
    subscription: Subscription, lake: Lake, log: Log, only: Collection[Name] | None = None
) -> list[TableConsistency]:
    """Compare replica tables (all, or `only` some) with the publisher at one LSN."""
    feed = subscription.feed
    feed.source.check_ready()
    with feed.source.connect() as connection:
        catalog = feed.with_defined(read_catalog(connection))
        tables = {n: t for n, t in subscription.tables(catalog).items() if only is None or n in only}
        conninfo = feed.source.executor_conninfo()
        with exported_snapshot(feed.source) as snapshot:
            drain(feed, lake, [subscription], log, upto=snapshot.lsn)
            transform(subscription, lake, log)
            apply(subscription, lake, log)
            states = table_states(lake, subscription.name)
            results = []
            for name, table in tables.items():
                state = states.get(name)
                if state is None or state.state != READY:
                    reason = "not copied yet" if state is None else MEANING[state.state]
                    detail = f": {state.reason}" if state and state.reason else ""
                    results.append(TableConsistency(*name, snapshot.lsn, problem=reason + detail))
                    continue
                chunks = chunk_queries(connection, table, select_list(subscription, table), catalog)
                results.append(_compare(subscription, lake, table, state, chunks.queries, conninfo, snapshot))
                log(f"compared {table.table.qualified} of {subscription.name}")
    return results


def _compare(
    subscription: Subscription,
    lake: Lake,
    replicated: ReplicatedTable,
    state: TableState,
    queries: list[str],
    conninfo: str,
    snapshot: Snapshot,
) -> TableConsistency:
    table, types = replicated.table, subscription.column_types(replicated)
    replica = lake.current(lake.replica(subscription.name, table.schema, table.name))
    if state.definition is None or state.definition.columns != tuple((n, t.spark) for n, t in types.items()):
        return TableConsistency(
            table.schema,
            table.name,
            snapshot.lsn,
            problem="its columns changed on the publisher; run again to copy it",
        )
    expected = copied_rows(
        lake.spark, conninfo, snapshot.name, queries, [ReplicaColumn(n, t) for n, t in types.items()]
    )
    with lake.refusing(table.qualified):
        # The publisher is read once; both counts come with the difference.
        counts = F.sum("count")
        differences = differing_rows(expected, replica, replicated.columns)
        found = differences.agg(
            F.coalesce(F.sum(F.abs("count")), F.lit(0)).alias("rows"),
            F.coalesce(counts, F.lit(0)).alias("surplus"),
        ).first()
        assert found is not None
        replica_rows = replica.count()
        keys: tuple[str, ...] = ()
        if found["rows"]:
            shown = [i for i, c in enumerate(replicated.columns) if c in replicated.key]
            rows = (
                differences.select(*(F.col(f"c{i}").cast("string") for i in shown), "count")
                .limit(SAMPLE)
                .collect()
            )
            keys = tuple(_key_text(replicated, tuple(row)[:-1], int(row["count"])) for row in rows)
    return TableConsistency(
        schema=table.schema,
        table=table.name,
        lsn=snapshot.lsn,
        publisher_rows=replica_rows + int(found["surplus"]),
        replica_rows=replica_rows,
        differing=int(found["rows"]),
        keys=keys,
    )


def _key_text(replicated: ReplicatedTable, values: tuple[str, ...], count: int) -> str:
    """A differing row by its key only; a table without one shows no value at all."""
    side = "missing from the replica" if count > 0 else "only in the replica"
    if not replicated.key:
        return f"a row {side}"
    names = ", ".join(c for c in replicated.columns if c in replicated.key)
    return f"({names})=({', '.join(str(v) for v in values)}) {side}"
