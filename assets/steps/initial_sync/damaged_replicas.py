"""Removes what is in the way of copying a table: unreadable Delta logs, wrong cuts, and constraints.

A cut names a version of each replica; together these versions equal the publisher at one LSN. A cut is wrong if it
names a version that does not exist: a later commit will make this version, with other rows. Properties that other writers
have set could refuse the copy's rows: constraints, for example. A table's change history is the Delta table that has all
its changes.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import make_table_maintenance


@dataclass(frozen=True)
class Damage:
    """What would prevent the copy.

    - `log_paths`: the paths of tables with a log that cannot be read
    - `has_wrong_cuts`: True if cuts name versions that do not exist yet
    - `path_with_row_checks`: the path of the replica if it has properties that could refuse rows; otherwise None
    """

    log_paths: tuple[str, ...] = ()
    has_wrong_cuts: bool = False
    path_with_row_checks: str | None = None


@dataclass(frozen=True)
class ReplacedReplica:
    """A replica that a copy will replace.

    - `generation`: the number of the change history that gets the changes after the copy. A history that begins anew
      gets a new number.
    - `has_versions`: true if there may be a table of versions of rows (`history: scd2`)
    - `columns`: the columns of the copy
    """

    lake: Lake
    subscription: str
    name: Name
    generation: int
    has_versions: bool
    columns: tuple[str, ...]

    @property
    def path(self) -> str:
        """The replica's path."""
        return self.lake.paths.replica(self.subscription, *self.name)

    @property
    def history_path(self) -> str:
        """The path of the change history."""
        return self.lake.paths.change_history(self.subscription, *self.name, self.generation)

    def find_damage(self) -> Damage:
        """Find what would prevent the copy.

        A replica, a change history or a table of versions begins anew if its log cannot be read. If a replica begins
        anew, or was put back to an earlier version, a cut may name a version that does not exist now. A cut also names
        the version of `_table_states`, the table of the states of tables, which may have been put back, too.
        """
        lake, paths = self.lake, [self.path, self.history_path]
        if self.has_versions:
            paths.append(lake.paths.row_versions(self.subscription, *self.name, self.generation))
        version_by_path = {path: _read_version(lake, path) for path in paths}
        version = version_by_path[self.path]
        newest_version = -1 if version is None else version
        states_version = _read_version(lake, lake.paths.table_states(self.subscription))
        return Damage(
            tuple(path for path, log_version in version_by_path.items() if log_version is None),
            any(
                cut.tables.get(self.name, -1) > newest_version or (cut.states or 0) > (states_version or 0)
                for cut in Cuts(lake, self.subscription).read_all()
            ),
            self.path if newest_version >= 0 and lake.has_row_checks(self.path, self.columns) else None,
        )

    def remove_damage(self, damage: Damage) -> None:
        """Remove what would prevent the copy. Data files stay until they are vacuumed.

        Raises LakeError if a log cannot be removed.
        """
        lake = self.lake
        if damage.path_with_row_checks is not None:
            retry_after_conflict(lake.remove_row_checks)(damage.path_with_row_checks, self.columns)
        if damage.has_wrong_cuts:
            cuts_path = Cuts(lake, self.subscription).path
            with lake.access.translate_errors(cuts_path):
                retry_after_conflict(lambda: make_table_maintenance(lake, cuts_path).delete("true"))()
        for path in damage.log_paths:
            lake.remove_log(path)


def _read_version(lake: Lake, path: str) -> int | None:
    """Read the newest version of a table; -1 if there is no table, and None if its log cannot be read."""
    try:
        return lake.records.version(path) if lake.records.exists(path) else -1
    except LakeError as error:
        # `describe_error` raises the error if the lake itself has failed, not only this table.
        describe_error(lake, error)
        return None
