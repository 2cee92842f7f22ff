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
If the next run finds the replica at that LSN, the copy is complete.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import psycopg

from pgsieve.assets.steps.initial_sync.one_batch import BatchCopy, CopiedBatch
from pgsieve.assets.steps.initial_sync.one_table import CopyResult
from pgsieve.assets.steps.initial_sync.readiness import defer, is_announced
from pgsieve.assets.steps.log import Log, no_log
from pgsieve.assets.steps.records.failures import is_transient
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
)
from pgsieve.assets.steps.validation.warnings import unsent_leaves
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.decoding.wording import quantity
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import TransientError
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.waits import PATIENT_SECONDS, OpenTransactionsError

#: The largest number of tables in a batch, and their largest total size in bytes. As long as the batch's snapshot is
#: open, the publisher's vacuum cannot remove dead rows, so a batch must not take too long. A larger table has a batch
#: of its own.
BATCH_TABLES, BATCH_BYTES = 64, 16 * 1024**3
#: A transient fault is an error that may go away, such as a lost connection. A copy fails after this many transient
#: faults in a row. The pause after the first fault has this many seconds, and each further pause is twice as long.
_MAX_FAULTS, _PAUSE_SECONDS = 5, 1.0


def tables_to_copy(subscription: Subscription, lake: Lake, warn: Log = no_log) -> list[Name]:
    """Find the published tables that have to be copied, and record the tables that cannot be copied.

    A table has to be copied if it has no complete replica, or if its replica cannot adopt the table's present columns
    and key. A table that is set aside (its changes are not applied, because of an error) is not copied until the user
    asks for that by `pgsieve resync`.

    The states of two kinds of tables are written: of tables that are no longer published; and of tables that have to
    wait, because they cannot be replicated as they are published, or because the role may not read them.

    `warn` receives warnings about partitions whose changes the publisher does not send, for example unlogged ones.
    Raises PgsieveError for a problem that concerns all tables, such as a missing publication.
    """
    with subscription.slot_stream.source.connect() as connection:
        catalog = sound_catalog(connection, subscription, present_catalog(connection))
        tables, states = subscription.tables(catalog), TableStates(lake, subscription.name).newest()
        tables_needed, problems = lacking_copy(connection, subscription, catalog, tables, states)
    for warning in unsent_leaves(subscription, catalog):
        warn(warning.message)
    unpublished = [s for name, s in states.items() if name not in tables and s.state != SyncState.REMOVED]
    TableStates(lake, subscription.name).append(
        [
            replace(s, state=SyncState.REMOVED, lsn=s.lsn if s.state == SyncState.READY else 0, reason=None)
            for s in unpublished
        ],
    )
    if hold_back(subscription, lake, problems):
        return []
    return [name for name in tables_needed if name not in problems]


def lacking_copy(
    connection: psycopg.Connection[Any],
    subscription: Subscription,
    catalog: Catalog,
    tables: Mapping[Name, ReplicatedTable],
    states: Mapping[Name, TableState],
) -> tuple[dict[Name, ReplicatedTable], dict[Name, PgsieveError]]:
    """The published tables that the next run has to copy, and the errors of tables that cannot be replicated or read.

    - `tables`: maps the names of the published tables to their definitions in `catalog`
    - `states`: maps the names of tables to their recorded states
    """
    problems = table_problems(subscription, catalog)
    tables_needed = {
        name: table
        for name, table in tables.items()
        if name not in problems and _needs_copy(states.get(name), subscription.definition(table, catalog))
    }
    return tables_needed, problems | unreadable_tables(connection, subscription, tables_needed.values())


def _needs_copy(state: TableState | None, present: Definition) -> bool:
    """True if the next run has to copy a table with this state and the definition `present` on the publisher."""
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


