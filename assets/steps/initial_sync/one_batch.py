"""Copies a batch of tables at one exported snapshot, several tables at a time, and records their new states.

In: the tables
Out: a `BatchResult`, with the result of each table, and the tables that have to be copied again after a transient fault
     (such as a lost connection)

Raises OpenTransactionsError if the snapshot would have to wait too long for open transactions, and errors of the lake.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from threading import Semaphore
from typing import Any

import psycopg

from pgsieve.assets.steps.initial_sync.one_table import (
    CopyResult,
    PlannedTable,
    SnapshotCopy,
    make_copy_select_list,
)
from pgsieve.assets.steps.initial_sync.readiness import (
    CopyCompleter,
    defer_tables,
    make_announced_state,
    make_state_after_copy,
)
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.failures import is_lock_error, is_transient
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    find_newest_version,
)
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.assets.steps.validation.waiting import (
    describe_waiting_reason,
    find_table_problems,
    find_unreadable_tables,
    make_subscription_catalog,
)
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog, Table
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.runners import stop_until_done
from pgsieve.resources.postgres.catalog import read_catalog
from pgsieve.resources.postgres.errors import LockedTableError, TransientError
from pgsieve.resources.postgres.origins import find_subscribed_tables
from pgsieve.resources.postgres.snapshot import Snapshot, build_chunk_queries, export_snapshot
from pgsieve.resources.postgres.waits import OpenTransactionsError, find_lock_error

#: The log shows the size of a copied table only if it is at least this large.
_MIN_SHOWN_BYTES = 1024**2
#: The largest number of tables that are read at the same time.
_MAX_READERS = 4


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch.

    - `results`: the results of the tables
    - `tables_to_repeat`: the tables to copy again, because a transient fault has interrupted their copy
    - `first_fault`: the first of these faults
    """

    results: list[CopyResult]
    tables_to_repeat: list[Name]
    first_fault: PgsieveError | None = None


@dataclass(frozen=True)
class _SelectedTables:
    """The published tables of a batch.

    - `problem_by_table`: maps tables that cannot be replicated to the reason
    - `lock_error_by_table`: maps tables that another session has locked to the error
    """

    table_by_name: Mapping[Name, ReplicatedTable]
    problem_by_table: Mapping[Name, PgsieveError]
    lock_error_by_table: Mapping[Name, LockedTableError]

    @property
    def copyable_tables(self) -> dict[Name, ReplicatedTable]:
        """The tables that can be copied now."""
        tables_with_problems = self.problem_by_table.keys() | self.lock_error_by_table.keys()
        return {name: table for name, table in self.table_by_name.items() if name not in tables_with_problems}

    @property
    def names(self) -> list[Name]:
        """The names of the tables that are to be copied, now or later."""
        return [*self.copyable_tables, *self.problem_by_table, *self.lock_error_by_table]


