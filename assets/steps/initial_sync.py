"""Initial row-filtered sync: tables -> replicas, at one exported snapshot.

The slot and capture exist before the snapshot, whose LSN each replica's commit holds; changes before it are
dropped for that table, later ones applied (section 29.4.5 for what is copied). A table copied again is
replaced in one commit, and no other table notices.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.copy import ReplicaColumn, copied_batches, copied_files, copied_rows, replica_schema
from assets.frames.observed import observed
from assets.steps.change_log import prepare
from assets.steps.damaged_replicas import make_room
from assets.steps.failures import reason
from assets.steps.schema_changes import planned_sources
from assets.steps.subscription import PARALLEL_TABLES, Definition, History, Subscription
from assets.steps.subscription_state import disable, refuse_disabled
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
from decoding.evolution import Layout, SchemaChangedError
from decoding.lsn import format_lsn
from decoding.publication import Catalog, ReplicatedTable, Table
from decoding.quoting import quote_qualified
from decoding.types import copy_expression
from resources.delta import Lake, column_mapping
from resources.failpoints import Failpoint, reach
from resources.lake_errors import LakeError
from resources.origins import subscribed_tables
from resources.postgres import SourceError, quote, read_catalog, refusing
from resources.snapshot import Chunks, Snapshot, chunk_queries, exported_snapshot

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


@dataclass(frozen=True)
class _Planned:
    """A table to copy, in chunks, and the generation of the change history that goes on after it."""

    replicated: ReplicatedTable
    chunks: Chunks
    generation: int


def tables_to_copy(subscription: Subscription, lake: Lake) -> list[Name]:
    """The published tables that have no replica yet, or whose definition the replica cannot follow in place.

    Tables that are not published any more are marked so; tables set aside stay so until copied on demand.
    """
    with subscription.feed.source.connect() as connection:
        catalog = subscription.feed.with_defined(read_catalog(connection))
    tables = subscription.tables(catalog)
    states = table_states(lake, subscription.name)
    gone = [s for name, s in states.items() if name not in tables and s.state != REMOVED]
    set_states(
        lake,
        subscription.name,
        [replace(s, state=REMOVED, lsn=s.lsn if s.state == READY else 0) for s in gone],
    )
    return [
        name
        for name, table in tables.items()
        if _needs_copy(states.get(name), subscription.definition(table, catalog))
    ]


def _needs_copy(state: TableState | None, present: Definition) -> bool:
    if state is None or state.state in {INITIALIZE, DATA_SYNC, REMOVED}:
        return True
    if state.state == SET_ASIDE:
        return False
    if state.definition is None:
        return True
    try:
        planned_sources(state.definition, present)
    except SchemaChangedError:
        return True
    return False


def copy_tables(subscription: Subscription, lake: Lake, names: Collection[Name], log: Log) -> list[Copied]:
    """Copy the named tables at one new snapshot, several at a time; a table that fails is set aside.

    With `disable_on_error` the subscription is disabled instead. Raises SubscriptionDisabledError where it is.
    """
    if not names:
        return []
    refuse_disabled(lake, subscription.name)
    feed = subscription.feed
    feed.source.check_ready()
    lake.check_writable()
    with feed.source.connect() as connection:
        prepare(connection, feed, lake)
        known = table_states(lake, subscription.name)
        set_states(lake, subscription.name, [TableState(*name, DATA_SYNC) for name in names])
        reach(Failpoint.COPY_BEGUN)
        conninfo = feed.source.executor_conninfo()
        with exported_snapshot(feed.source) as snapshot:
            reach(Failpoint.SNAPSHOT_EXPORTED)
            # The definitions are those of the snapshot: what changes from there on is followed.
            catalog = feed.with_defined(read_catalog(connection, snapshot.name))
            tables = [t for n, t in subscription.tables(catalog).items() if n in names]
            log(f"copying {len(tables)} tables of {subscription.name} at {format_lsn(snapshot.lsn)}")
            if feed.options.origin == "none":
                _warn_of_other_origins(subscription, [t.table for t in tables], connection, log)
            # The plan reads relation sizes on one connection; the chunks are read by the executors.
            planned = [
                _Planned(
                    t,
                    chunk_queries(connection, t, select_list(subscription, t), catalog),
                    _generation(known, t.table),
                )
                for t in tables
            ]
            with ThreadPoolExecutor(PARALLEL_TABLES) as pool:
                copied = list(pool.map(lambda p: _copy(subscription, lake, p, conninfo, snapshot), planned))
        after = read_catalog(connection)
    states = [
        _state(subscription, subscription.definition(table, catalog), known, done, after)
        for table, done in zip(tables, copied, strict=True)
    ]
    set_states(lake, subscription.name, states)
    reach(Failpoint.TABLES_READY)
    failed = [c for c in copied if c.problem]
    if failed and subscription.disable_on_error:
        disable(lake, subscription.name, failed[0].problem or "")
    return copied


def _warn_of_other_origins(
    subscription: Subscription, tables: Sequence[Table], connection: psycopg.Connection[Any], log: Log
) -> None:
    if found := subscribed_tables(connection, tables):
        log(
            f'subscription "{subscription.name}" requested copy_data with origin = NONE but might copy data that had '
            f"a different origin: other subscriptions write to {', '.join(quote_qualified(*name) for name in found)}; "
            "verify that the rows there did not come from other origins"
        )


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


def _generation(known: Mapping[Name, TableState], table: Table) -> int:
    """Of the table's change history as it is before the copy."""
    state = known.get((table.schema, table.name))
    return state.definition.history.generation if state and state.definition else 0


