"""Initial row-filtered sync: tables -> replicas, a batch of tables at one exported snapshot.

The slot and capture exist before the snapshot. Each replica's commit has the snapshot's LSN; changes before
it are dropped for that table, later ones applied (section 29.4.5 for what is copied). A table copied again is
replaced in one commit, and no other table is affected. A finished copy is not repeated after a crash: the
state before the copy names its snapshot, and with the replica's commit the copy is complete.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Semaphore
from typing import Any

import psycopg

from pgsieve.assets.steps.initial_sync.one_table import Copied, PlannedTable, copied_list, copy_table
from pgsieve.assets.steps.initial_sync.readiness import announced, declare, is_announced, settle, state_after
from pgsieve.assets.steps.log import Log, quiet
from pgsieve.assets.steps.records.failures import is_locked_out, passes
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates, newest_version
from pgsieve.assets.steps.subscription import (
    Definition,
    Subscription,
    planned_sources,
)
from pgsieve.assets.steps.validation.waiting import (
    hold_back,
    sound_catalog,
    table_problems,
    unreadable_tables,
    waiting_for,
)
from pgsieve.assets.steps.validation.warnings import unsent_leaves
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable, Table
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import counted
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.awaited import PATIENT_SECONDS, SnapshotAwaitedError, lock_awaited
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.errors import LockedTableError, PassingFaultError
from pgsieve.resources.postgres.origins import subscribed_tables
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.snapshot import (
    Snapshot,
    chunk_queries,
    exported_snapshot,
)
from pgsieve.resources.postgres.source import quote

#: This much is copied at one snapshot, which holds back the publisher's vacuum (a table is never divided).
BATCH_TABLES, BATCH_BYTES = 64, 16 * 1024**3
#: How often tables that met a passing fault are copied again without any success; the first pause, doubled
#: each time.
_ATTEMPTS, _PAUSE_SECONDS = 5, 1.0
_LOOK_SECONDS = 0.1
#: From this size on a line of progress has the size.
_TOLD_BYTES = 1024**2
#: The tables that are read at the same time.
_READERS = 4


def tables_to_copy(subscription: Subscription, lake: Lake, warn: Log = quiet) -> list[Name]:
    """The published tables that have no replica yet, or whose definition the replica cannot follow in place.

    Tables that are not published any more are marked so. Tables set aside stay so until a copy is requested.
    Tables that cannot be replicated as they are published now wait, as do those that the role may not read.
    `warn` receives warnings of partitions whose changes are not sent. Raises problems that concern all of
    them.
    """
    with subscription.feed.source.connect() as connection:
        catalog = sound_catalog(connection, subscription, present_catalog(connection))
        tables, states = subscription.tables(catalog), TableStates(lake, subscription.name).newest()
        needed, problems = lacking_copy(connection, subscription, catalog, tables, states)
    for warning in unsent_leaves(subscription, catalog):
        warn(warning.message)
    gone = [s for name, s in states.items() if name not in tables and s.state != SyncState.REMOVED]
    TableStates(lake, subscription.name).append(
        [
            replace(s, state=SyncState.REMOVED, lsn=s.lsn if s.state == SyncState.READY else 0, reason=None)
            for s in gone
        ],
    )
    if hold_back(subscription, lake, problems):
        return []
    return [name for name in needed if name not in problems]


def lacking_copy(
    connection: psycopg.Connection[Any],
    subscription: Subscription,
    catalog: Catalog,
    tables: Mapping[Name, ReplicatedTable],
    states: Mapping[Name, TableState],
) -> tuple[dict[Name, ReplicatedTable], dict[Name, PgsieveError]]:
    """The published tables that the next run is to copy; and why some cannot be replicated, or these not be read."""
    problems = table_problems(subscription, catalog)
    needed = {
        name: table
        for name, table in tables.items()
        if name not in problems and _needs_copy(states.get(name), subscription.definition(table, catalog))
    }
    return needed, problems | unreadable_tables(connection, subscription, needed.values())


def _needs_copy(state: TableState | None, present: Definition) -> bool:
    """Whether a table in this state is to be copied by the next run."""
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


def copy_batches(
    subscription: Subscription,
    lake: Lake,
    sizes: Mapping[Name, int],
    log: Log,
    between: Callable[[bool], None],
    *,
    lacking: bool = False,
    seconds: float = PATIENT_SECONDS,
) -> list[Copied]:
    """Copy tables, given with their bytes, a batch of them at one new snapshot.

    A table that fails is set aside.

    The feed's slot is ready. `between` is called after each batch, with whether there are more. `lacking`
    leaves out tables that need no copy any more, now that it is this process's turn. Tables that another
    process copies meanwhile are not copied again.

    A table that an earlier run copied, before it died, is made ready now. A passing fault sets no table
    aside: its tables are copied again, at another snapshot. If it persists, they stay to be copied, and the
    fault is raised. With `disable_on_error` a table's own error disables the subscription instead.
    """
    waiting = sorted(sizes, key=lambda name: sizes[name])
    with subscription.feed.source.exclusively(subscription.name):
        if lacking:
            needed = set(tables_to_copy(subscription, lake))
            waiting = [name for name in waiting if name in needed]
        former_states = TableStates(lake, subscription.name).newest()
        begun = [
            TableState(*name, SyncState.DATA_SYNC)
            for name in waiting
            if not is_announced(former_states.get(name))
        ]
        TableStates(lake, subscription.name).append(begun)
        since = newest_version(TableStates(lake, subscription.name).newest().values())
    reach(Failpoint.COPY_BEGUN)
    copied: list[Copied] = []
    failures = 0
    while waiting:
        batch = _next_batch(waiting, sizes)
        progress = f"{len(copied)} of {len(copied) + len(waiting)}"
        try:
            outcome = _copied_alone(subscription, lake, batch, since, progress, log, seconds)
        except SnapshotAwaitedError as error:
            # Changes of other tables, and of other subscriptions, do not wait with it.
            return [*copied, *deferred(subscription, lake, waiting, error, log)]
        copied += outcome.copied
        waiting = [name for name in waiting if name not in batch] + outcome.again
        if outcome.fault is None:
            failures = 0
        else:
            failures = 1 if outcome.copied else failures + 1
            if failures == _ATTEMPTS:
                raise _given_up(subscription, waiting, outcome.fault)
            log(f"{outcome.fault.message}; to be copied again: {counted(len(outcome.again), 'table')}")
            time.sleep(_PAUSE_SECONDS * 2 ** (failures - 1))
        between(bool(waiting))
    failed = [c for c in copied if c.problem and not c.awaits]
    if failed and subscription.disable_on_error:
        SubscriptionRecord(lake, subscription.name).disable(failed[0].problem or "")
    return sorted(copied, key=lambda table: (table.schema, table.table))


def _former(former_states: Mapping[Name, TableState], name: Name) -> Definition | None:
    """The former definition of the table's replica."""
    return former_states[name].definition if name in former_states else None


