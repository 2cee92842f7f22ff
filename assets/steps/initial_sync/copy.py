"""Initial row-filtered sync: tables -> replicas, a batch of tables at one exported snapshot.

The slot and capture exist before the snapshot, whose LSN each replica's commit holds; changes before it are
dropped for that table, later ones applied (section 29.4.5 for what is copied). A table copied again is
replaced in one commit, and no other table notices. What is copied stays so: the state that precedes the copy says of
which snapshot it is, and with the replica's commit it is complete.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import psycopg
import pyarrow as pa
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.initial_sync.damaged_replicas import make_room
from pgsieve.assets.steps.initial_sync.rows import (
    ReplicaColumn,
    copied_batches,
    copied_files,
    copied_rows,
    read_again,
    replica_schema,
)
from pgsieve.assets.steps.observed import observed
from pgsieve.assets.steps.records.failures import passes, reason
from pgsieve.assets.steps.records.subscription_state import disable, refuse_disabled
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    newest_version,
    set_states,
    table_states,
)
from pgsieve.assets.steps.records.transformed import fence
from pgsieve.assets.steps.slot_consumption.drain import SLICE_BYTES, drain, prepare
from pgsieve.assets.steps.subscription import (
    PARALLEL_TABLES,
    Definition,
    History,
    Subscription,
    planned_sources,
)
from pgsieve.assets.steps.validation import (
    hold_back,
    sound_catalog,
    table_problems,
    waiting_for,
)
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable, Table
from pgsieve.decoding.publications.evolution import Layout, SchemaChangedError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.values.types import copy_expression
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.errors import LakeError, OverrunError, again_after_conflict
from pgsieve.resources.lake.lake import Lake, column_mapping
from pgsieve.resources.postgres.origins import subscribed_tables
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.slot import SlotInUseError, current_lsn, slot_state
from pgsieve.resources.postgres.snapshot import (
    Chunks,
    Snapshot,
    chunk_queries,
    exported_snapshot,
    table_bytes,
)
from pgsieve.resources.postgres.source import PassingFaultError, quote, read_catalog, refusing

Log = Callable[[str], None]

#: So much is copied at one snapshot, which holds back the publisher's vacuum (a table is never divided).
BATCH_TABLES, BATCH_BYTES = 64, 16 * 1024**3
#: How often tables that a passing fault met are copied again without any that succeeds; the first pause, doubled each time.
_ATTEMPTS, _PAUSE_SECONDS = 5, 1.0


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
    #: Another process has copied the table later, or applies to it: its state is that one's.
    overrun: bool = False


@dataclass(frozen=True)
class _Planned:
    """A table to copy, in chunks, and the generation of the change history that goes on after it."""

    replicated: ReplicatedTable
    chunks: Chunks
    generation: int


def tables_to_copy(subscription: Subscription, lake: Lake) -> list[Name]:
    """The published tables that have no replica yet, or whose definition the replica cannot follow in place.

    Tables that are not published any more are marked so; tables set aside stay so until copied on demand; those that
    cannot be replicated as they are published now wait. Raises what stands in the way of all of them.
    """
    with subscription.feed.source.connect() as connection:
        catalog = sound_catalog(connection, subscription, read_catalog(connection))
    tables = subscription.tables(catalog)
    states = table_states(lake, subscription.name)
    gone = [s for name, s in states.items() if name not in tables and s.state != SyncState.REMOVED]
    set_states(
        lake,
        subscription.name,
        [replace(s, state=SyncState.REMOVED, lsn=s.lsn if s.state == SyncState.READY else 0) for s in gone],
    )
    waiting = hold_back(subscription, lake, catalog)
    if waiting and subscription.disable_on_error:
        return []
    return [
        name
        for name, table in tables.items()
        if name not in waiting and _needs_copy(states.get(name), subscription.definition(table, catalog))
    ]


def _needs_copy(state: TableState | None, present: Definition) -> bool:
    if state is None or state.state in {
        SyncState.INITIALIZE,
        SyncState.DATA_SYNC,
        SyncState.FINISHED_COPY,
        SyncState.REMOVED,
    }:
        return True
    if state.state == SyncState.SET_ASIDE:
        return False
    if state.definition is None:
        return True
    try:
        planned_sources(state.definition, present)
    except SchemaChangedError:
        return True
    return False


def copy_tables(
    subscription: Subscription, lake: Lake, names: Collection[Name], log: Log, *, lacking: bool = False
) -> list[Copied]:
    """Copy the named tables, a batch of them at one new snapshot; a table that fails is set aside.

    `lacking` leaves out those that need no copy any more, now that it is this process's turn. What another process
    copies meanwhile is not copied again.

    What an earlier run has copied, and died before it called that ready, is ready now. A fault that passes sets no
    table aside: the tables that it met are copied again, at another snapshot; they stay to be copied where that goes on,
    and the fault is raised. With `disable_on_error` a table's own error disables the subscription instead. Raises
    SubscriptionDisabledError where it is.
    """
    if not names:
        return []
    refuse_disabled(lake, subscription.name)
    feed = subscription.feed
    feed.source.check_ready()
    lake.check_writable()
    with feed.exclusively(), feed.source.connect() as connection:
        sound_catalog(connection, subscription, read_catalog(connection))
        prepare(connection, feed, lake)
        sizes = table_bytes(connection, names)
    waiting = sorted(sizes, key=lambda name: sizes[name])
    with feed.source.exclusively(subscription.name):
        if lacking:
            needed = set(tables_to_copy(subscription, lake))
            waiting = [name for name in waiting if name in needed]
        known = table_states(lake, subscription.name)
        begun = [
            TableState(*name, SyncState.DATA_SYNC) for name in waiting if not _is_announced(known.get(name))
        ]
        set_states(lake, subscription.name, begun)
        since = newest_version(table_states(lake, subscription.name).values())
    reach(Failpoint.COPY_BEGUN)
    copied: list[Copied] = []
    failures = 0
    while waiting:
        batch = _next_batch(waiting, sizes)
        done = _copied_alone(
            subscription, lake, batch, since, f"{len(copied)} of {len(copied) + len(waiting)}", log
        )
        copied += done.copied
        waiting = [name for name in waiting if name not in batch] + done.again
        if done.fault is None:
            failures = 0
        else:
            failures = 1 if done.copied else failures + 1
            if failures == _ATTEMPTS:
                raise _given_up(subscription, waiting, done.fault)
            log(f"{done.fault.message}; {len(done.again)} tables are copied again")
            time.sleep(_PAUSE_SECONDS * 2 ** (failures - 1))
        _bound_wal(subscription, lake, log, more=bool(waiting))
    failed = [c for c in copied if c.problem]
    if failed and subscription.disable_on_error:
        disable(lake, subscription.name, failed[0].problem or "")
    return sorted(copied, key=lambda table: (table.schema, table.table))


def _former(known: Mapping[Name, TableState], name: Name) -> Definition | None:
    """What the table's replica was made of before."""
    return known[name].definition if name in known else None


