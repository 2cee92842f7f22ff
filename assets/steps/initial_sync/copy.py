"""Copies the present rows of a subscription's tables into the lake, before their changes are applied.

A replica is the copy of a table in the lake. Tables are copied in batches. All tables of a batch are read at one
exported snapshot of the publisher, so their rows are of one moment. PostgreSQL documentation, 29.4.5 Initial Data
Synchronization, says which rows match the row filters and are copied.

In: the tables to copy, with their sizes in bytes
Out: the result of each table's copy (`CopyResult`)

The replication slot and pgsieve's capture publications (with which the slot is read) are created before the
snapshot, so no later change is missed. The commit of each replica contains the snapshot's LSN (position in the WAL),
and changes before that LSN are not applied to the replica. If a table is copied again, one commit replaces all rows
of its replica.

After a crash a finished copy is not repeated. Before the copy begins, the table's state records the snapshot's LSN.
If the replica has that LSN as its position, the next run knows that the copy is complete.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import psycopg

from pgsieve.assets.steps.initial_sync.one_batch import BatchCopy, BatchResult
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.initial_sync.readiness import defer_tables, find_unfollowed_change
from pgsieve.assets.steps.log import Log, no_log
from pgsieve.assets.steps.records.failures import is_transient
from pgsieve.assets.steps.records.subscription_state import SubscriptionRecord
from pgsieve.assets.steps.records.table_states import (
    Name,
    SyncState,
    TableState,
    TableStates,
    find_newest_version,
)
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.assets.steps.validation.uncaptured import find_held_back_tables
from pgsieve.assets.steps.validation.waiting import (
    find_table_problems,
    find_unreadable_tables,
    hold_back_tables,
    make_subscription_catalog,
)
from pgsieve.assets.steps.validation.warnings import find_unsent_leaves
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.wording import quantity
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import TransientError
from pgsieve.resources.postgres.present_catalog import read_present_catalog
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.waits import PATIENT_SECONDS, OpenTransactionsError

#: The largest number of tables in a batch, and their largest total size in bytes. As long as the batch's snapshot is
#: open, the publisher's vacuum cannot remove dead rows, so a batch must not take too long. A larger table has a batch
#: of its own.
BATCH_TABLES, BATCH_BYTES = 64, 16 * 1024**3
#: A transient fault is an error that may go away, such as a lost connection. A copy fails after this many transient
#: faults in a row. The pause after the first fault has this many seconds, and each further pause is twice as long.
_MAX_FAULTS, _PAUSE_SECONDS = 5, 1.0


def find_tables_to_copy(subscription: Subscription, lake: Lake, warn: Log = no_log) -> list[Name]:
    """Find the published tables that have to be copied, and record the tables that cannot be copied.

    A table has to be copied if it has no complete replica, or if its replica cannot adopt the table's present columns
    and key. After an error a table may be set aside, so that its changes are no longer applied. It is not copied until
    the user asks for that by `pgsieve resync`.

    The function writes states of two kinds of tables: those that are no longer published; and those that have to wait,
    because they cannot be replicated as they are published, or because the role may not read them.

    `warn` receives warnings about partitions whose changes the publisher does not send, for example unlogged ones.
    Raises PgsieveError for a problem that concerns all tables, such as a missing publication. With `disable_on_error`, a
    table that cannot be replicated or read disables the subscription, and the result is empty.
    """
    with subscription.slot_stream.source.connect() as connection:
        catalog = make_subscription_catalog(connection, subscription, read_present_catalog(connection))
        tables, states = subscription.tables(catalog), TableStates(lake, subscription.name).read_newest()
        tables_to_copy, problem_by_table = find_tables_without_copy(
            connection, subscription, catalog, tables, states
        )
    for warning in find_unsent_leaves(subscription, catalog):
        warn(warning.message)
    unpublished_states = [
        s for name, s in states.items() if name not in tables and s.state != SyncState.REMOVED
    ]
    # A table whose state another process writes meanwhile is left to the next run.
    TableStates(lake, subscription.name).append_unless_changed(
        [
            replace(s, state=SyncState.REMOVED, lsn=s.lsn if s.state == SyncState.READY else 0, reason=None)
            for s in unpublished_states
        ]
    )
    if hold_back_tables(subscription, lake, problem_by_table):
        return []
    return [name for name in tables_to_copy if name not in problem_by_table]


def find_tables_without_copy(
    connection: psycopg.Connection[Any],
    subscription: Subscription,
    catalog: Catalog,
    tables: Mapping[Name, ReplicatedTable],
    states: Mapping[Name, TableState],
) -> tuple[dict[Name, ReplicatedTable], dict[Name, PgsieveError]]:
    """Find the published tables that the next run has to copy, and the errors of tables that cannot be replicated or read.

    - `tables`: maps the names of the published tables to their definitions in `catalog`
    - `states`: maps the names of tables to their recorded states
    """
    problem_by_table = find_table_problems(subscription, catalog) | find_held_back_tables(
        subscription.slot_stream, subscription.name, catalog, states
    )
    tables_to_copy = {
        name: table
        for name, table in tables.items()
        if name not in problem_by_table
        and _needs_copy(states.get(name), subscription.definition(table, catalog))
    }
    return tables_to_copy, problem_by_table | find_unreadable_tables(
        connection, subscription, tables_to_copy.values()
    )


def _needs_copy(state: TableState | None, present_definition: Definition) -> bool:
    """True if the next run has to copy a table with this state. `present_definition` is the publisher's definition now."""
    if state is None or state.state in {
        SyncState.INITIALIZE,
        SyncState.DATA_SYNC,
        SyncState.FINISHED_COPY,
        SyncState.REMOVED,
    }:
        return True
    if state.state == SyncState.SET_ASIDE:
        return False
    return state.definition is None or find_unfollowed_change(state, present_definition) is not None


