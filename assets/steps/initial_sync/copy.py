"""Initial row-filtered sync: tables -> replicas, each batch of tables at one exported snapshot.

The slot and the capture publications exist before the snapshot. Each replica's commit has the snapshot's LSN as its
position, so the apply skips the table's earlier changes. PostgreSQL documentation, 29.4.5 Initial Data
Synchronization, says which rows are copied. A table that is copied again is replaced in one commit. After a crash a
finished copy is not repeated: the table's state records the snapshot's LSN before the copy, and a replica at that LSN
is complete.
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

#: The limits of a batch: its snapshot holds back the publisher's vacuum. A larger table has a batch of its own.
BATCH_TABLES, BATCH_BYTES = 64, 16 * 1024**3
#: The transient faults in a row that fail a copy; the pause after the first one, which doubles each time.
_MAX_FAULTS, _PAUSE_SECONDS = 5, 1.0


def tables_to_copy(subscription: Subscription, lake: Lake, warn: Log = no_log) -> list[Name]:
    """The published tables that have no replica yet, or whose replica cannot adopt the table's present definition.

    Also records which tables are no longer published, and which have to wait because they cannot be replicated as
    published, or the role may not read them. Tables that are set aside stay so until the user has them copied.
    `warn` receives warnings of partitions whose changes are not sent. Raises problems that concern all tables.
    """
    with subscription.feed.source.connect() as connection:
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
    """The published tables that the next run has to copy, and the errors of tables that cannot be replicated or read."""
    problems = table_problems(subscription, catalog)
    tables_needed = {
        name: table
        for name, table in tables.items()
        if name not in problems and _needs_copy(states.get(name), subscription.definition(table, catalog))
    }
    return tables_needed, problems | unreadable_tables(connection, subscription, tables_needed.values())


def _needs_copy(state: TableState | None, present: Definition) -> bool:
    """Whether the next run has to copy a table in this state; `present` is the table's present definition."""
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
    """The initial copy of a subscription's tables; a snapshot waits at most `seconds` for open transactions."""

    subscription: Subscription
    lake: Lake
    log: Log
    seconds: float = PATIENT_SECONDS

    def of_tables(
        self, sizes: Mapping[Name, int], between: Callable[[bool], None], *, lacking: bool = False
    ) -> list[CopyResult]:
        """Copy tables in batches, each at a new snapshot, smallest first; `sizes` has their bytes.

        The feed's slot has to be ready. `between` is called after each batch with whether more batches follow. With
        `lacking`, tables that need no copy any more are left out. Tables that another process copies meanwhile are not
        copied again. A table that an earlier run copied before it died is only made ready.

        A table that fails by its own error is set aside; with `disable_on_error` the subscription is disabled instead.
        After a transient fault the tables are copied again, at another snapshot. If it persists, it is raised, and the
        next run copies the tables.
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
                # The remaining tables are left to the next run, so that no other work waits for a snapshot.
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
        """Record that the copy begins; returns the tables to copy, and the version of the states after that."""
        with self.subscription.feed.source.hold_lock(self.subscription.name):
            if lacking:
                tables_needed = set(tables_to_copy(self.subscription, self.lake))
                names = [name for name in names if name in tables_needed]
            former_states = self._states.newest()
            self._states.append(
                [TableState(*n, SyncState.DATA_SYNC) for n in names if not is_announced(former_states.get(n))]
            )
            return names, newest_version(self._states.newest().values())

    def _copy_batch(self, names: Sequence[Name], states_version: int, progress: str) -> CopiedBatch:
        """Copy a batch under the subscription's lock: a slice that is transformed meanwhile would lack these tables.

        Leaves out tables that another process has made ready since version `states_version` of the states.
        """
        batch = BatchCopy(self.subscription, self.lake, self.log, self.seconds)
        try:
            with self.subscription.feed.source.hold_lock(self.subscription.name):
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
    """The error of a copy that has failed by transient faults too often."""
    if isinstance(fault, LakeError):
        return fault
    first_table, other_tables = (
        quote(*waiting[0]),
        f" and {quantity(len(waiting) - 1, 'other table')}" if len(waiting) > 1 else "",
    )
    return TransientError(
        f'source "{subscription.feed.source.name}": cannot copy table {first_table}{other_tables} of subscription'
        f' "{subscription.name}" now: {fault.message}',
        hint="run again once the server and the network work again: copied tables stay copied",
        sqlstate=fault.sqlstate,
    )


def _next_batch(waiting: Sequence[Name], sizes: Mapping[Name, int]) -> list[Name]:
    """The first of the waiting tables, as many as a batch may have."""
    total = list(accumulate(sizes[name] for name in waiting))
    return [name for name, bytes_ in zip(waiting, total, strict=True) if bytes_ <= BATCH_BYTES][
        :BATCH_TABLES
    ] or [waiting[0]]
