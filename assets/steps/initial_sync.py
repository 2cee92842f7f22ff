"""Initial row-filtered sync: tables -> replicas, at one exported snapshot.

The slot and capture exist before the snapshot, whose LSN each replica's commit holds; changes before it are
dropped for that table, later ones applied (section 29.4.5 for what is copied). A table copied again is
replaced in one commit, and no other table notices.
"""

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.copy import ReplicaColumn, copied_batches, copied_files, copied_rows, replica_schema
from assets.steps.change_log import prepare
from assets.steps.subscription import Definition, Subscription
from assets.steps.table_states import (
    DATA_SYNC,
    INITIALIZE,
    READY,
    REMOVED,
    SET_ASIDE,
    Name,
    TableState,
    set_states,
    table_states,
)
from decoding.errors import PgsieveError
from decoding.lsn import format_lsn
from decoding.publication import ReplicatedTable
from decoding.types import copy_expression
from resources.delta import Lake
from resources.postgres import SourceError, quote, read_catalog, refusing
from resources.snapshot import Chunks, Snapshot, chunk_queries, exported_snapshot

#: Tables copied at the same time; their chunks share the executors.
PARALLEL_TABLES = 4

Log = Callable[[str], None]


@dataclass(frozen=True)
class Copied:
    """One table's initial copy."""

    schema: str
    table: str
    lsn: int
    rows: int
    seconds: float
    version: int
    row_filter: str | None
    columns: tuple[tuple[str, str], ...]
    problem: str | None = None


def tables_to_copy(subscription: Subscription, lake: Lake) -> list[Name]:
    """The published tables that have no replica yet, or whose definition is no longer the replica's.

    Tables that are not published any more are marked so; tables set aside stay so until copied on demand.
    """
    with subscription.feed.source.connect() as connection:
        catalog = subscription.feed.with_defined(read_catalog(connection))
    tables = subscription.tables(catalog)
    states = table_states(lake, subscription.name)
    gone = [s for name, s in states.items() if name not in tables and s.state != REMOVED]
    set_states(lake, subscription.name, [TableState(s.schema, s.table, REMOVED) for s in gone])
    return [name for name, table in tables.items() if _needs_copy(states.get(name), subscription, table)]


def _needs_copy(state: TableState | None, subscription: Subscription, table: ReplicatedTable) -> bool:
    if state is None or state.state in {INITIALIZE, DATA_SYNC, REMOVED}:
        return True
    if state.state == SET_ASIDE:
        return False
    return state.definition != Definition.of(subscription.column_types(table), table.key)


def copy_tables(subscription: Subscription, lake: Lake, names: Collection[Name], log: Log) -> list[Copied]:
    """Copy the named tables at one new snapshot, several at a time; a table that fails is set aside."""
    if not names:
        return []
    feed = subscription.feed
    feed.source.check_ready()
    lake.check_writable()
    with feed.source.connect() as connection:
        catalog, _ = prepare(connection, feed, lake)
        tables = [t for n, t in subscription.tables(catalog).items() if n in names]
        set_states(
            lake, subscription.name, [TableState(t.table.schema, t.table.name, DATA_SYNC) for t in tables]
        )
        conninfo = feed.source.executor_conninfo()
        with exported_snapshot(feed.source) as snapshot:
            log(f"copying {len(tables)} tables of {subscription.name} at {format_lsn(snapshot.lsn)}")
            # The plan reads relation sizes on one connection; the chunks are read by the executors.
            planned = [
                (t, chunk_queries(connection, t, select_list(subscription, t), catalog)) for t in tables
            ]
            with ThreadPoolExecutor(PARALLEL_TABLES) as pool:
                copied = list(
                    pool.map(lambda p: _copy(subscription, lake, p[0], p[1], conninfo, snapshot), planned)
                )
    set_states(
        lake, subscription.name, [_state(subscription, t, c) for t, c in zip(tables, copied, strict=True)]
    )
    return copied