def _waiting(name: Name, snapshot: Snapshot, error: PgsieveError) -> Copied:
    """What became of a table that cannot be replicated as it is published now."""
    return Copied(*name, snapshot.lsn, 0, 0.0, 0, None, (), waiting_for(error))


def _settle(
    subscription: Subscription, lake: Lake, names: Collection[Name], catalog: Catalog, log: Log
) -> set[Name]:
    """Call ready what an earlier run has copied: the replica holds the snapshot that its state announced."""
    states = table_states(lake, subscription.name)
    complete = [
        replace(state, state=SyncState.READY)
        for name, state in states.items()
        if name in names
        and _is_announced(state)
        and state.definition is not None
        and _holds(lake, lake.replica(subscription.name, *name), state.lsn)
        and not _rewritten(state.definition, catalog)
    ]
    if not complete:
        return set()
    _declare(subscription, lake, complete)
    settled = [
        state for state in table_states(lake, subscription.name).values() if state.state == SyncState.READY
    ]
    settled = [state for state in settled if state.name in {each.name for each in complete}]
    for state in settled:
        log(f"{state.schema}.{state.table} was copied at {format_lsn(state.lsn)} by an earlier run")
    return {state.name for state in settled}


def _holds(lake: Lake, path: str, lsn: int) -> bool:
    """Whether a replica is at an LSN; one that cannot be read is made again."""
    try:
        return lake.records.position(path) == lsn
    except LakeError as error:
        reason(lake, error)  # Raises where it is the lake that fails.
        return False


