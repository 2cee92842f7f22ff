"""Removes what would prevent a table from being copied: unreadable Delta logs, and wrong cuts.

A cut is a version of each replica, so that together they equal the publisher at one LSN. It is wrong if it names a
version that a later commit will have. Constraints are removed, too, that other writers have added to the replica.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import describe_error
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import table_maintenance


@dataclass(frozen=True)
class Damage:
    """What would prevent the copy.

    - `logs`: the paths of tables whose log cannot be read
    - `in_cuts`: true if cuts name versions that do not exist yet
    - `refusing`: the path of the replica if it has constraints, which could refuse rows; otherwise None
    """

    logs: tuple[str, ...] = ()
    in_cuts: bool = False
    refusing: str | None = None


@dataclass(frozen=True)
class ReplacedReplica:
    """A replica that a copy will replace.

    - `generation`: the generation of the change history that goes on after the copy. If a history begins anew, it gets
      a new generation.
    - `has_versions`: true if there may be a table of versions of rows (`history: scd2`)
    """

    lake: Lake
    subscription: str
    name: Name
    generation: int
    has_versions: bool

    @property
    def path(self) -> str:
        """The replica's path."""
        return self.lake.paths.replica(self.subscription, *self.name)

    @property
    def history(self) -> str:
        """The path of the change history."""
        return self.lake.paths.change_history(self.subscription, *self.name, self.generation)

    def damage(self) -> Damage:
        """Find what would prevent the copy.

        A replica, a change history or a table of versions begins anew if its log cannot be read. If a replica begins
        anew, or was put back to an earlier version, the versions that cuts name will get other rows. The same is true
        if the table states were put back.
        """
        lake, paths = self.lake, [self.path, self.history]
        if self.has_versions:
            paths.append(lake.paths.row_versions(self.subscription, *self.name, self.generation))
        versions = {path: _version(lake, path) for path in paths}
        version = versions[self.path]
        newest_version = -1 if version is None else version
        states = _version(lake, lake.paths.table_states(self.subscription))
        return Damage(
            tuple(path for path, version_read in versions.items() if version_read is None),
            any(
                cut.tables.get(self.name, -1) > newest_version or (cut.states or 0) > (states or 0)
                for cut in Cuts(lake, self.subscription).all()
            ),
            self.path if newest_version >= 0 and lake.has_row_checks(self.path) else None,
        )

    def remove_damage(self, damage: Damage) -> None:
        """Remove what would prevent the copy. Data files stay until they are vacuumed.

        Raises LakeError if a log cannot be removed.
        """
        lake = self.lake
        if damage.refusing is not None:
            retry_after_conflict(lake.remove_row_checks)(damage.refusing)
        if damage.in_cuts:
            cuts = Cuts(lake, self.subscription).path
            with lake.access.translate_errors(cuts):
                retry_after_conflict(lambda: table_maintenance(lake, cuts).delete("true"))()
        for path in damage.logs:
            lake.remove_log(path)


def _version(lake: Lake, path: str) -> int | None:
    """The newest version of a table; -1 if there is no table, and None if its log cannot be read."""
    try:
        return lake.records.version(path) if lake.records.exists(path) else -1
    except LakeError as error:
        describe_error(
            lake, error
        )  # If the lake itself has failed, and not only this table, the error is raised.
        return None