@dataclass(frozen=True)
class InitialCopy:
    """The initial copy of a subscription's tables.

    The server can export a snapshot only after the transactions that are open at that time have ended. Each batch
    waits for this at most `wait_seconds`.
    """

    subscription: Subscription
    lake: Lake
    log: Log
    wait_seconds: float = PATIENT_SECONDS

    def copy_tables(
        self,
        bytes_by_table: Mapping[Name, int],
        after_batch: Callable[[bool], None],
        *,
        only_needed: bool = False,
    ) -> list[CopyResult]:
        """Copy tables in batches, each at a new snapshot. Smaller tables are copied first.

        - `bytes_by_table`: maps the tables to copy to their sizes in bytes
        - `after_batch`: called after each batch, with True if more batches follow
        - `only_needed`: if True, tables that do not need a copy any more are left out

        The slot of the subscription must exist, and be ready to be read. Tables that another process copies in the
        meantime are not copied again. A table that an earlier run copied before it died becomes ready without a copy.

        If a table fails by an error of its own, for example an unreadable value, the table is set aside. With the
        setting `disable_on_error` the subscription is disabled instead. After a transient fault, such as a lost
        connection, the tables that are not copied yet are copied again at another snapshot. If the faults continue,
        the last one is raised, and the next run copies these tables.

        Returns the results of the tables, also of those that were set aside or left to the next run. There is no result
        for tables that were copied before: by an earlier run, or by another process meanwhile.
        """
        remaining_tables, states_version = self._begin_copy(
            sorted(bytes_by_table, key=lambda name: bytes_by_table[name]), only_needed=only_needed
        )
        reach(Failpoint.COPY_BEGUN)
        results: list[CopyResult] = []
        fault_count = 0
        while remaining_tables:
            batch = _choose_next_batch(remaining_tables, bytes_by_table)
            progress = f"{len(results)} of {len(results) + len(remaining_tables)}"
            try:
                outcome = self._copy_batch(batch, states_version, progress)
            except OpenTransactionsError as error:
                # Open transactions keep the server from exporting a snapshot. The remaining tables are left to the next
                # run; otherwise all other work of this run would wait, too.
                return [*results, *defer_tables(self._states, remaining_tables, error, self.log)]
            results += outcome.results
            remaining_tables = [
                name for name in remaining_tables if name not in batch
            ] + outcome.tables_to_repeat
            if outcome.first_fault is None:
                fault_count = 0
            else:
                fault_count = 1 if outcome.results else fault_count + 1
                if fault_count == _MAX_FAULTS:
                    raise _make_final_error(self.subscription, remaining_tables, outcome.first_fault)
                tables = quantity(len(outcome.tables_to_repeat), "table")
                self.log(f"{outcome.first_fault.message}; to be copied again: {tables}")
                time.sleep(_PAUSE_SECONDS * 2 ** (fault_count - 1))
            after_batch(bool(remaining_tables))
        failed_results = [c for c in results if c.problem and not c.awaited_transactions]
        if failed_results and self.subscription.disable_on_error:
            SubscriptionRecord(self.lake, self.subscription.name).disable(failed_results[0].problem or "")
        return sorted(results, key=lambda table: (table.schema, table.table))

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def _begin_copy(self, names: list[Name], *, only_needed: bool) -> tuple[list[Name], int]:
        """Record that the copy begins.

        Returns the tables to copy, and the newest version of the recorded states.
        """
        with self.subscription.slot_stream.source.hold_lock(self.subscription.name):
            if only_needed:
                lacking_tables = set(find_tables_to_copy(self.subscription, self.lake))
                names = [name for name in names if name in lacking_tables]
            former_states = self._states.read_newest()
            self._states.append(
                [
                    TableState(*name, SyncState.DATA_SYNC)
                    for name in names
                    if not (name in former_states and former_states[name].announces_copy)
                ]
            )
            return names, find_newest_version(self._states.read_newest().values())

    def _copy_batch(self, names: Sequence[Name], states_version: int, progress: str) -> BatchResult:
        """Copy a batch of tables while this process holds the subscription's lock.

        Without the lock another process could decode and filter a slice (some changes from the slot) during the copy. It
        would leave out the changes of these tables, since they are not ready. A table is not copied if another process
        has made it ready after `states_version`, a version of the Delta table of states.
        """
        batch = BatchCopy(self.subscription, self.lake, self.log, self.wait_seconds)
        try:
            with self.subscription.slot_stream.source.hold_lock(self.subscription.name):
                states = self._states.read_newest().values()
                ready_tables = {
                    s.name for s in states if s.state == SyncState.READY and s.version > states_version
                }
                tables_to_copy = [name for name in names if name not in ready_tables]
                return batch.copy_tables(tables_to_copy, progress) if tables_to_copy else BatchResult([], [])
        except OpenTransactionsError:
            raise
        except PgsieveError as error:
            if not is_transient(error):
                raise
            return BatchResult([], list(names), error)