def _waiting(name: Name, snapshot: Snapshot, error: PgsieveError) -> Copied:
    """The result for a table that cannot be replicated as it is published now."""
    return Copied(*name, snapshot.lsn, 0, 0.0, 0, None, (), waiting_for(error))


def deferred(
    subscription: Subscription, lake: Lake, names: Sequence[Name], error: SnapshotAwaitedError, log: Log
) -> list[Copied]:
    """Leave tables to the next run, as their snapshot waits for other transactions."""
    former, reason = TableStates(lake, subscription.name).newest(), f"{error.message}; the next run copies it"
    TableStates(lake, subscription.name).append(
        TableState(*n, SyncState.INITIALIZE, definition=_former(former, n), reason=reason) for n in names
    )
    log(f"{counted(len(names), 'table')} of {subscription.name} cannot be copied yet: {error.message}")
    awaits = error.transactions
    return [Copied(*n, 0, 0, 0.0, 0, None, (), reason, awaits=awaits) for n in names]


def _given_up(subscription: Subscription, waiting: Sequence[Name], fault: PgsieveError) -> PgsieveError:
    """The error of a copy that meets faults again and again."""
    if isinstance(fault, LakeError):
        return fault
    first, more = (
        quote(*waiting[0]),
        f" and {counted(len(waiting) - 1, 'other table')}" if len(waiting) > 1 else "",
    )
    return PassingFaultError(
        f'source "{subscription.feed.source.name}": cannot copy table {first}{more} of subscription'
        f' "{subscription.name}" now: {fault.message}',
        hint="run again once the server and the network are well: what is copied stays copied",
        sqlstate=fault.sqlstate,
    )


