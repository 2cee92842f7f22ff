"""Finds replicas that are not as pgsieve left them: gone, unreadable, or put back to an earlier version.

The search comes before anything is applied. Changes must not go to a table that lacks earlier ones, and the
position in a restored table says nothing about its rows. A damaged table is set aside; a requested copy makes
it anew.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from pgsieve.assets.steps.records.cuts import Cut
from pgsieve.assets.steps.records.failures import reason
from pgsieve.assets.steps.records.own_versions import of_subscription, refuse_put_back
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import is_uri

#: Nothing to go back to exists before this version: a copy creates the table empty, and then fills it.
_FIRST = 1


def states_without_damaged(
    subscription: Subscription, lake: Lake, cut: Cut | None, changed: Collection[Name]
) -> dict[Name, TableState]:
    """Set aside the tables whose replica is damaged, and return the states.

    A table that is not published any more keeps its state. For the `changed` tables, which are about to be
    written, the whole log is read.
    """
    record = TableStates(lake, subscription.name)
    if cut is not None:
        cut.refuse_earlier(record)
        refuse_put_back(lake, of_subscription(lake, subscription.name), [cut])
    states = record.newest()
    applied = [state for state in states.values() if state.applies]

    def damage(state: TableState) -> str | None:
        return _damage(subscription, lake, state, cut, read=state.name in changed)

    if is_uri(lake.uri) and lake.local:
        # Each check of a replica waits for an answer of the store.
        problems = lake.in_parallel(damage, applied)
    else:
        problems = list(map(damage, applied))
    aside = [
        state.with_problem(subscription.name, problem)
        for state, problem in zip(applied, problems, strict=True)
        if problem is not None
    ]
    record.append(aside)
    return record.newest() if aside else states


@dataclass
class KnownVersions:
    """The version of each replica that has all applied changes and no RESTORE: of a cut, a later copy, or an apply.

    The check at the start of a step holds for the version that it saw. An apply that continues from a later
    version checks the commits in between: the next cut would name that version, and no later check would look
    before it.
    """

    subscription: Subscription
    lake: Lake
    cut: Cut | None
    _left: dict[tuple[Name, int], int] = field(default_factory=dict)

    def leave(self, state: TableState, before: TableHead | None, now: TableHead) -> str | None:
        """Continue from a later version; `before` is the table's head when the batch began.

        Returns a problem where the table was put back.

        A single commit that moves the position is an apply's, and needs no check.
        """
        applied = self._applied_version(state, before, now)
        if applied is not None and applied not in {-1, now.version}:
            advanced = (
                before is not None
                and (before.version, now.version) == (applied, applied + 1)
                and (now.position or 0) > (before.position or 0)
            )
            path = self.lake.paths.replica(self.subscription.name, *state.name)
            if not advanced and self.lake.records.is_restored(path, applied):
                return _put_back(path)
        self._left[state.name, state.version] = now.version
        return None

    def _applied_version(self, state: TableState, before: TableHead | None, now: TableHead) -> int | None:
        # A table that another process has copied meanwhile has a later state.
        if (left := self._left.get((state.name, state.version))) is not None:
            return left
        if (version := _version_of(self.cut, state)) is not None:
            return version
        path = self.lake.paths.replica(self.subscription.name, *state.name)
        copied = self.lake.records.committed_at(path, state.lsn) if now.version > _FIRST else None
        return before.version if copied is None and before is not None else copied


def _version_of(cut: Cut | None, state: TableState) -> int | None:
    """The replica's version in a cut that is later than the copy.

    An earlier cut says nothing about the copied table.
    """
    is_later = cut is not None and (cut.is_after(state) or cut.lsn > state.lsn)
    return cut.tables.get(state.name) if cut is not None and is_later else None


def _damage(
    subscription: Subscription, lake: Lake, state: TableState, cut: Cut | None, *, read: bool
) -> str | None:
    """What is wrong with a replica that was ready; None where nothing is."""
    path = lake.paths.replica(subscription.name, *state.name)
    version = _version_of(cut, state)
    entry_bytes = cut.entries.get(state.name) if cut is not None else None
    try:
        # Without a later commit, this check only lists the replica's folder twice, and is the only one.
        if version is not None and lake.records.is_restored(path, version, entry_bytes):
            return _put_back(path)
        if (read or version is None) and not lake.records.exists(path):
            return _gone(path)
        # A copy is ready at its LSN, and no later commit lowers the position.
        if (read or version is None) and (lake.records.position(path) or 0) < state.lsn:
            return _put_back(path)
    except LakeError as error:
        problem = reason(lake, error)
        return problem if lake.records.exists(path) else _gone(path)
    return None


def altered_columns(lake: Lake, path: str, definition: Definition) -> str | None:
    """Which columns the replica lacks because they were dropped or renamed in the lake.

    None where it has all.
    """
    try:
        columns = lake.columns(path)
    except LakeError:
        return None
    if not (lacking := [name for name in definition.names if name not in columns]):
        return None
    named = ", ".join(f'"{name}"' for name in lacking)
    return f'its replica "{path}" no longer has the {"columns" if len(lacking) > 1 else "column"} {named}'


def _gone(path: str) -> str:
    return f'its replica "{path}" is gone'


def _put_back(path: str) -> str:
    return f'its replica "{path}" was put back to an earlier version'