def _make_final_error(
    subscription: Subscription, remaining_tables: Sequence[Name], fault: PgsieveError
) -> PgsieveError:
    """Make the error for too many transient faults: `fault` is the last one, `remaining_tables` are not copied yet."""
    if isinstance(fault, LakeError):
        return fault
    first_table, other_tables = (
        quote(*remaining_tables[0]),
        f" and {quantity(len(remaining_tables) - 1, 'other table')}" if len(remaining_tables) > 1 else "",
    )
    return TransientError(
        f'source "{subscription.slot_stream.source.name}": cannot copy table {first_table}{other_tables} of subscription "{subscription.name}" now: {fault.message}',
        hint="run again once the server and the network work again: copied tables stay copied",
        sqlstate=fault.sqlstate,
    )


def _choose_next_batch(remaining_tables: Sequence[Name], bytes_by_table: Mapping[Name, int]) -> list[Name]:
    """Choose the tables of the next batch: the first of the remaining tables, as many as the limits of a batch allow."""
    cumulative_bytes = list(accumulate(bytes_by_table[name] for name in remaining_tables))
    return [
        name
        for name, bytes_so_far in zip(remaining_tables, cumulative_bytes, strict=True)
        if bytes_so_far <= BATCH_BYTES
    ][:BATCH_TABLES] or [remaining_tables[0]]