def _next_batch(waiting: Sequence[Name], sizes: Mapping[Name, int]) -> list[Name]:
    """The tables that are copied at one snapshot, during which the publisher keeps dead rows."""
    total = list(accumulate(sizes[name] for name in waiting))
    return [name for name, bytes_ in zip(waiting, total, strict=True) if bytes_ <= BATCH_BYTES][
        :BATCH_TABLES
    ] or [waiting[0]]


@dataclass(frozen=True)
class _Batch:
    """The result of a batch: tables copied, and those that met a passing fault."""

    copied: list[Copied]
    again: list[Name]
    fault: PgsieveError | None = None


def _copied_alone(
    subscription: Subscription,
    lake: Lake,
    names: Sequence[Name],
    since: int,
    progress: str,
    log: Log,
    seconds: float,
) -> _Batch:
    """Copy some tables alone: changes that are transformed meanwhile leave them out, and would be missing afterwards.

    Those that another process has made ready `since` this one began are left out.
    """
    try:
        with subscription.feed.source.exclusively(subscription.name):
            states = TableStates(lake, subscription.name).newest().values()
            ready = {
                state.name for state in states if state.state == SyncState.READY and state.version > since
            }
            left = [name for name in names if name not in ready]
            return _copy_batch(subscription, lake, left, progress, log, seconds) if left else _Batch([], [])
    except SnapshotAwaitedError:
        raise
    except PgsieveError as error:
        if not passes(error):
            raise
        return _Batch([], list(names), error)


