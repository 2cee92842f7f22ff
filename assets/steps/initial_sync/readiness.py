"""The sync states of a table around its copy: announced with the snapshot's LSN, then finished, then ready.

In: the tables of a batch and the results of their copies. Out: rows of `_table_states`. A replica at the LSN that its
state has announced is complete, whichever process has copied it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pgsieve.assets.steps.history.copied_rows import begin_history
from pgsieve.assets.steps.history.versions import VersionTable, versions_failure
from pgsieve.assets.steps.initial_sync.one_table import CopyResult, is_beyond
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, reason
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import (
    History,
    Subscription,
    arrow_types,
)
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog, ReplicatedTable
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.snapshot import Snapshot
from pgsieve.resources.postgres.waits import OpenTransactionsError


@dataclass(frozen=True)
class Completed:
    """The tables that became ready, the tables that another process has copied later, and the problems of histories."""

    ready: Sequence[TableState] = ()
    overtaken: Sequence[Name] = ()
    problems: Mapping[Name, str] = field(default_factory=dict)


def announced_state(
    subscription: Subscription,
    replicated: ReplicatedTable,
    catalog: Catalog,
    former_state: TableState | None,
    snapshot: Snapshot,
) -> TableState:
    """The state of a table that is about to be copied: it announces the snapshot's LSN."""
    definition = subscription.definition(replicated, catalog)
    history = former_state.definition.history if former_state and former_state.definition else History()
    has_copied_rows = bool(subscription.histories.of(_name(replicated)).initial)
    definition_of_copy = replace(
        definition,
        history=replace(history.with_columns(definition.columns), whole=has_copied_rows),
        published=definition.published and replace(definition.published, at=snapshot.time),
        unaltered=subscription.copy_data and subscription.feed.options.origin == "any",
    )
    return TableState(*_name(replicated), SyncState.DATA_SYNC, snapshot.lsn, definition_of_copy)


def _name(replicated: ReplicatedTable) -> Name:
    return replicated.table.schema, replicated.table.name


def is_announced(state: TableState | None) -> bool:
    """Whether the state announces the snapshot of a copy."""
    return (
        state is not None and state.state in {SyncState.DATA_SYNC, SyncState.FINISHED_COPY} and state.lsn > 0
    )


def defer(
    states: TableStates, names: Sequence[Name], error: OpenTransactionsError, log: Log
) -> list[CopyResult]:
    """Leave tables to the next run, as their snapshot waits for open transactions; returns their results."""
    reason = f"{error.message}; the next run copies it"
    states.leave_to_next_copy(names, reason)
    log(f"{quantity(len(names), 'table')} of {states.subscription} cannot be copied yet: {error.message}")
    awaits = error.transactions
    return [CopyResult(*n, 0, 0, 0.0, 0, None, (), reason, awaits=awaits) for n in names]


def state_after_copy(
    subscription: Subscription,
    announced_states: Mapping[Name, TableState],
    result: CopyResult,
    catalog_after: Catalog,
) -> TableState:
    """The state of a table after its copy; `catalog_after` is the catalog after the copy.

    A table that was rewritten meanwhile has to be copied again: it may have been read as empty (PostgreSQL
    documentation, 13.6 Caveats).
    """
    name = (result.schema, result.table)
    if result.problem and not result.again:
        return _failed_state(subscription, name, result.problem)
    state = announced_states[name]
    if result.again:
        return replace(state, state=SyncState.INITIALIZE, reason=result.problem)
    assert state.definition is not None
    if state.definition.layout.is_rewritten(catalog_after):
        reason = f'table "{result.schema}.{result.table}" was rewritten while it was copied'
        return replace(state, state=SyncState.INITIALIZE, reason=reason)
    return replace(state, state=SyncState.READY)


def _failed_state(subscription: Subscription, name: Name, problem: str) -> TableState:
    """The state of a table that could not be copied, or whose histories could not begin."""
    if subscription.disable_on_error:  # The table is copied once the subscription is enabled again.
        return TableState(*name, SyncState.INITIALIZE, reason=problem)
    return TableState(*name, SyncState.INITIALIZE).with_problem(subscription.name, problem)


