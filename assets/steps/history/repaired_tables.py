"""Finds replicas that `check --repair` has corrected since the newest cut. Their histories lack the corrections.

A cut is an LSN, and for each replica the Delta version that has exactly the changes before this LSN. The change history
of a table is a Delta table with all changes of the table.

In: the newest cut, and the replicas. Out: the repaired tables. The state of each of them records that its change
history is incomplete, because a repair adds no changes to it. The versions of its rows (`history: scd2`) need no such
record, because they begin anew from the repaired replica (`pgsieve.assets.steps.apply.row_versions`). Raises LakeError.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pgsieve.assets.steps.history.versions import VersionTable
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.cuts import Cut, find_version_in_cut
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates, add_copy_command
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake


def find_repaired_tables(
    subscription: Subscription, lake: Lake, states: Mapping[Name, TableState], cut: Cut | None
) -> set[Name]:
    """Find the tables with a history that were repaired after the cut.

    If a table was copied after the cut, only repairs after its copy count.
    """
    repaired_names = set[Name]()
    for name, state in states.items():
        if not state.is_applied or not _has_history(subscription, lake, state):
            continue
        path = lake.paths.replica(subscription.name, *name)
        version = find_version_in_cut(cut, cut.tables if cut is not None else {}, state)
        if version is None:
            version = lake.records.version_of_position(path, state.lsn)
        if version is not None and lake.records.is_repaired(path, version):
            repaired_names.add(name)
    return repaired_names


def _has_history(subscription: Subscription, lake: Lake, state: TableState) -> bool:
    is_whole = state.definition is not None and state.definition.history.whole
    return is_whole or VersionTable.from_state(subscription, lake, state) is not None


def record_partial_histories(subscription: str, lake: Lake, states: Iterable[TableState], log: Log) -> bool:
    """Record and log that the change histories of tables are no longer whole.

    Returns False if none of them was whole before, so that nothing was recorded.
    """
    partial_states = list[TableState]()
    for state in states:
        definition = state.definition
        if definition is not None and definition.history.whole:
            history = replace(definition.history, whole=False)
            partial_states.append(replace(state, definition=replace(definition, history=history)))
            problem = f"the change history of {quote_qualified(*state.name)} lacks the repaired rows"
            log(add_copy_command(subscription, state.name, problem))
    TableStates(lake, subscription).append_unless_changed(partial_states)
    return bool(partial_states)
