"""Initial row-filtered sync: tables -> replicas, a batch of tables at one exported snapshot.

The slot and capture exist before the snapshot. Each replica's commit has the snapshot's LSN; changes before
it are dropped for that table, later ones applied (section 29.4.5 says which rows are copied). A table copied again is
replaced in one commit, and no other table is affected. A finished copy is not repeated after a crash: the
state before the copy names its snapshot, and with the replica's commit the copy is complete.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import psycopg

from pgsieve.assets.steps.initial_sync.one_batch import BatchCopy, CopiedBatch
from pgsieve.assets.steps.initial_sync.one_table import Copied
from pgsieve.assets.steps.initial_sync.readiness import deferred, is_announced
from pgsieve.assets.steps.log import Log, quiet
from pgsieve.assets.steps.records.failures import passes
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
from pgsieve.decoding.wording import counted
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.awaited import PATIENT_SECONDS, SnapshotAwaitedError
from pgsieve.resources.postgres.errors import PassingFaultError
from pgsieve.resources.postgres.present_catalog import present_catalog
from pgsieve.resources.postgres.source import quote

#: The most that is copied at one snapshot, which holds back the publisher's vacuum. A larger table has its own snapshot.
BATCH_TABLES, BATCH_BYTES = 64, 16 * 1024**3
#: After this many passing faults in a row a copy gives up. The first pause before the next attempt; each later pause is
#: twice as long.
_ATTEMPTS, _PAUSE_SECONDS = 5, 1.0


def tables_to_copy(subscription: Subscription, lake: Lake, warn: Log = quiet) -> list[Name]:
    """The published tables that have no replica yet, or whose definition the replica cannot follow in place.

    Tables that are no longer published are marked so. Tables that are set aside stay so until a copy is requested.
    Tables wait if they cannot be replicated as they are published now, or if the role may not read them. `warn`
    receives warnings of partitions whose changes are not sent. Raises the problems that concern all tables.
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
    """The published tables that the next run is to copy, and the errors of tables that cannot be replicated or read."""
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


@dataclass(frozen=True)
class InitialCopy:
    """The initial copy of a subscription's tables; a snapshot waits `seconds` for transactions that are open."""

    subscription: Subscription
    lake: Lake
    log: Log
    seconds: float = PATIENT_SECONDS

    def of_tables(
        self, sizes: Mapping[Name, int], between: Callable[[bool], None], *, lacking: bool = False
    ) -> list[Copied]:
        """Copy tables in batches, each at a new snapshot; `sizes` has their bytes. A table that fails is set aside.

        The feed's slot is ready. `between` is called after each batch, and gets whether more batches follow. `lacking`
        leaves out tables that need no copy any more when this process gets the lock. Tables that another process
        copies meanwhile are not copied again.

        A table that an earlier run copied, before it died, is made ready now. A passing fault sets no table
        aside: its tables are copied again, at another snapshot. If it persists, they stay to be copied, and the
        fault is raised. With `disable_on_error` a table's own error disables the subscription instead.
        """
        waiting, since = self._begun(sorted(sizes, key=lambda name: sizes[name]), lacking=lacking)
        reach(Failpoint.COPY_BEGUN)
        copied: list[Copied] = []
        failures = 0
        while waiting:
            batch = _next_batch(waiting, sizes)
            progress = f"{len(copied)} of {len(copied) + len(waiting)}"
            try:
                outcome = self._alone(batch, since, progress)
            except SnapshotAwaitedError as error:
                # Other tables and other subscriptions do not wait for this snapshot.
                return [*copied, *deferred(self._states, waiting, error, self.log)]
            copied += outcome.copied
            waiting = [name for name in waiting if name not in batch] + outcome.again
            if outcome.fault is None:
                failures = 0
            else:
                failures = 1 if outcome.copied else failures + 1
                if failures == _ATTEMPTS:
                    raise _given_up(self.subscription, waiting, outcome.fault)
                tables = counted(len(outcome.again), "table")
                self.log(f"{outcome.fault.message}; to be copied again: {tables}")
                time.sleep(_PAUSE_SECONDS * 2 ** (failures - 1))
            between(bool(waiting))
        failed = [c for c in copied if c.problem and not c.awaits]
        if failed and self.subscription.disable_on_error:
            SubscriptionRecord(self.lake, self.subscription.name).disable(failed[0].problem or "")
        return sorted(copied, key=lambda table: (table.schema, table.table))

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def _begun(self, names: list[Name], *, lacking: bool) -> tuple[list[Name], int]:
        """Record that the copy of tables begins; returns the tables, and the version of the states after that."""
        with self.subscription.feed.source.exclusively(self.subscription.name):
            if lacking:
                needed = set(tables_to_copy(self.subscription, self.lake))
                names = [name for name in names if name in needed]
            former = self._states.newest()
            self._states.append(
                [TableState(*n, SyncState.DATA_SYNC) for n in names if not is_announced(former.get(n))]
            )
            return names, newest_version(self._states.newest().values())

    def _alone(self, names: Sequence[Name], since: int, progress: str) -> CopiedBatch:
        """Copy some tables under the subscription's lock: slices that are transformed meanwhile leave them out.

        Tables that another process has made ready after the version `since` of the states are left out.
        """
        batch = BatchCopy(self.subscription, self.lake, self.log, self.seconds)
        try:
            with self.subscription.feed.source.exclusively(self.subscription.name):
                states = self._states.newest().values()
                ready = {s.name for s in states if s.state == SyncState.READY and s.version > since}
                left = [name for name in names if name not in ready]
                return batch.of_tables(left, progress) if left else CopiedBatch([], [])
        except SnapshotAwaitedError:
            raise
        except PgsieveError as error:
            if not passes(error):
                raise
            return CopiedBatch([], list(names), error)


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
        hint="run again once the server and the network are well: copied tables stay copied",
        sqlstate=fault.sqlstate,
    )


def _next_batch(waiting: Sequence[Name], sizes: Mapping[Name, int]) -> list[Name]:
    """The tables that are copied at one snapshot, during which the publisher keeps dead rows."""
    total = list(accumulate(sizes[name] for name in waiting))
    return [name for name, bytes_ in zip(waiting, total, strict=True) if bytes_ <= BATCH_BYTES][
        :BATCH_TABLES
    ] or [waiting[0]]
