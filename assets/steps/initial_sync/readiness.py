"""The sync states of a table around its copy.

Before the copy, the state is `d`, with the LSN of the snapshot. After the copy the table is finished (`f`), and then
ready (`r`).

In: the tables of a batch (those that are copied at one snapshot), and the results of their copies
Out: rows of `_table_states`

If a replica has the LSN that the table's state has announced, its copy is complete, whichever process has copied it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pgsieve.assets.steps.history.copied_rows import begin_history
from pgsieve.assets.steps.history.versions import VersionTable, describe_versions_failure
from pgsieve.assets.steps.initial_sync.one_table import CopyResult, is_beyond
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.failures import TABLE_ERRORS, describe_error
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, TableStates
from pgsieve.assets.steps.records.transformed_slices import TransformedSlices
from pgsieve.assets.steps.subscription import (
    Definition,
    History,
    Subscription,
    arrow_types,
    planned_sources,
)
from pgsieve.decoding.changes.columns import changes_schema
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.evolution import SchemaChangedError
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.decoding.wording import quantity
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.snapshot import Snapshot
from pgsieve.resources.postgres.waits import OpenTransactionsError


@dataclass(frozen=True)
class CompletedCopies:
    """The result of making tables ready.

    - `ready_states`: the states of the tables that became ready
    - `overtaken_tables`: the tables that another process has copied at a later LSN, changed, or given another state
    - `problem_by_table`: maps tables to the reasons why the versions of their rows (`history: scd2`) could not begin
    """

    ready_states: Sequence[TableState] = ()
    overtaken_tables: Sequence[Name] = ()
    problem_by_table: Mapping[Name, str] = field(default_factory=dict)


def make_announced_state(
    subscription: Subscription,
    replicated_table: ReplicatedTable,
    catalog: Catalog,
    former_state: TableState | None,
    snapshot: Snapshot,
) -> TableState:
    """Make the state of a table before its copy. It announces the LSN of the snapshot.

    If the former replica cannot follow a change of the table, this change is the reason of the state.
    """
    definition = subscription.definition(replicated_table, catalog)
    history = former_state.definition.history if former_state and former_state.definition else History()
    has_copied_rows = bool(subscription.histories.find_choice(_find_name(replicated_table)).initial)
    definition_of_copy = replace(
        definition,
        history=replace(history.with_columns(definition.columns), whole=has_copied_rows),
        published=definition.published and replace(definition.published, at=snapshot.time),
        unaltered=subscription.copy_data and subscription.slot_stream.options.origin == "any",
    )
    return TableState(
        *_find_name(replicated_table),
        SyncState.DATA_SYNC,
        snapshot.lsn,
        definition_of_copy,
        find_unfollowed_change(former_state, definition),
    )


def find_unfollowed_change(state: TableState | None, present_definition: Definition) -> str | None:
    """The change of a table that its replica cannot follow, so that the table has to be copied again; None without one."""
    if state is None or state.definition is None:
        return None
    try:
        planned_sources(state.definition, present_definition)
    except SchemaChangedError as error:
        return error.message
    return None


def _find_name(replicated_table: ReplicatedTable) -> Name:
    return replicated_table.table.schema, replicated_table.table.name


def defer_tables(
    states: TableStates, names: Sequence[Name], error: OpenTransactionsError, log: Log
) -> list[CopyResult]:
    """Leave tables to the next run, because their copy would have to wait for open transactions.

    Such a transaction keeps the server from exporting a snapshot, or has locked the table. Returns the results of the tables.
    """
    reason = f"{error.message}; the next run copies it"
    states.leave_to_next_copy(names, reason)
    log(f"{quantity(len(names), 'table')} of {states.subscription} cannot be copied yet: {error.message}")
    transactions = error.transactions
    return [
        CopyResult(*name, 0, 0, 0.0, 0, None, (), reason, awaited_transactions=transactions) for name in names
    ]


def make_state_after_copy(
    subscription: Subscription,
    announced_states: Mapping[Name, TableState],
    result: CopyResult,
    catalog_after: Catalog,
) -> TableState:
    """Make the state of a table after its copy.

    `catalog_after` is the catalog as it was after the copy. If it shows that the table was rewritten meanwhile, the
    table has to be copied again, because it may have been read as empty (PostgreSQL documentation, 13.6 Caveats).
    """
    name = (result.schema, result.table)
    if result.problem and not result.must_be_repeated:
        return _make_failed_state(subscription, name, result.problem)
    state = announced_states[name]
    if result.must_be_repeated:
        return replace(state, state=SyncState.INITIALIZE, reason=result.problem)
    assert state.definition is not None
    if state.definition.layout.is_rewritten_in(catalog_after):
        reason = f'table "{result.schema}.{result.table}" was rewritten while it was copied'
        return replace(state, state=SyncState.INITIALIZE, reason=reason)
    return replace(state, state=SyncState.READY, reason=None)


def _make_failed_state(subscription: Subscription, name: Name, problem: str) -> TableState:
    """Make the state of a table whose copy has failed, or the versions of whose rows could not begin."""
    # The problem disables the subscription. Once the user has enabled it again, the table is copied.
    if subscription.disable_on_error:
        return TableState(*name, SyncState.INITIALIZE, reason=problem)
    return TableState(*name, SyncState.INITIALIZE).with_problem(subscription.name, problem)


@dataclass(frozen=True)
class CopyCompleter:
    """Makes the tables of a subscription ready after their copies."""

    subscription: Subscription
    lake: Lake
    log: Log

    @property
    def _states(self) -> TableStates:
        return TableStates(self.lake, self.subscription.name)

    def _find_path(self, name: Name) -> str:
        return self.lake.paths.replica(self.subscription.name, *name)

    def complete_earlier_copies(self, names: Collection[Name], catalog: Catalog) -> set[Name]:
        """Make tables ready that an earlier run has copied; returns their names.

        These are the tables with a replica that is at the LSN which the table's state announces.
        """
        lake, states = self.lake, self._states.read_newest()
        path_by_table = {
            name: self._find_path(name) for name in names if name in states and states[name].announces_copy
        }
        with lake.consistent_read(*path_by_table.values()):
            complete_states = [
                replace(states[name], state=SyncState.READY, reason=None)
                for name, path in path_by_table.items()
                if (definition := states[name].definition) is not None
                and _is_at(lake, path, states[name].lsn)
                and not definition.layout.is_rewritten_in(catalog)
            ]
        ready_states = self.complete_copies(complete_states).ready_states
        for state in ready_states:
            self.log(
                f"{quote_qualified(*state.name)} was copied at {format_lsn(state.lsn)} by an earlier run"
            )
        return {state.name for state in ready_states}

    def complete_copies(self, states: Sequence[TableState]) -> CompletedCopies:
        """Record the states of tables after their copy, and begin their histories with the copied rows.

        A slice has the changes from one position of the slot to another. To transform a slice is to decode and filter its
        changes for the tables. A table may become ready only if no slice after its LSN was transformed without it.
        Otherwise the table is copied again. A process that has lost its lock may be transforming such a slice now. So a
        fence, a commit without rows, is made in the table `_transformed`. If the other process commits before the fence,
        the table is copied again. Otherwise its commit fails, and it transforms the slice again, this time with the table.
        """
        if not states:
            return CompletedCopies()
        problem_by_table = self._begin_histories(
            [state for state in states if state.state == SyncState.READY]
        )
        states_after = [
            _make_failed_state(self.subscription, state.name, problem_by_table[state.name])
            if state.name in problem_by_table
            else state
            for state in states
        ]
        overtaken_tables = self._record_finished_copies(states_after)
        reach(Failpoint.COPY_FINISHED)
        finished_states = [
            state
            for state in states_after
            if state.state == SyncState.READY and state.name not in overtaken_tables
        ]
        if not finished_states:
            return CompletedCopies((), sorted(overtaken_tables), problem_by_table)
        transformed_lsn = TransformedSlices(self.lake, self.subscription.name).fence()
        reason = "changes after its copy were transformed without it"
        overtaken_tables |= self._states.append_unless_changed(
            [
                state
                if transformed_lsn <= state.lsn
                else replace(state, state=SyncState.INITIALIZE, reason=reason)
                for state in finished_states
            ],
            partial(self._find_tables_in_other_states, finished_states),
        )
        ready_states = [
            state
            for state in finished_states
            if transformed_lsn <= state.lsn and state.name not in overtaken_tables
        ]
        return CompletedCopies(ready_states, sorted(overtaken_tables), problem_by_table)

    def _record_finished_copies(self, states: Sequence[TableState]) -> set[Name]:
        """Record that the copies of tables are finished.

        Returns the tables that are left out. Another process has copied them at a later LSN, changed them, or given them
        another state, for example because the server cannot send one of their changes.
        """
        copied_states = [state for state in states if state.state == SyncState.READY]
        path_by_table = {state.name: self._find_path(state.name) for state in copied_states}
        with self.lake.consistent_read(*path_by_table.values()):
            overtaken_tables = {
                state.name
                for state in copied_states
                if is_beyond(self.lake, path_by_table[state.name], state.lsn)
            }
        finished_states = [
            replace(state, state=SyncState.FINISHED_COPY) if state.name in path_by_table else state
            for state in states
            if state.name not in overtaken_tables
        ]
        return overtaken_tables | self._states.append_unless_changed(
            finished_states, partial(self._find_tables_in_other_states, copied_states)
        )

    def _find_tables_in_other_states(self, states: Sequence[TableState]) -> set[Name]:
        """Find the tables whose newest state does not announce a copy at the LSN of their state in `states`."""
        newest_states = self._states.read_newest()
        return {
            state.name
            for state in states
            if not (newest_state := newest_states[state.name]).announces_copy or newest_state.lsn != state.lsn
        }

    def _begin_histories(self, states: Sequence[TableState]) -> dict[Name, str]:
        """Begin the histories of copied tables with their rows. Maps tables to the reasons why a history cannot begin."""
        problems = self.lake.map_in_parallel(self._begin_history, states)
        return {
            state.name: problem
            for state, problem in zip(states, problems, strict=True)
            if problem is not None
        }

    def _begin_history(self, state: TableState) -> str | None:
        """Begin the change history of a table, and the versions of its rows. Returns the reason if the latter cannot begin."""
        subscription, lake, definition = self.subscription, self.lake, state.definition
        assert definition is not None
        if is_beyond(lake, self._find_path(state.name), state.lsn):
            # In the meantime, another process has copied the table, or has applied changes to it.
            return None
        time = definition.published.time if definition.published else None
        if definition.history.whole:
            schema = changes_schema(arrow_types(subscription, state.name, definition))
            begin_history(lake, subscription.name, state, schema, time)
        table = VersionTable.from_state(subscription, lake, state)
        if table is not None:
            try:
                table.begin_and_log(self.log, state.lsn, time, skips_reached=True)
            except TABLE_ERRORS as error:
                return describe_versions_failure(lake, error, state.name, table.path)
        elif subscription.histories.find_choice(state.name).scd2:
            name = quote_qualified(*state.name)
            self.log(f"the versions of {name} are not kept: `pgsieve validate` says why")
        return None


def _is_at(lake: Lake, path: str, lsn: int) -> bool:
    """True if a replica is at an LSN. False if it cannot be read, since it has to be copied again."""
    try:
        return lake.records.position(path) == lsn
    except LakeError as error:
        # Raises the error if the lake itself has failed, and not only this table.
        describe_error(lake, error)
        return False