def _copy(
    subscription: Subscription,
    lake: Lake,
    planned: _Planned,
    conninfo: str,
    snapshot: Snapshot,
) -> Copied:
    started = time.monotonic()
    replicated, table = planned.replicated, planned.replicated.table
    types = subscription.column_types(replicated)
    path = lake.replica(subscription.name, table.schema, table.name)
    problem, rows, version = None, 0, 0
    try:
        # Without copy_data a table that comes back goes on from the rows it has.
        kept = not subscription.copy_data and lake.records.exists(path)
        if not kept:
            make_room(subscription.name, lake, (table.schema, table.name), planned.generation)
            _refuse_later(lake, path, table, snapshot)
            given = planned.chunks if subscription.copy_data else Chunks([], 0)
            columns = [ReplicaColumn(name, t, name in replicated.key) for name, t in types.items()]
            with refusing(subscription.feed.source.name, f'copy table "{table.qualified}"'):
                rows = _write_copy(lake, path, given, conninfo, snapshot, columns)
            reach(Failpoint.TABLE_COPIED)
        version = lake.records.version(path)
    except PgsieveError as error:
        if isinstance(error, SourceError):
            with subscription.feed.source.connect():
                pass  # Raises where it is the server that failed, not this table.
        problem = reason(lake, error)
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


def _refuse_later(lake: Lake, path: str, table: Table, snapshot: Snapshot) -> None:
    """Refuse to copy below the replica's own position: Delta would leave the commit out."""
    held = lake.records.position(path)
    if held is not None and held >= snapshot.lsn:
        raise PgsieveError(
            f'table "{table.qualified}": its replica holds changes up to {format_lsn(held)}, but the publisher is only'
            f" at {format_lsn(snapshot.lsn)}",
            hint="replicate another cluster into another `lake`, or drop the subscription with --delete-tables",
            sqlstate="55000",
        )


def _check_names(columns: Sequence[ReplicaColumn]) -> None:
    """Raise LakeError for what no Delta table can have: no columns, or two whose names differ in case alone."""
    if not columns:
        raise LakeError(
            "no column is published, and a Delta table has at least one", hint="publish a column of the table"
        )
    seen: dict[str, str] = {}
    for column in columns:
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise LakeError(
                f"columns {quote(other)} and {quote(column.name)} differ in case alone, and a Delta table has one of them",
                hint="rename one, or publish a column list without it",
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
    _check_names(columns)
    properties = column_mapping(c.name for c in columns)
    local = lake.plain(path, (c.name for c in columns)) if columns else None
    schema = replica_schema(columns)
    if local and lake.writes_small(chunks.bytes) and not local.permutes(path, schema):
        batches = [b for q in chunks.queries for b in copied_batches(conninfo, snapshot.name, q, columns)]
        copied = pa.Table.from_batches(batches, schema)
        with lake.refusing(path):
            local.write(path, copied, snapshot.lsn, overwrite=True, metadata={"copied": True})
        return int(copied.num_rows)
    if local and local.takes_files(path, schema, overwrite=True):
        written = copied_files(lake.spark, conninfo, snapshot.name, chunks.queries, columns, path)
        files = lake.commit_files(
            written, path, schema, snapshot.lsn, overwrite=True, metadata={"copied": True}
        )
        return sum(json.loads(file["stats"])["numRecords"] for file in files)
    frame = copied_rows(lake.spark, conninfo, snapshot.name, chunks.queries, columns)
    counted, rows = Observation(), [F.count(F.lit(1)).alias("rows")]
    lake.write(
        frame.observe(counted, *rows),
        path,
        position=snapshot.lsn,
        overwrite=True,
        metadata={"copied": True},
        properties=properties,
    )
    return int(observed(counted, rows, lambda: lake.current(path))["rows"])


def _state(
    subscription: Subscription,
    definition: Definition,
    known: Mapping[Name, TableState],
    copied: Copied,
    after: Catalog,
) -> TableState:
    """The state after a copy; a table that was rewritten meanwhile may have been read as empty (section 13.6)."""
    name = (copied.schema, copied.table)
    if copied.problem:
        # A disabled subscription copies the table when it goes on.
        failed = INITIALIZE if subscription.disable_on_error else SET_ASIDE
        return TableState(*name, failed, reason=copied.problem)
    former = known[name].definition if name in known else None
    history = former.history if former else History()
    made = replace(definition, history=history.with_columns(definition.columns))
    table = after.tables.get(definition.layout.oid)
    rewritten = table is None or Layout.of(table, after).files != definition.layout.files
    reason = (
        f'table "{copied.schema}.{copied.table}" was rewritten while it was copied' if rewritten else None
    )
    return TableState(*name, INITIALIZE if rewritten else READY, copied.lsn, made, reason)