def _is_announced(state: TableState | None) -> bool:
    """Whether the state says of which snapshot the copy is that has begun."""
    return (
        state is not None and state.state in {SyncState.DATA_SYNC, SyncState.FINISHED_COPY} and state.lsn > 0
    )


def _given_up(subscription: Subscription, waiting: Sequence[Name], fault: PgsieveError) -> PgsieveError:
    """The error of a copy that meets faults again and again."""
    if isinstance(fault, LakeError):
        return fault
    first, more = quote(*waiting[0]), f" and {len(waiting) - 1} other tables" if len(waiting) > 1 else ""
    return PassingFaultError(
        f'source "{subscription.feed.source.name}": cannot copy table {first}{more} of subscription'
        f' "{subscription.name}" now: {fault.message}',
        hint="run again once the server and the network are well: what is copied stays copied",
        sqlstate=fault.sqlstate,
    )


def _next_batch(waiting: Sequence[Name], sizes: Mapping[Name, int]) -> list[Name]:
    """The tables that are copied at one snapshot, which makes the publisher keep dead rows meanwhile."""
    total = list(accumulate(sizes[name] for name in waiting))
    return [name for name, bytes_ in zip(waiting, total, strict=True) if bytes_ <= BATCH_BYTES][
        :BATCH_TABLES
    ] or [waiting[0]]


@dataclass(frozen=True)
class _Batch:
    """What became of a batch: tables copied, and those that a fault met which passes."""

    copied: list[Copied]
    again: list[Name]
    fault: PgsieveError | None = None


def _copied_alone(
    subscription: Subscription, lake: Lake, names: Sequence[Name], since: int, progress: str, log: Log
) -> _Batch:
    """Copy some tables alone: what is transformed meanwhile leaves them out, and they would lack it afterwards.

    Those that another process has made ready `since` this one began are left out.
    """
    try:
        with subscription.feed.source.exclusively(subscription.name):
            states = table_states(lake, subscription.name).values()
            ready = {
                state.name for state in states if state.state == SyncState.READY and state.version > since
            }
            left = [name for name in names if name not in ready]
            return _copy_batch(subscription, lake, left, progress, log) if left else _Batch([], [])
    except PgsieveError as error:
        if not passes(error):
            raise
        return _Batch([], list(names), error)