@dataclass(frozen=True)
class InitialCopy:
    """The initial copy of a subscription's tables.

    The server can export a snapshot only after the transactions that are open at that time have ended. Each batch
    waits for this at most `seconds`.
    """

    subscription: Subscription
    lake: Lake
    log: Log
    seconds: float = PATIENT_SECONDS

    def of_tables(
        self, sizes: Mapping[Name, int], between: Callable[[bool], None], *, lacking: bool = False
    ) -> list[CopyResult]:
        """Copy tables in batches, each at a new snapshot. Smaller tables are copied first.

        - `sizes`: maps the tables to copy to their sizes in bytes
        - `between`: called after each batch, with True if more batches follow
        - `lacking`: if True, tables that do not need a copy any more are left out

        The slot of the subscription must exist, and be ready to be read. Tables that another process copies in the
        meantime are not copied again. If an earlier run copied a table and died, the table is only made ready.

        If a table fails by an error of its own, for example an unreadable value, the table is set aside. With the
        setting `disable_on_error` the subscription is disabled instead. After a transient fault, such as a lost
        connection, the tables that are not copied yet are copied again at another snapshot. If the faults continue,
        the last one is raised, and the next run copies these tables.

        Returns the results of all tables, also of those that were set aside or left to the next run.
        """
        waiting, states_version = self._begin(sorted(sizes, key=lambda name: sizes[name]), lacking=lacking)
        reach(Failpoint.COPY_BEGUN)
        results: list[CopyResult] = []
        failures = 0
        while waiting:
            batch = _next_batch(waiting, sizes)
            progress = f"{len(results)} of {len(results) + len(waiting)}"
            try:
                outcome = self._copy_batch(batch, states_version, progress)
            except OpenTransactionsError as error:
                # Open transactions keep the server from exporting a snapshot. The remaining tables are left to the next
                # run; otherwise all other work of this run would wait, too.
                return [*results, *defer(self._states, waiting, error, self.log)]
            results += outcome.copied
            waiting = [name for name in waiting if name not in batch] + outcome.again
            if outcome.fault is None:
                failures = 0
            else:
                failures = 1 if outcome.copied else failures + 1
                if failures == _MAX_FAULTS:
                    raise _final_error(self.subscription, waiting, outcome.fault)
                tables = quantity(len(outcome.again), "table")
                self.log(f"{outcome.fault.message}; to be copied again: {tables}")
                time.sleep(_PAUSE_SECONDS * 2 ** (failures - 1))
            between(bool(waiting))
        failed_results = [c for c in results if c.problem and not c.awaits]
        if failed_results and self.subscription.disable_on_error:
            SubscriptionRecord(self.lake, self.subscription.name).disable(failed_results[0].problem or "")
        return sorted(results, key=lambda table: (table.schema, table.table))

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def _begin(self, names: list[Name], *, lacking: bool) -> tuple[list[Name], int]:
        """Record that the copy begins.

        Returns the tables to copy, and the version of the table of states after the record.
        """
        with self.subscription.slot_stream.source.hold_lock(self.subscription.name):
            if lacking:
                tables_needed = set(tables_to_copy(self.subscription, self.lake))
                names = [name for name in names if name in tables_needed]
            former_states = self._states.newest()
            self._states.append(
                [TableState(*n, SyncState.DATA_SYNC) for n in names if not is_announced(former_states.get(n))]
            )
            return names, newest_version(self._states.newest().values())

    def _copy_batch(self, names: Sequence[Name], states_version: int, progress: str) -> CopiedBatch:
        """Copy a batch of tables while this process holds the subscription's lock.

        Without the lock another process could transform a slice (some changes from the slot) during the copy, and
        leave out the changes of these tables, since they are not ready. Tables that another process has made ready
        after `states_version`, a version of the table of states, are left out of the copy.
        """
        batch = BatchCopy(self.subscription, self.lake, self.log, self.seconds)
        try:
            with self.subscription.slot_stream.source.hold_lock(self.subscription.name):
                states = self._states.newest().values()
                ready = {s.name for s in states if s.state == SyncState.READY and s.version > states_version}
                lacking = [name for name in names if name not in ready]
                return batch.of_tables(lacking, progress) if lacking else CopiedBatch([], [])
        except OpenTransactionsError:
            raise
        except PgsieveError as error:
            if not is_transient(error):
                raise
            return CopiedBatch([], list(names), error)


def _final_error(subscription: Subscription, waiting: Sequence[Name], fault: PgsieveError) -> PgsieveError:
    """The error to raise after too many transient faults; `fault` is the last one, `waiting` the tables not copied yet."""
    if isinstance(fault, LakeError):
        return fault
    first_table, other_tables = (
        quote(*waiting[0]),
        f" and {quantity(len(waiting) - 1, 'other table')}" if len(waiting) > 1 else "",
    )
    return TransientError(
        f'source "{subscription.slot_stream.source.name}": cannot copy table {first_table}{other_tables} of subscription'
        f' "{subscription.name}" now: {fault.message}',
        hint="run again once the server and the network work again: copied tables stay copied",
        sqlstate=fault.sqlstate,
    )


def _next_batch(waiting: Sequence[Name], sizes: Mapping[Name, int]) -> list[Name]:
    """The tables of the next batch: the first of the waiting tables, as many as the limits of a batch allow."""
    total = list(accumulate(sizes[name] for name in waiting))
    return [name for name, bytes_ in zip(waiting, total, strict=True) if bytes_ <= BATCH_BYTES][
        :BATCH_TABLES
    ] or [waiting[0]]