def select_list(subscription: Subscription, replicated: ReplicatedTable) -> list[str]:
    """The select list of the copy, in the forms that `decoding.types.from_copy` reads."""
    attributes = {a.name: a for a in replicated.table.attributes}
    return [
        copy_expression(
            quote(name),
            attributes[name].type_oid,
            attributes[name].type_modifier,
            subscription.override(replicated.table, name),
        )
        + f" as c{number}"
        for number, name in enumerate(replicated.columns)
    ]


def _copy(
    subscription: Subscription,
    lake: Lake,
    replicated: ReplicatedTable,
    chunks: Chunks,
    conninfo: str,
    snapshot: Snapshot,
) -> Copied:
    started = time.monotonic()
    table, types = replicated.table, subscription.column_types(replicated)
    path = lake.replica(subscription.name, table.schema, table.name)
    problem, rows, version = None, 0, 0
    # Without copy_data a table that comes back goes on from the rows it has.
    kept = not subscription.copy_data and lake.records.exists(path)
    try:
        if not kept:
            given = chunks if subscription.copy_data else Chunks([], 0)
            columns = [ReplicaColumn(name, t, name in replicated.key) for name, t in types.items()]
            with refusing(subscription.feed.source.name, f'copy table "{table.qualified}"'):
                rows = _write_copy(lake, path, given, conninfo, snapshot, columns)
        version = lake.records.version(path)
    except PgsieveError as error:
        if isinstance(error, SourceError):
            with subscription.feed.source.connect():
                pass  # Raises where it is the server that failed, not this table.
        problem = error.message
    return Copied(
        schema=table.schema,
        table=table.name,
        lsn=snapshot.lsn,
        rows=rows,
        seconds=time.monotonic() - started,
        version=version,
        row_filter=" OR ".join(replicated.row_filters) if replicated.row_filters is not None else None,
        columns=tuple((name, t.spark) for name, t in types.items()),
        problem=problem,
    )


def _write_copy(
    lake: Lake,
    path: str,
    chunks: Chunks,
    conninfo: str,
    snapshot: Snapshot,
    columns: Sequence[ReplicaColumn],
) -> int:
    """Replace the replica by the rows at the snapshot; how many there are."""
    properties = table_options(c.name for c in columns)
    local = lake.local if columns and not properties else None
    schema = replica_schema(columns)
    if local and lake.writes_small(chunks.bytes):
        batches = [b for q in chunks.queries for b in copied_batches(conninfo, snapshot.name, q, columns)]
        copied = pa.Table.from_batches(batches, schema)
        with lake.refusing(path):
            local.write(path, copied, snapshot.lsn, overwrite=True, metadata={"copied": True})
        return int(copied.num_rows)
    if local and local.has_schema(path, schema):
        written = copied_files(lake.spark, conninfo, snapshot.name, chunks.queries, columns, path)
        files = lake.commit_files(
            written, path, schema, snapshot.lsn, overwrite=True, metadata={"copied": True}
        )
        return sum(json.loads(file["stats"])["numRecords"] for file in files)
    frame = copied_rows(lake.spark, conninfo, snapshot.name, chunks.queries, columns)
    counted = Observation()
    lake.write(
        frame.observe(counted, F.count(F.lit(1)).alias("rows")),
        path,
        position=snapshot.lsn,
        overwrite=True,
        metadata={"copied": True},
        properties=properties,
    )
    return int(counted.get["rows"])


def table_options(columns: Iterable[str]) -> dict[str, str]:
    """Delta properties of a new table: column mapping, only where Parquet forbids a name as it is."""
    if any(set(name) & set(" ,;{}()\n\t=") for name in columns):
        return {"delta.columnMapping.mode": "name"}
    return {}


def _state(subscription: Subscription, replicated: ReplicatedTable, copied: Copied) -> TableState:
    if copied.problem:
        return TableState(copied.schema, copied.table, SET_ASIDE, reason=copied.problem)
    definition = Definition.of(subscription.column_types(replicated), replicated.key)
    return TableState(copied.schema, copied.table, READY, copied.lsn, definition)
