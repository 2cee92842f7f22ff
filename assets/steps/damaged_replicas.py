"""Replicas that are not what pgsieve left: gone, unreadable, or put back to an earlier version by somebody.

Found before anything is applied: changes would go to a table that lacks the ones before them, and the position in a
restored table says nothing of its rows. Such a table is set aside; a copy that is asked for makes it anew.
"""

from collections.abc import Collection
from dataclasses import replace

from assets.steps.cuts import Cut, cuts
from assets.steps.failures import copy_again, reason
from assets.steps.subscription import Subscription
from assets.steps.table_states import READY, REMOVED, SET_ASIDE, Name, TableState, set_states, table_states
from resources.delta import Lake
from resources.lake_errors import LakeError, again_after_conflict
from resources.table_maintenance import maintenance


def set_damaged_aside(
    subscription: Subscription, lake: Lake, cut: Cut | None, changed: Collection[Name]
) -> None:
    """Set aside the tables whose replica is damaged; one that is gone and not published any more is left so.

    Of the `changed` ones, which are about to be written, the whole log is read.
    """
    states = [s for s in table_states(lake, subscription.name).values() if s.applies]
    aside = [
        replace(state, state=SET_ASIDE, reason=copy_again(subscription.name, state.name, problem))
        if state.state == READY
        else replace(state, state=REMOVED, lsn=0)
        for state in states
        if (problem := _damage(subscription, lake, state, cut, read=state.name in changed)) is not None
    ]
    set_states(lake, subscription.name, aside)


def _damage(
    subscription: Subscription, lake: Lake, state: TableState, cut: Cut | None, *, read: bool
) -> str | None:
    """What is wrong with a replica that was ready; None where nothing is."""
    path = lake.replica(subscription.name, *state.name)
    try:
        if not lake.records.exists(path):
            return f'its replica "{path}" is gone'
        if read:
            lake.records.version(path)
        # A cut from before the copy says nothing of what was copied.
        told = cut is not None and (state.at is None or state.at <= cut.at)
        known = cut.tables.get(state.name) if cut and told else None
        if known is not None and lake.records.is_restored(path, known):
            return f'somebody has put its replica "{path}" back to an earlier version'
    except LakeError as error:
        return reason(lake, error)
    return None


def make_room(subscription: str, lake: Lake, name: Name, generation: int) -> None:
    """Let a copy replace a damaged replica: take away logs that cannot be read, and cuts of versions to come.

    The change history of this generation, which goes on after the copy, is begun anew where its log is unreadable. A
    table begun anew, or put back, counts versions again that cuts have named: those cuts would name other rows. Data
    files stay until they are vacuumed. Raises LakeError where a log cannot be taken away.
    """
    path, history = lake.replica(subscription, *name), lake.changes(subscription, *name, generation)
    version, of_history = (_version(lake, each) for each in (path, history))
    known = -1 if version is None else version
    if any(cut.tables.get(name, -1) > known for cut in cuts(lake, subscription)):
        kept = lake.cuts(subscription)
        with lake.refusing(kept):
            again_after_conflict(lambda: maintenance(lake, kept).delete("true"))()
    for each, found in ((path, version), (history, of_history)):
        if found is None:
            lake.remove_log(each)


def _version(lake: Lake, path: str) -> int | None:
    """The newest version, -1 where there is no table, None where its log cannot be read."""
    try:
        return lake.records.version(path) if lake.records.exists(path) else -1
    except LakeError as error:
        reason(lake, error)  # Raises where it is the lake that fails.
        return None