@dataclass(frozen=True)
class BatchCopy:
    """The copy of some tables at a new snapshot.

    It waits at most `wait_seconds` for open transactions, which may keep the server from exporting a snapshot. Before the
    copy, the states of the tables record the LSN of the snapshot. If a replica has this LSN, a later run knows that its
    copy is complete.
    """

    subscription: Subscription
    lake: Lake
    log: Log
    wait_seconds: float

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    @property
    def _copy_completer(self) -> CopyCompleter:
        return CopyCompleter(self.subscription, self.lake, self.log)

    def copy_tables(self, names: Sequence[Name], progress: str) -> BatchResult:
        """Copy tables, and make them ready. `progress` is a text for the log: how many tables are copied already."""
        source, former_states, names_to_copy = (
            self.subscription.slot_stream.source,
            self._states.read_newest(),
            list(names),
        )
        try:
            with export_snapshot(source, self.wait_seconds) as snapshot:
                reach(Failpoint.SNAPSHOT_EXPORTED)
                with source.connect() as connection:
                    # The replicas get the definitions that the tables have in the snapshot. A later step, the UPDATE
                    # transformation, follows later alterations.
                    server_catalog = read_catalog(connection, snapshot.name)
                    catalog = make_subscription_catalog(connection, self.subscription, server_catalog)
                    selected_tables = self._select_tables(connection, catalog, names)
                    names_to_copy = selected_tables.names
                    tables = f"{quantity(len(selected_tables.copyable_tables), 'table')} of {self.subscription.name}"
                    self.log(f"copying {tables} at {format_lsn(snapshot.lsn)}, {progress} done")
                    self._warn_of_other_origins(
                        connection, [t.table for t in selected_tables.copyable_tables.values()]
                    )
                    planned_tables, lock_faults = self._plan_chunks(
                        connection, catalog, selected_tables, snapshot, former_states
                    )
                conninfo = source.make_executor_conninfo()
                states = self._announce_snapshot(selected_tables, catalog, snapshot, former_states)
                reach(Failpoint.COPY_PLANNED)
                # Each read needs a session on the publisher, and the role may be allowed only a few.
                read_limit = Semaphore(_MAX_READERS)
                with conninfo.keep_adbc_sessions() as conninfo_with_sessions:
                    copy = SnapshotCopy(
                        self.subscription, self.lake, snapshot, conninfo_with_sessions, self.log, read_limit
                    )
                    results, copy_faults = self._copy_in_parallel(copy, planned_tables)
            # The first connection might have been closed by now, because it would have been idle during the copy.
            with source.connect() as connection:
                catalog_after = self.subscription.slot_stream.with_defined_publications(
                    read_catalog(connection)
                )
        except OpenTransactionsError:
            raise
        except PgsieveError as error:
            if not is_transient(error):
                raise
            # The next attempt recognises the copies that are complete, and does not repeat them.
            return BatchResult([], names_to_copy, error)
        results = self._make_ready(results, states, catalog_after)
        waiting_results = [
            _make_waiting_result(name, snapshot, error)
            for name, error in selected_tables.problem_by_table.items()
        ]
        deferred_results = self._defer_locked_tables(selected_tables, lock_faults | copy_faults)
        fault_by_table = {
            name: fault for name, fault in (lock_faults | copy_faults).items() if name not in deferred_results
        }
        first_fault = next(iter(fault_by_table.values()), None)
        return BatchResult(
            [*results, *waiting_results, *deferred_results.values()], list(fault_by_table), first_fault
        )

    def _select_tables(
        self, connection: psycopg.Connection[Any], catalog: Catalog, names: Sequence[Name]
    ) -> _SelectedTables:
        """Select the tables of a batch that have to be copied.

        Tables that an earlier run has copied completely are made ready instead.
        """
        names_to_copy = set(names) - self._copy_completer.complete_earlier_copies(names, catalog)
        table_by_name = {
            name: table for name, table in self.subscription.tables(catalog).items() if name in names_to_copy
        }
        problem_by_table = {
            name: error
            for name, error in find_table_problems(self.subscription, catalog).items()
            if name in names_to_copy
        }
        replicable_tables = [table for name, table in table_by_name.items() if name not in problem_by_table]
        lock_error_by_table = {
            name: error for name, error in problem_by_table.items() if isinstance(error, LockedTableError)
        }
        problem_by_table = {
            name: error for name, error in problem_by_table.items() if name not in lock_error_by_table
        }
        return _SelectedTables(
            table_by_name,
            problem_by_table | find_unreadable_tables(connection, self.subscription, replicable_tables),
            lock_error_by_table,
        )

    def _warn_of_other_origins(self, connection: psycopg.Connection[Any], tables: Sequence[Table]) -> None:
        """With `origin = none`, log a warning if other subscriptions of the publisher write to these tables."""
        if self.subscription.slot_stream.options.origin != "none":
            return
        if names := find_subscribed_tables(connection, tables):
            self.log(
                f'subscription "{self.subscription.name}" requested copy_data with origin = NONE but might copy data that had a different origin: other subscriptions write to {", ".join(quote_qualified(*name) for name in names)}; verify that the rows there did not come from other origins'
            )

    def _plan_chunks(
        self,
        connection: psycopg.Connection[Any],
        catalog: Catalog,
        selected_tables: _SelectedTables,
        snapshot: Snapshot,
        former_states: Mapping[Name, TableState],
    ) -> tuple[list[PlannedTable], dict[Name, PgsieveError]]:
        """Divide the tables into chunks, each of which one query reads.

        Returns the planned tables, and the errors of tables that are locked.
        """
        planned_tables, lock_error_by_table = (
            list[PlannedTable](),
            dict[Name, PgsieveError](selected_tables.lock_error_by_table),
        )
        for name, table in selected_tables.copyable_tables.items():
            select_list = make_copy_select_list(self.subscription, table, snapshot)
            try:
                chunks = build_chunk_queries(
                    connection, table, select_list, catalog, self.lake.policy.count_parallel_parts
                )
            except LockedTableError as error:
                lock_error_by_table[name] = error
                continue
            planned_tables.append(PlannedTable(table, chunks, _find_former_definition(former_states, name)))
        return planned_tables, lock_error_by_table

    def _announce_snapshot(
        self,
        selected_tables: _SelectedTables,
        catalog: Catalog,
        snapshot: Snapshot,
        former_states: Mapping[Name, TableState],
    ) -> dict[Name, TableState]:
        """Record the LSN of the snapshot in the states of the tables, and record why other tables have to wait.

        Returns the states with the LSN. Raises TransientError if another process has changed the state of a table since
        `former_states` were read, which was before the snapshot. For example, that process may have set a table aside
        because the server cannot send a later change of it.
        """
        state_by_table = {
            name: make_announced_state(self.subscription, table, catalog, former_states.get(name), snapshot)
            for name, table in selected_tables.copyable_tables.items()
        }
        waiting_states = [
            TableState(
                *name,
                SyncState.INITIALIZE,
                definition=_find_former_definition(former_states, name),
                reason=describe_waiting_reason(error),
            )
            for name, error in selected_tables.problem_by_table.items()
        ]
        former_version = find_newest_version(former_states.values())
        changed_tables = self._states.append_unless_changed(
            [*state_by_table.values(), *waiting_states], lambda: self._states.read_since(former_version)
        )
        if changed_tables:
            raise TransientError(
                f"another process has changed the states of {quantity(len(changed_tables), 'table')}"
                f" of {self.subscription.name}"
            )
        for state in state_by_table.values():
            if state.reason is not None:
                self.log(f"{quote_qualified(*state.name)} is copied again: {state.reason}")
        return state_by_table

    def _copy_in_parallel(
        self, copy: SnapshotCopy, planned_tables: Sequence[PlannedTable]
    ) -> tuple[list[CopyResult], dict[Name, PgsieveError]]:
        """Copy the tables, several at a time.

        Returns the results, and maps tables to the transient faults that have interrupted their copies.
        """
        results, fault_by_table = list[CopyResult](), dict[Name, PgsieveError]()

        def copy_one(table: PlannedTable) -> None:
            try:
                result = copy.copy_table(table)
            except PgsieveError as error:
                if not is_transient(error):
                    raise
                fault_by_table[table.replicated_table.table.schema, table.replicated_table.table.name] = error
                return
            finally:
                self.lake.release_tables()
            results.append(result)
            self.log(_format_progress(result, table.chunks.bytes))

        with ThreadPoolExecutor(self.lake.parallelism) as pool:
            futures = [pool.submit(copy_context().run, copy_one, table) for table in planned_tables]
            try:
                for future in futures:
                    future.result()
            # KeyboardInterrupt is caught, too. Otherwise the process would not end before large tables are copied.
            except BaseException as error:
                stop_until_done(self.lake.runner, futures, error)
                raise
        return results, fault_by_table

    def _make_ready(
        self, results: Sequence[CopyResult], states: Mapping[Name, TableState], catalog_after: Catalog
    ) -> list[CopyResult]:
        """Record the states of the tables after their copies, and begin their histories with the copied rows.

        `catalog_after` is the catalog as it was after the copies. If a history cannot begin, the table's result has the
        problem.
        """
        states_after = [
            make_state_after_copy(self.subscription, states, result, catalog_after)
            for result in results
            if not result.is_overtaken
        ]
        completion = self._copy_completer.complete_copies(states_after)
        for name in completion.overtaken_tables:
            name_text = f"{quote_qualified(*name)} of {self.subscription.name}"
            self.log(f"{name_text} is not made ready: another process has copied it, or changed its state")
        for name, problem in completion.problem_by_table.items():
            self.log(f"the versions of the rows of {quote_qualified(*name)} do not begin: {problem}")
        reach(Failpoint.TABLES_READY)
        return [
            replace(
                result, problem=completion.problem_by_table.get((result.schema, result.table), result.problem)
            )
            for result in results
        ]

    def _defer_locked_tables(
        self, selected_tables: _SelectedTables, fault_by_table: Mapping[Name, PgsieveError]
    ) -> dict[Name, CopyResult]:
        """Leave to the next run the tables that other sessions still lock; returns their results."""
        result_by_table = dict[Name, CopyResult]()
        for name in [name for name, fault in fault_by_table.items() if is_lock_error(fault)]:
            table = selected_tables.table_by_name[name].table
            if lock_fault := find_lock_error(
                self.subscription.slot_stream.source, {table.oid, *table.leaves}
            ):
                result_by_table[name], *_ = defer_tables(self._states, [name], lock_fault, self.log)
        return result_by_table


def _find_former_definition(states: Mapping[Name, TableState], name: Name) -> Definition | None:
    """Find the definition of a table's former replica; None if there was no replica."""
    return states[name].definition if name in states else None


def _make_waiting_result(name: Name, snapshot: Snapshot, error: PgsieveError) -> CopyResult:
    """Make the result of a table that cannot be replicated in the way it is published now."""
    return CopyResult(*name, snapshot.lsn, 0, 0.0, 0, None, (), describe_waiting_reason(error))


def _format_progress(result: CopyResult, size_bytes: int) -> str:
    """Format a line for the log about the copy of a table."""
    name = quote_qualified(result.schema, result.table)
    if result.problem:
        return f"{name} cannot be copied: {result.problem}"
    size_text = f" of {size_bytes / 1024**2:,.1f} MiB" if size_bytes >= _MIN_SHOWN_BYTES else ""
    return f"{name}: {quantity(result.rows, 'row')}{size_text} copied in {result.seconds:.1f} s"
