"""Subscriber consistency: the replica is what the publisher's filtered table holds at the same LSN.

A snapshot is exported at an LSN, the subscription is brought up to just that LSN, and the rows that the
publisher selects at the snapshot are compared with the replica's, all of them. Keys of differing rows are
told, other values are not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.copy import ReplicaColumn, copied_batches, copied_rows, replica_schema
from assets.frames.difference import differing_rows, few_differing_rows
from assets.steps.change_log import drain
from assets.steps.initial_sync import select_list
from assets.steps.replica_tables import apply
from assets.steps.subscription import Subscription
from assets.steps.table_changes import transform
from assets.steps.table_states import MEANING, READY, Name, TableState, table_states
from decoding.publication import ReplicatedTable
from resources.delta import Lake
from resources.postgres import read_catalog
from resources.snapshot import Chunks, Snapshot, chunk_queries, exported_snapshot

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
                results.append(_compare(subscription, lake, table, state, chunks, conninfo, snapshot))
                log(f"compared {table.table.qualified} of {subscription.name}")
    return results


def _compare(
    subscription: Subscription,
    lake: Lake,
    replicated: ReplicatedTable,
    state: TableState,
    chunks: Chunks,
    conninfo: str,
    snapshot: Snapshot,
) -> TableConsistency:
    table, types = replicated.table, subscription.column_types(replicated)
    if state.definition is None or state.definition.columns != tuple((n, t.spark) for n, t in types.items()):
        return TableConsistency(
            table.schema,
            table.name,
            snapshot.lsn,
            problem="its columns changed on the publisher; run again to copy it",
        )
    path = lake.replica(subscription.name, table.schema, table.name)
    columns = [ReplicaColumn(name, t, name in replicated.key) for name, t in types.items()]
    with lake.refusing(table.qualified):
        local = lake.writes_small(max(chunks.bytes, lake.records.size(path)))
        if local and columns and local.is_plain(path):
            found = _difference_here(local.table(path), chunks, conninfo, snapshot, columns)
        else:
            found = _difference(lake, path, chunks, conninfo, snapshot, columns)
    shown = [i for i, c in enumerate(replicated.columns) if c in replicated.key]
    return TableConsistency(
        schema=table.schema,
        table=table.name,
        lsn=snapshot.lsn,
        publisher_rows=found.replica_rows + found.surplus,
        replica_rows=found.replica_rows,
        differing=found.rows,
        keys=tuple(
            _key_text(replicated, [row[f"c{i}"] for i in shown], row["count"]) for row in found.sample
        ),
    )


@dataclass(frozen=True)
class _Difference:
    """The replica's rows, how many differ, how many more the publisher has, and some that differ."""

    replica_rows: int
    rows: int
    surplus: int
    sample: Sequence[Mapping[str, Any]]


def _difference(
    lake: Lake,
    path: str,
    chunks: Chunks,
    conninfo: str,
    snapshot: Snapshot,
    columns: Sequence[ReplicaColumn],
) -> _Difference:
    replica, names = lake.current(path), [c.name for c in columns]
    expected = copied_rows(lake.spark, conninfo, snapshot.name, chunks.queries, columns)
    # The publisher is read once; both counts come with the difference.
    differences = differing_rows(expected, replica, names)
    found = differences.agg(
        F.coalesce(F.sum(F.abs("count")), F.lit(0)).alias("rows"),
        F.coalesce(F.sum("count"), F.lit(0)).alias("surplus"),
    ).first()
    assert found is not None
    sample = differences.limit(SAMPLE).toArrow().to_pylist() if found["rows"] else []
    return _Difference(replica.count(), int(found["rows"]), int(found["surplus"]), sample)


def _difference_here(
    replica: pa.Table,
    chunks: Chunks,
    conninfo: str,
    snapshot: Snapshot,
    columns: Sequence[ReplicaColumn],
) -> _Difference:
    """The same for few rows, which are compared in this process."""
    schema = replica_schema(columns)
    batches = [b for q in chunks.queries for b in copied_batches(conninfo, snapshot.name, q, columns)]
    expected = pa.Table.from_batches(batches, schema)
    differences = few_differing_rows(expected, replica.select(schema.names).cast(schema))
    rows = pc.sum(pc.abs(differences["count"])).as_py() or 0
    sample = differences.slice(0, SAMPLE).to_pylist()
    return _Difference(replica.num_rows, rows, expected.num_rows - replica.num_rows, sample)


def _key_text(replicated: ReplicatedTable, values: Sequence[object], count: int) -> str:
    """A differing row by its key only; a table without one shows no value at all."""
    side = "missing from the replica" if count > 0 else "only in the replica"
    if not replicated.key:
        return f"a row {side}"
    names = ", ".join(c for c in replicated.columns if c in replicated.key)
    return f"({names})=({', '.join(str(v) for v in values)}) {side}"