def _copy_batch(
    subscription: Subscription, lake: Lake, names: Sequence[Name], progress: str, log: Log
) -> _Batch:
    """Copy some tables at one new snapshot, several at a time, and call them ready.

    Their states announce the snapshot first: a replica that holds it is complete, whenever that is found.
    """
    feed = subscription.feed
    known = table_states(lake, subscription.name)
    states: dict[Name, TableState] = {}
    copied: list[Copied] = []
    faults: dict[Name, PgsieveError] = {}
    published: list[Name] = list(names)

    def one(table: _Planned) -> None:
        name = (table.replicated.table.schema, table.replicated.table.name)
        try:
            done = _copy(subscription, lake, table, conninfo, snapshot)
        except PgsieveError as error:
            if not passes(error):
                raise
            faults[name] = error
            return
        copied.append(done)
        log(_described(done, table.chunks.bytes))

    try:
        with exported_snapshot(feed.source) as snapshot:
            reach(Failpoint.SNAPSHOT_EXPORTED)
            with feed.source.connect() as connection:
                # The definitions are those of the snapshot: what changes from there on is followed.
                catalog = sound_catalog(connection, subscription, read_catalog(connection, snapshot.name))
                left = set(names) - _settle(subscription, lake, names, catalog, log)
                problems = {n: e for n, e in table_problems(subscription, catalog).items() if n in left}
                tables = {
                    n: t for n, t in subscription.tables(catalog).items() if n in left and n not in problems
                }
                published = [*tables, *problems]
                log(
                    f"copying {len(tables)} tables of {subscription.name} at {format_lsn(snapshot.lsn)}, {progress} done"
                )
                if feed.options.origin == "none":
                    _warn_of_other_origins(subscription, [t.table for t in tables.values()], connection, log)
                # The plan reads relation sizes on one connection; the chunks are read by the executors.
                planned = [
                    _Planned(
                        t,
                        chunk_queries(connection, t, select_list(subscription, t), catalog),
                        _generation(known, t.table),
                    )
                    for t in tables.values()
                ]
            conninfo = feed.source.executor_conninfo()
            states = {
                name: _announced(subscription, table, catalog, known.get(name), snapshot)
                for name, table in tables.items()
            }
            waiting = [
                TableState(*n, SyncState.INITIALIZE, definition=_former(known, n), reason=waiting_for(error))
                for n, error in problems.items()
            ]
            set_states(lake, subscription.name, [*states.values(), *waiting])
            reach(Failpoint.COPY_PLANNED)
            with ThreadPoolExecutor(PARALLEL_TABLES) as pool:
                list(pool.map(one, planned))
        # On a connection of its own: one from before the copy has been idle for as long as that took.
        with feed.source.connect() as connection:
            after = feed.with_defined(read_catalog(connection))
    except PgsieveError as error:
        if not passes(error):
            raise
        # What was copied is found at the next snapshot, or by the next run.
        return _Batch([], published, error)
    made = [_state(subscription, states, done, after) for done in copied if not done.overrun]
    for name in _declare(subscription, lake, made):
        log(f"{quote_qualified(*name)} of {subscription.name} is copied by another process")
    reach(Failpoint.TABLES_READY)
    copied += [_waiting(n, snapshot, error) for n, error in problems.items()]
    return _Batch(copied, list(faults), next(iter(faults.values()), None))


def _announced(
    subscription: Subscription,
    replicated: ReplicatedTable,
    catalog: Catalog,
    known: TableState | None,
    snapshot: Snapshot,
) -> TableState:
    """The state of a table that is about to be copied: what it is once its replica holds the snapshot."""
    definition = subscription.definition(replicated, catalog)
    history = known.definition.history if known and known.definition else History()
    made = replace(definition, history=history.with_columns(definition.columns))
    return TableState(replicated.table.schema, replicated.table.name, SyncState.DATA_SYNC, snapshot.lsn, made)


def _described(copied: Copied, size: int) -> str:
    """A line of progress."""
    if copied.problem:
        return f"{copied.schema}.{copied.table} cannot be copied: {copied.problem}"
    return (
        f"{copied.schema}.{copied.table}: {copied.rows:,} rows of {size / 1024**2:,.1f} MiB copied in"
        f" {copied.seconds:.1f} s"
    )


def _bound_wal(subscription: Subscription, lake: Lake, log: Log, *, more: bool) -> None:
    """Say how much WAL the slot retains; between two batches it is drained where that is much."""
    feed = subscription.feed
    try:
        with feed.source.connect() as connection:
            state = slot_state(connection, feed.slot)
        if more and state is not None and state.lag >= SLICE_BYTES:
            drain(feed, lake, [subscription], log)
            return
    except PgsieveError as error:
        if not (passes(error) or isinstance(error, SlotInUseError)):
            raise
        log(f"{error.message}; the copy goes on")
        return
    if state is not None and state.lag >= SLICE_BYTES:
        log(
            f"the slot {feed.slot} retains {state.lag / 1024**2:,.0f} MiB of WAL that came while tables were copied"
        )


def _declare(subscription: Subscription, lake: Lake, states: Sequence[TableState]) -> list[Name]:
    """Record the states after a copy; returns the tables that another process has copied later.

    A table is ready when all later slices are transformed for it. Who transformed one meanwhile, without the lock, has
    left the table out, or has begun anew after the fence and found that it is copied.
    """
    name, overrun = subscription.name, list[Name]()

    def finish() -> None:
        base = max(lake.records.standing(lake.table_states(name)).version, 0)
        paths = {s.name: lake.replica(name, *s.name) for s in states}
        overrun[:] = [
            s.name for s in states if s.state == SyncState.READY and _is_beyond(lake, paths[s.name], s.lsn)
        ]
        finished = [
            replace(s, state=SyncState.FINISHED_COPY) if s.state == SyncState.READY else s for s in states
        ]
        set_states(lake, name, [s for s in finished if s.name not in overrun], base)

    again_after_conflict(finish)()
    reach(Failpoint.COPY_FINISHED)
    upto = fence(lake, name)
    copied = [s for s in states if s.state == SyncState.READY and s.name not in overrun]
    again = "changes after its copy were transformed without it"
    set_states(
        lake,
        name,
        [s if upto <= s.lsn else replace(s, state=SyncState.INITIALIZE, reason=again) for s in copied],
    )
    return overrun


