"""Describes the histories of a table for `pgsieve validate`.

In: the configuration, and the present state of the table. Out: sentences that say which histories the next run will keep,
and why it cannot keep others. Raises LakeError.
"""

from collections.abc import Iterator
from dataclasses import replace

from pgsieve.assets.steps.history.versions import VersionTable, versions_problem
from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.assets.steps.records.table_states import Name, SyncState, TableState, copy_again
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.resources.lake.lake import Lake


def expected_histories(
    subscription: Subscription,
    lake: Lake,
    name: Name,
    state: TableState | None,
    definition: Definition,
    newest: Cut | None,
) -> Iterator[str]:
    """Yield sentences about the histories of a table.

    `definition` is the table's present definition; `state` may have an older one. `newest` is the newest cut.
    """
    kept = subscription.histories.of(name)
    copied = state if state is not None and state.applies else None
    if kept.initial:
        if copied is None or (copied.definition is not None and copied.definition.history.whole):
            yield "the change history begins with the copied rows"
        else:
            yield copy_again(subscription.name, name, "the change history lacks the copied rows")
    present = replace(copied or TableState(*name, SyncState.INITIALIZE), definition=definition)
    if kept.scd2:
        yield from _expected_versions(subscription, lake, present, newest, is_copied=copied is not None)
    elif copied is not None and copied.definition is not None:
        path = lake.paths.row_versions(subscription.name, *name, copied.definition.history.generation)
        if lake.records.exists(path):
            yield f'the versions of its rows in "{path}" stay as they are: new ones are no longer kept'


def _expected_versions(
    subscription: Subscription, lake: Lake, state: TableState, newest: Cut | None, *, is_copied: bool
) -> Iterator[str]:
    table = VersionTable.of_state(subscription, lake, state)
    if table is None:
        assert state.definition is not None
        replica = lake.paths.replica(subscription.name, *state.name)
        problem = versions_problem(lake, state.definition, replica)
        assert problem is not None
        yield f"no versions of its rows are kept: {problem[0]}; {problem[1]}"
        return
    is_followed = newest is not None and state.name in newest.versioned
    if not is_copied or (is_followed and lake.records.exists(table.path)):
        yield f'versions of its rows in "{table.path}"'
    else:
        yield f'versions of its rows in "{table.path}", which begin at the newest cut with the next run'
