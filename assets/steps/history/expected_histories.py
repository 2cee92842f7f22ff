"""Describes the histories of a table for `pgsieve validate`.

In: the configuration, and the present state of the table. Out: sentences that say which histories the next run will keep,
and why it cannot keep others. Raises LakeError.
"""

from collections.abc import Iterator
from dataclasses import replace

from pgsieve.assets.steps.history.versions import VersionTable, find_versions_problem
from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, add_copy_command
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.resources.lake.lake import Lake


def describe_histories(
    subscription: Subscription,
    lake: Lake,
    name: Name,
    state: TableState | None,
    definition: Definition,
    newest_cut: Cut | None,
) -> Iterator[str]:
    """Yield sentences about the histories of a table.

    `definition` is the table's present definition (its columns and key); `state` may have an older one. `newest_cut` is
    the newest cut: a cut is an LSN, and for each replica the Delta version that has exactly the changes before this
    LSN.
    """
    choice = subscription.histories.find_choice(name)
    copied_state = state if state is not None and state.is_applied else None
    if choice.initial:
        if copied_state is None or (
            copied_state.definition is not None and copied_state.definition.history.whole
        ):
            yield "the change history begins with the copied rows"
        else:
            yield add_copy_command(subscription.name, name, "the change history lacks the copied rows")
    present_state = replace(copied_state or TableState(*name, SyncState.INITIALIZE), definition=definition)
    if choice.scd2:
        yield from _describe_versions(
            subscription, lake, present_state, newest_cut, is_copied=copied_state is not None
        )
    elif copied_state is not None and copied_state.definition is not None:
        path = lake.paths.row_versions(subscription.name, *name, copied_state.definition.history.generation)
        if lake.records.exists(path):
            yield f'the versions of its rows in "{path}" stay as they are: new ones are no longer kept'


def _describe_versions(
    subscription: Subscription, lake: Lake, state: TableState, newest_cut: Cut | None, *, is_copied: bool
) -> Iterator[str]:
    table = VersionTable.from_state(subscription, lake, state)
    if table is None:
        assert state.definition is not None
        replica = lake.paths.replica(subscription.name, *state.name)
        problem = find_versions_problem(lake, state.definition, replica)
        assert problem is not None
        yield f"no versions of its rows are kept: {problem[0]}; {problem[1]}"
        return
    is_in_cut = newest_cut is not None and state.name in newest_cut.versioned
    if not is_copied or (is_in_cut and lake.records.exists(table.path)):
        yield f'versions of its rows in "{table.path}"'
    else:
        yield f'versions of its rows in "{table.path}", which the next run begins at the newest cut'