def _is_beyond(lake: Lake, path: str, lsn: int) -> bool:
    return (lake.records.position(path) or 0) > lsn


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
    """The select list of the copy, in the forms that `pgsieve.decoding.values.types.from_copy` reads."""
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
    conninfo: Conninfo,
    snapshot: Snapshot,
) -> Copied:
    started = time.monotonic()
    replicated, table = planned.replicated, planned.replicated.table
    types = subscription.column_types(replicated)
    path = lake.replica(subscription.name, table.schema, table.name)
    problem, rows, version, overrun = None, 0, 0, False
    try:
        # Without copy_data a table that comes back goes on from the rows it has.
        kept = not subscription.copy_data and lake.records.exists(path)
        if not kept:
            make_room(subscription.name, lake, (table.schema, table.name), planned.generation)
            _refuse_later(subscription, lake, path, table, snapshot)
            given = planned.chunks if subscription.copy_data else Chunks([], 0)
            columns = [ReplicaColumn(name, t, name in replicated.key) for name, t in types.items()]
            with refusing(subscription.feed.source.name, f'copy table "{table.qualified}"'):
                rows = _write_copy(lake, path, given, conninfo, snapshot, columns)
            reach(Failpoint.TABLE_COPIED)
            overrun = _is_beyond(lake, path, snapshot.lsn)
        version = lake.records.version(path)
    except OverrunError:
        overrun = True
    except PgsieveError as error:
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
        overrun=overrun,
    )


def _refuse_later(
    subscription: Subscription, lake: Lake, path: str, table: Table, snapshot: Snapshot
) -> None:
    """Refuse to copy below the replica's own position: Delta would leave the commit out.

    Raises OverrunError where another process has copied the table since the snapshot.
    """
    held = lake.records.position(path)
    if held is not None and held >= snapshot.lsn:
        with subscription.feed.source.connect() as connection:
            if held <= current_lsn(connection):
                raise OverrunError(path)
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
    conninfo: Conninfo,
    snapshot: Snapshot,
    columns: Sequence[ReplicaColumn],
) -> int:
    """Replace the replica by the rows at the snapshot; how many there are."""
    _check_names(columns)
    properties = column_mapping(c.name for c in columns)
    local = lake.plain(path, (c.name for c in columns)) if columns else None
    schema = replica_schema(columns)
    if local and lake.writes_small(chunks.bytes) and not local.permutes(path, schema):
        batches = [
            batch
            for query in chunks.queries
            for batch in read_again(partial(copied_batches, conninfo, snapshot.name, query, columns))
        ]
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
    subscription: Subscription, announced: Mapping[Name, TableState], copied: Copied, after: Catalog
) -> TableState:
    """The state after a copy; a table that was rewritten meanwhile may have been read as empty (section 13.6)."""
    name = (copied.schema, copied.table)
    if copied.problem:
        # A disabled subscription copies the table when it goes on.
        failed = SyncState.INITIALIZE if subscription.disable_on_error else SyncState.SET_ASIDE
        return TableState(*name, failed, reason=copied.problem)
    state = announced[name]
    assert state.definition is not None
    if _rewritten(state.definition, after):
        reason = f'table "{copied.schema}.{copied.table}" was rewritten while it was copied'
        return replace(state, state=SyncState.INITIALIZE, reason=reason)
    return replace(state, state=SyncState.READY)


def _rewritten(definition: Definition, after: Catalog) -> bool:
    """Whether the table's files are others than when it was copied."""
    table = after.tables.get(definition.layout.oid)
    return table is None or Layout.of(table, after).files != definition.layout.files