@dataclass(frozen=True)
class Readiness:
    """Makes the tables of a subscription ready after their copies."""

    subscription: Subscription
    lake: Lake
    log: Log

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def _path(self, name: Name) -> str:
        return self.lake.paths.replica(self.subscription.name, *name)

    def complete_earlier(self, names: Collection[Name], catalog: Catalog) -> set[Name]:
        """Make ready the tables that an earlier run has copied: their replica is at the LSN that their state announces."""
        lake, states = self.lake, self._states.newest()
        paths = {n: self._path(n) for n in names if is_announced(states.get(n))}
        with lake.consistent_read(*paths.values()):
            complete = [
                replace(states[name], state=SyncState.READY)
                for name, path in paths.items()
                if (definition := states[name].definition) is not None
                and _is_at(lake, path, states[name].lsn)
                and not definition.layout.is_rewritten(catalog)
            ]
        ready = self.complete(complete).ready
        for state in ready:
            self.log(
                f"{quote_qualified(*state.name)} was copied at {format_lsn(state.lsn)} by an earlier run"
            )
        return {state.name for state in ready}

    def complete(self, states: Sequence[TableState]) -> Completed:
        """Record the states after a copy, and begin the tables' histories with the copied rows.

        A table becomes ready only if no slice after its LSN was transformed without it; otherwise it is copied again.
        A process that has lost the lock may be transforming such a slice at this moment. If it commits the slice before
        the fence, it has left the table out, and the table is copied again. If not, the fence makes it transform the
        slice anew, and then it includes the table.
        """
        if not states:
            return Completed()
        problems = self._begin_histories([s for s in states if s.state == SyncState.READY])
        states_after = [
            _failed_state(self.subscription, s.name, problems[s.name]) if s.name in problems else s
            for s in states
        ]
        overtaken = retry_after_conflict(lambda: self._finish(states_after))()
        reach(Failpoint.COPY_FINISHED)
        finished_states = [s for s in states_after if s.state == SyncState.READY and s.name not in overtaken]
        if not finished_states:
            return Completed((), overtaken, problems)
        upto = TransformedSlices(self.lake, self.subscription.name).fence()
        reason = "changes after its copy were transformed without it"
        self._states.append(
            [
                s if upto <= s.lsn else replace(s, state=SyncState.INITIALIZE, reason=reason)
                for s in finished_states
            ]
        )
        return Completed([s for s in finished_states if upto <= s.lsn], overtaken, problems)

    def _finish(self, states: Sequence[TableState]) -> list[Name]:
        """Record that copies are finished; returns the tables left out, as another process has copied them later."""
        lake = self.lake
        base = max(lake.records.head(self._states.path).version, 0)
        copy_lsns = {s.name: s.lsn for s in states if s.state == SyncState.READY}
        paths = {name: self._path(name) for name in copy_lsns}
        with lake.consistent_read(*paths.values()):
            overtaken = [name for name, lsn in copy_lsns.items() if is_beyond(lake, paths[name], lsn)]
        finished_states = [
            replace(s, state=SyncState.FINISHED_COPY) if s.name in copy_lsns else s for s in states
        ]
        self._states.append([s for s in finished_states if s.name not in overtaken], base)
        return overtaken

    def _begin_histories(self, states: Sequence[TableState]) -> dict[Name, str]:
        """Begin the histories of copied tables with their rows; returns the problems of histories that cannot begin."""
        problems = self.lake.map_in_parallel(self._begin_history, states)
        return {
            state.name: problem
            for state, problem in zip(states, problems, strict=True)
            if problem is not None
        }

    def _begin_history(self, state: TableState) -> str | None:
        subscription, lake, definition = self.subscription, self.lake, state.definition
        assert definition is not None
        if is_beyond(lake, self._path(state.name), state.lsn):
            return None  # Another process has copied the table since, or has applied changes.
        time = definition.published.time if definition.published else None
        if definition.history.whole:
            schema = changes_schema(arrow_types(subscription, state.name, definition))
            begin_history(lake, subscription.name, state, schema, time)
        table = VersionTable.of_state(subscription, lake, state)
        if table is not None:
            try:
                table.begin_and_log(self.log, state.lsn, time, once=True)
            except TABLE_ERRORS as error:
                return versions_failure(lake, error, state.name, table.path)
        elif subscription.histories.of(state.name).scd2:
            name = quote_qualified(*state.name)
            self.log(f"the versions of {name} are not kept: `pgsieve validate` says why")
        return None


def _is_at(lake: Lake, path: str, lsn: int) -> bool:
    """Whether a replica is at an LSN; False for an unreadable one, which has to be copied again."""
    try:
        return lake.records.position(path) == lsn
    except LakeError as error:
        reason(lake, error)  # Raises a fault of the lake itself.
        return False
