"""pgsieve's small Delta tables, and the positions of all tables: the interface for both engines.

The small tables record pgsieve's own work. Positions are Delta's `txn` actions. If delta-rs reaches the lake, it
implements the interface (`delta_rs`): calls take milliseconds, and need no JVM. Otherwise Spark does (`spark`).
Both write the same tables.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from pgsieve.resources.lake.delta.errors import OvertakenError

APPLICATION = "pgsieve"

#: The column with the Delta version of a row's commit, and the application id in that commit's `txn` action.
VERSION = "version"
VERSION_APPLICATION = "pgsieve.version"
#: The key in the user metadata that marks a commit of `check --repair`.
REPAIRED = "repaired"
#: How many commits are searched for a position.
LAST_COMMITS = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """The properties of a commit. It is skipped if the table has its `position` already.

    With `overwrite` the rows replace the table's. `base` and `after` are the table's version and position (0:
    none) when the rows were planned; if one is another now, OvertakenError is raised. `metadata` is added to
    the user metadata. `properties` are the Delta properties of a new table.
    """

    position: int | None = None
    overwrite: bool = False
    base: int | None = None
    after: int | None = None
    metadata: Mapping[str, Any] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def user_metadata(self) -> str:
        """The commit's user metadata in the log."""
        return commit_metadata(self.position, self.metadata)

    def refuse_overtaken(self, path: str, head: "TableHead") -> None:
        """Raise OvertakenError if `base` or `after`, if given, differs from a table's head."""
        if self.base not in {None, head.version} or self.after not in {None, head.position or 0}:
            raise OvertakenError(path)


@dataclass(frozen=True, slots=True)
class TableHead:
    """The newest version of a table (-1: no table), and the table's position at that version."""

    version: int = -1
    position: int | None = None


def quoted(name: str) -> str:
    """An identifier or path quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text quoted for Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def commit_metadata(position: int | None, more: Mapping[str, Any] | None = None) -> str:
    """The user metadata of a commit by pgsieve."""
    return json.dumps({APPLICATION: {"lsn": position, **(more or {})}})


def version_with(commits: Iterable[Mapping[str, Any]], position: int) -> int | None:
    """The version of the newest commit that wrote a position (see `unchanged_metadata`); None if none."""
    return next(
        (int(c["version"]) for c in commits if position_in(c.get("userMetadata")) == (position, False)), None
    )


def position_in(metadata: str | None) -> tuple[int | None, bool]:
    """The position in a commit's user metadata, and whether the commit kept the table's position (`unchanged_metadata`)."""
    ours = _pgsieve_metadata(metadata)
    lsn = ours.get("lsn")
    return (lsn if isinstance(lsn, int) else None), bool(ours.get("kept"))


def has_repair(commits: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of these commits is a repair."""
    return any(REPAIRED in _pgsieve_metadata(commit.get("userMetadata")) for commit in commits)


def _pgsieve_metadata(metadata: str | None) -> Mapping[str, Any]:
    """The part of a commit's user metadata that is pgsieve's."""
    try:
        parsed = json.loads(metadata or "null")
    except ValueError:
        return {}  # Another writer's metadata.
    ours = parsed.get(APPLICATION) if isinstance(parsed, dict) else None
    return ours if isinstance(ours, dict) else {}


def unchanged_metadata(position: int | None) -> str:
    """The user metadata of a commit that changes neither rows nor position.

    Spark searches the newest commits for the position. The mark `kept` says that this commit repeats the
    position that its writer read before; another commit may have written a later one since.
    """
    return commit_metadata(position, {"kept": True})


def with_version(rows: pa.Table, version: int) -> pa.Table:
    """Rows with the Delta version of their commit."""
    return rows.append_column(VERSION, pa.array([version] * rows.num_rows, pa.int64()))


def version_of(row: Mapping[str, Any]) -> int:
    """The Delta version of a row's commit; -1 for rows of earlier pgsieve versions, which did not record it."""
    version = row.get(VERSION)
    return -1 if version is None else int(version)


def by_version(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of `append_versioned`, oldest first; the time orders rows without a version."""
    return sorted(rows, key=lambda row: (version_of(row), row["at"]))


class Records(Protocol):
    """Reads and appends small tables, and reads the log of any table."""

    def exists(self, path: str) -> bool:
        """Whether a Delta table exists."""

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table that fulfil an SQL condition; empty if there is no table."""

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; empty if there is no table."""

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        base: int | None = None,
        after: int | None = None,
    ) -> None:
        """Append rows in one commit; with a position, once per position.

        `base` and `after` as in `Commit`.
        """

    def append_versioned(self, path: str, rows: pa.Table, base: int | None = None) -> None:
        """Append rows, with the Delta version of their commit in a column `version`.

        So the order of rows depends on no clock, and survives compaction and vacuum. If another writer commits
        meanwhile, the version would be wrong, and an error is raised. `base` is the version from which the rows
        were planned (0 also if there is no table); if the table has another one, OvertakenError is raised.
        """

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit; None if there is no table or no such commit."""

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, read together."""

    def stamp(self, path: str) -> tuple[str, int] | None:
        """A stamp of a table's newest version: other versions, even of former tables at its path, have others.

        None if there is no table, or if the stamp costs as much as reading the table.
        """

    def version(self, path: str) -> int:
        """The newest version of a table."""

    def is_restored(self, path: str, since: int, entry_bytes: int | None = None) -> bool:
        """Whether a table was set back to before this version, by RESTORE or by an older copy of its folder.

        The position does not show this, as RESTORE keeps the transaction identifiers of the commits that it
        undoes. Raises DamagedTableError if this version's log entry has another size than `entry_bytes`, or if
        this entry or a later one is incomplete.
        """

    def is_repaired(self, path: str, since: int) -> bool:
        """Whether a commit after this version is a repair, whose rows do not come from changes."""

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of a version's log entry; None if that would take a request."""

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position; None if it is not among the last commits."""

    def size(self, path: str) -> int:
        """The bytes of a table's files."""

    def count(self, path: str) -> int:
        """The number of a table's rows."""

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends (LSNs) of the change log's slices after an LSN, in order."""

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of a table may mark rows in deletion vectors; None if the property is unset."""
