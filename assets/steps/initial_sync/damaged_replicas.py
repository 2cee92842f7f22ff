"""Prepares a damaged replica for its copy: removes unreadable Delta logs, and cuts with versions to be reused.

It also removes constraints that other writers have added to the replica.
"""

from dataclasses import dataclass

from pgsieve.assets.steps.records.cuts import Cuts
from pgsieve.assets.steps.records.failures import reason
from pgsieve.assets.steps.records.table_states import Name
from pgsieve.resources.lake.delta.errors import LakeError, retry_after_conflict
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.maintenance import maintenance


@dataclass(frozen=True)
class Damage:
    """The obstacles to a copy.

    `logs` are the paths of tables with an unreadable log. `in_cuts` says that cuts name versions beyond the
    present ones. `refusing` is the path of the replica if it has constraints.
    """

    logs: tuple[str, ...] = ()
    in_cuts: bool = False
    refusing: str | None = None


@dataclass(frozen=True)
class ReplacedReplica:
    """The replica that a copy replaces. Its change history `generation` continues after the copy.

    `has_versions` says that it may have versions of rows (`scd2`).
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
        return self.lake.paths.changes(self.subscription, *self.name, self.generation)

    def damage(self) -> Damage:
        """The obstacles to the copy.

        A replica, change history or table of versions with an unreadable log begins anew. If a replica begins anew, or
        was put back to an earlier version, the version numbers in the cuts get other rows. The same is true for table
        states that were put back.
        """
        lake, paths = self.lake, [self.path, self.history]
        if self.has_versions:
            paths.append(lake.paths.versions(self.subscription, *self.name, self.generation))
        versions = {path: _version(lake, path) for path in paths}
        version = versions[self.path]
        newest_version = -1 if version is None else version
        states = _version(lake, lake.paths.table_states(self.subscription))
        return Damage(
            tuple(path for path, readable in versions.items() if readable is None),
            any(
                cut.tables.get(self.name, -1) > newest_version or (cut.states or 0) > (states or 0)
                for cut in Cuts(lake, self.subscription).all()
            ),
            self.path if newest_version >= 0 and lake.has_row_checks(self.path) else None,
        )

    def remove_damage(self, damage: Damage) -> None:
        """Remove the obstacles; data files stay until they are vacuumed. Raises LakeError if a log cannot be removed."""
        lake = self.lake
        if damage.refusing is not None:
            retry_after_conflict(lake.remove_row_checks)(damage.refusing)
        if damage.in_cuts:
            cuts = Cuts(lake, self.subscription).path
            with lake.access.translate_errors(cuts):
                retry_after_conflict(lambda: maintenance(lake, cuts).delete("true"))()
        for path in damage.logs:
            lake.remove_log(path)


def _version(lake: Lake, path: str) -> int | None:
    """The newest version of a table; -1 if there is no table, None if its log cannot be read."""
    try:
        return lake.records.version(path) if lake.records.exists(path) else -1
    except LakeError as error:
        reason(lake, error)  # Raises a fault of the lake itself.
        return None
