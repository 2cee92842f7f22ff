"""Finds damaged replicas: deleted, unreadable, or put back to an earlier version (by RESTORE, or from a backup).

pgsieve searches before it applies anything, because a damaged replica may lack changes that its position claims to
have. (A position is the LSN up to which a table has all changes.) The table of a damaged replica is set aside: no
changes are applied to it until the user has it copied again.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from pgsieve.assets.steps.records.cuts import Cut, find_version_in_cut
from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.own_versions import list_subscription_records, refuse_put_back_tables
from pgsieve.assets.steps.records.table_states import Name, TableState, TableStates
from pgsieve.assets.steps.subscription import Definition, Subscription
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.records import TableHead
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.storage import is_uri

#: A replica at this version cannot have been put back: its first copy made the versions 0 (empty) and 1 (filled).
_FIRST_COPY_VERSION = 1


def set_aside_damaged_tables(
    subscription: Subscription, lake: Lake, cut: Cut | None, tables_to_change: Collection[Name]
) -> dict[Name, TableState]:
    """Set aside the tables whose replica is damaged, and return the states of all tables.

    Only tables to which changes are applied are searched. A damaged table that is no longer published is not set aside: it
    gets no more changes, and is copied again if it is published again (`TableState.with_problem`). The replicas of
    `tables_to_change` are about to be written, so their Delta logs are read. For other tables the search only looks for
    commits after the cut (an LSN, with the Delta version that each replica had there).
    """
    table_states = TableStates(lake, subscription.name)
    if cut is not None:
        cut.refuse_earlier_states(table_states)
        refuse_put_back_tables(lake, list_subscription_records(lake, subscription.name), [cut])
    states = table_states.read_newest()
    applied_states = [state for state in states.values() if state.is_applied]

    def find_damage(state: TableState) -> str | None:
        return _find_damage(subscription, lake, state, cut, must_read_log=state.name in tables_to_change)

    if is_uri(lake.uri) and not lake.is_reached_by_spark_only:
        # Each check of a replica waits for an answer of the object store, so the checks run in parallel.
        problems = lake.map_in_parallel(find_damage, applied_states)
    else:
        problems = list(map(find_damage, applied_states))
    damaged_states = [
        state.with_problem(subscription.name, problem)
        for state, problem in zip(applied_states, problems, strict=True)
        if problem is not None
    ]
    table_states.append(damaged_states)
    return table_states.read_newest() if damaged_states else states


@dataclass
class IntactVersions:
    """Remembers, for each table, the last Delta version that is known to have all applied changes.

    This is the version that the cut names, or a later version that a copy or a batch wrote. `find_path` returns the
    path of a table's replica, or of the versions of its rows (`history: scd2`). `versions` are the Delta versions that
    the cut names.

    `set_aside_damaged_tables` checks only the version that it reads at the start of the step. If another process commits
    a later version, `advance` looks for a RESTORE among the commits in between. The next cut names the
    later version, and checks read only commits after a cut, so no later check would find this RESTORE.
    """

    lake: Lake
    cut: Cut | None
    find_path: Callable[[TableState], str]
    versions: Mapping[Name, int]
    _last_versions: dict[tuple[Name, int], int] = field(default_factory=dict)

    def record(self, state: TableState, version: int) -> None:
        """Record that a Delta version of the table has all applied changes."""
        self._last_versions[state.name, state.version] = version

    def advance(self, state: TableState, former_head: TableHead | None, head: TableHead) -> bool:
        """Check and record a later version; returns False if the table was put back since the last recorded version.

        `former_head` is the table's head (Delta version and position) when the batch began. If there was only one
        commit, and it advanced the position, it has applied a batch and needs no check.
        """
        intact_version = self._find_intact_version(state, former_head, head)
        # The version -1 means that there was no table yet.
        if intact_version is not None and intact_version not in {-1, head.version}:
            has_applied_batch = (
                former_head is not None
                and (former_head.version, head.version) == (intact_version, intact_version + 1)
                and (head.position or 0) > (former_head.position or 0)
            )
            if not has_applied_batch and self.lake.records.is_restored(self.find_path(state), intact_version):
                return False
        self.record(state, head.version)
        return True

    def _find_intact_version(
        self, state: TableState, former_head: TableHead | None, head: TableHead
    ) -> int | None:
        # If another process has copied the table, it has a newer state, for which nothing is recorded.
        if (known_version := self._last_versions.get((state.name, state.version))) is not None:
            return known_version
        if (version := find_version_in_cut(self.cut, self.versions, state)) is not None:
            return version
        path = self.find_path(state)
        copied_version = (
            self.lake.records.version_of_position(path, state.lsn)
            if head.version > _FIRST_COPY_VERSION
            else None
        )
        return former_head.version if copied_version is None and former_head is not None else copied_version


def is_put_back(
    lake: Lake, path: str, version: int | None, position: int | None, entry_bytes: int | None = None
) -> bool:
    """Whether a table was put back to a Delta version before `version`, or to a position before `position`.

    A `version` or `position` of None is not checked. `entry_bytes` is the size of the version's entry in the Delta log.
    """
    if version is not None and lake.records.is_restored(path, version, entry_bytes):
        return True
    return position is not None and (lake.records.position(path) or 0) < position


def _find_damage(
    subscription: Subscription, lake: Lake, state: TableState, cut: Cut | None, *, must_read_log: bool
) -> str | None:
    """Describe the damage of a table's replica; None if there is none.

    If `must_read_log` is False, the Delta log is read only if it has commits after the cut.
    """
    path = lake.paths.replica(subscription.name, *state.name)
    version = find_version_in_cut(cut, cut.tables if cut is not None else {}, state)
    entry_bytes = cut.entries.get(state.name) if cut is not None else None
    try:
        reads_log = must_read_log or version is None
        if reads_log and not lake.records.exists(path):
            return _describe_missing_replica(path)
        # A ready replica has at least the LSN of its copy as its position.
        if is_put_back(lake, path, version, state.lsn if reads_log else None, entry_bytes):
            return describe_put_back_replica(path)
    except LakeError as error:
        problem = describe_error(lake, error)
        return problem if lake.records.exists(path) else _describe_missing_replica(path)
    return None


def describe_missing_columns(lake: Lake, path: str, definition: Definition) -> str | None:
    """Name the columns that another writer has dropped or renamed, in a text; None if the replica has all columns."""
    try:
        columns = lake.columns(path)
    except LakeError:
        return None
    if not (missing_columns := [name for name in definition.names if name not in columns]):
        return None
    names = ", ".join(f'"{name}"' for name in missing_columns)
    return f'its replica "{path}" no longer has the {"columns" if len(missing_columns) > 1 else "column"} {names}'


def _describe_missing_replica(path: str) -> str:
    return f'its replica "{path}" is gone'


def describe_put_back_replica(path: str) -> str:
    """Say in a text that a replica was put back."""
    return f'its replica "{path}" was put back to an earlier version'