def _copy_batch(
    subscription: Subscription, lake: Lake, names: Sequence[Name], progress: str, log: Log, seconds: float
) -> _Batch:
    """Copy some tables at one new snapshot, several at a time, and make them ready.

    Their states announce the snapshot first: a replica that has it is complete, whenever that is found.
    """
    feed = subscription.feed
    former_states = TableStates(lake, subscription.name).newest()
    states: dict[Name, TableState] = {}
    copied: list[Copied] = []
    faults: dict[Name, PgsieveError] = {}
    published: list[Name] = list(names)
    # Each reader has a session on the publisher, of which a role may have few; writers wait for the lake.
    reading = Semaphore(_READERS)

    def one(table: PlannedTable) -> None:
        name = (table.replicated.table.schema, table.replicated.table.name)
        try:
            outcome = copy_table(subscription, lake, table, conninfo, snapshot, log, reading)
        except PgsieveError as error:
            if not passes(error):
                raise
            faults[name] = error
            return
        finally:
            lake.release_tables()
        copied.append(outcome)
        log(_described(outcome, table.chunks.bytes))

    try:
        with exported_snapshot(feed.source, seconds) as snapshot:
            reach(Failpoint.SNAPSHOT_EXPORTED)
            with feed.source.connect() as connection:
                # The definitions are those of the snapshot: later changes of them are followed.
                catalog = sound_catalog(connection, subscription, read_catalog(connection, snapshot.name))
                left = set(names) - settle(subscription, lake, names, catalog, log)
                known = {n: t for n, t in subscription.tables(catalog).items() if n in left}
                problems = {n: e for n, e in table_problems(subscription, catalog).items() if n in left}
                faults |= {n: e for n, e in problems.items() if isinstance(e, LockedTableError)}
                problems = {n: e for n, e in problems.items() if n not in faults}
                tables = {n: t for n, t in known.items() if n not in problems and n not in faults}
                problems |= unreadable_tables(connection, subscription, tables.values())
                tables = {n: t for n, t in tables.items() if n not in problems}
                published = [*tables, *problems, *faults]
                log(
                    f"copying {counted(len(tables), 'table')} of {subscription.name} at {format_lsn(snapshot.lsn)}, {progress} done"
                )
                if feed.options.origin == "none":
                    _warn_of_other_origins(subscription, [t.table for t in tables.values()], connection, log)
                planned = []
                for name, t in tables.items():
                    former = former_states.get(name)
                    try:
                        planned.append(_planned(connection, subscription, lake, t, snapshot, catalog, former))
                    except LockedTableError as error:
                        faults[name] = error
            conninfo = feed.source.executor_conninfo()
            states = {
                name: announced(subscription, table, catalog, former_states.get(name), snapshot)
                for name, table in tables.items()
            }
            waiting = [
                TableState(
                    *n, SyncState.INITIALIZE, definition=_former(former_states, n), reason=waiting_for(error)
                )
                for n, error in problems.items()
            ]
            TableStates(lake, subscription.name).append([*states.values(), *waiting])
            reach(Failpoint.COPY_PLANNED)
            with ThreadPoolExecutor(lake.parallelism) as pool:
                copying = [pool.submit(copy_context().run, one, table) for table in planned]
                try:
                    for each in copying:
                        each.result()
                # Also at an interruption: a large table would otherwise be copied to its end.
                except BaseException:
                    under_way = [each for each in copying if not each.cancel()]
                    while wait(under_way, _LOOK_SECONDS).not_done:
                        lake.executors.stop()
                    raise
        # On a new connection: an earlier one has been idle for as long as the copy took.
        with feed.source.connect() as connection:
            after = feed.with_defined(read_catalog(connection))
    except SnapshotAwaitedError:
        raise
    except PgsieveError as error:
        if not passes(error):
            raise
        # A finished copy is found at the next snapshot, or by the next run.
        return _Batch([], published, error)
    made = [state_after(subscription, states, outcome, after) for outcome in copied if not outcome.overrun]
    for name in declare(subscription, lake, made, log).overrun:
        log(f"{quote_qualified(*name)} of {subscription.name} is copied by another process")
    reach(Failpoint.TABLES_READY)
    copied += [_waiting(n, snapshot, error) for n, error in problems.items()]
    for name in [n for n, fault in faults.items() if is_locked_out(fault)]:
        if awaited := lock_awaited(feed.source, {known[name].table.oid, *known[name].table.leaves}):
            copied += deferred(subscription, lake, [name], awaited, log)
            del faults[name]
    return _Batch(copied, list(faults), next(iter(faults.values()), None))


def _planned(
    connection: psycopg.Connection[Any],
    subscription: Subscription,
    lake: Lake,
    replicated: ReplicatedTable,
    snapshot: Snapshot,
    catalog: Catalog,
    former: TableState | None,
) -> PlannedTable:
    """The plan reads a table's size on one connection; its chunks are read by the executors. Raises LockedTableError."""
    selected, parallelism = copied_list(subscription, replicated, snapshot), lake.policy.parts_in_parallel
    chunks = chunk_queries(connection, replicated, selected, catalog, parallelism)
    generation = former.definition.history.generation if former and former.definition else 0
    return PlannedTable(replicated, chunks, generation)


def _described(copied: Copied, size: int) -> str:
    """A line of progress."""
    name = quote_qualified(copied.schema, copied.table)
    if copied.problem:
        return f"{name} cannot be copied: {copied.problem}"
    bytes_told = f" of {size / 1024**2:,.1f} MiB" if size >= _TOLD_BYTES else ""
    return f"{name}: {counted(copied.rows, 'row')}{bytes_told} copied in {copied.seconds:.1f} s"


def _warn_of_other_origins(
    subscription: Subscription, tables: Sequence[Table], connection: psycopg.Connection[Any], log: Log
) -> None:
    if shared := subscribed_tables(connection, tables):
        log(
            f'subscription "{subscription.name}" requested copy_data with origin = NONE but might copy data that had '
            f"a different origin: other subscriptions write to {', '.join(quote_qualified(*name) for name in shared)}; "
            "verify that the rows there did not come from other origins"
        )
