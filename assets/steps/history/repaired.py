"""Histories after `check --repair`: versions of rows begin anew with the repaired rows, and a change history is not whole any more.

In: a repaired replica, whose rows no change has made. Out: a commit of the versions, a state of the table. Raises LakeError,
OverrunError.
"""

from dataclasses import replace
from datetime import UTC, datetime

from pgsieve.assets.steps.history.versions import VersionTable
from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.table_states import TableState, TableStates, copy_again
from pgsieve.assets.steps.subscription import Subscription
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.values.quoting import quote_qualified
from pgsieve.resources.lake.lake import Lake


def follow_repair(
    subscription: Subscription, lake: Lake, state: TableState, version: int | None, log: Log
) -> None:
    """Let the histories follow a replica with repaired rows.

    `version` is the replica's Delta version with the rows of the newest cut; None where it has no such version.
    """
    shown = quote_qualified(*state.name)
    if (definition := state.definition) is not None and definition.history.whole:
        partial = replace(definition, history=replace(definition.history, whole=False))
        TableStates(lake, subscription.name).append([replace(state, definition=partial)])
        lacking = f"the change history of {shown} lacks the repaired rows"
        log(copy_again(subscription.name, state.name, lacking))
    table = VersionTable.kept(subscription, lake, state)
    if table is None or not lake.records.exists(table.path):
        return
    if version is None:
        log(copy_again(subscription.name, state.name, f"the versions of {shown} lack the repaired rows"))
        return
    cut = Cuts(lake, subscription.name).last()
    # The replica lacks nothing from there to the LSN of the repair.
    lsn = max(state.lsn, cut.lsn if cut else 0, lake.records.position(table.path) or 0)
    table.begin_anew(lsn, datetime.now(UTC), version=version, once=False)
    log(f"the versions of {shown} are ended, and begin anew at {format_lsn(lsn)} with the repaired rows")
