"""Defines the interface to pgsieve's own small Delta tables, and to the positions of all tables.

pgsieve records its own work in small tables, for example whether each table is copied already. A position is the LSN
up to which a table has all changes. A commit stores it in Delta's `txn` action, and in its user metadata. A slice is
the changes from one position of the slot to another; a change log has the raw messages of slices. Two modules
implement the interface: `delta_rs` if delta-rs can reach the lake (a call takes milliseconds, and needs no JVM),
otherwise `spark`. Each can read what the other has written.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from pgsieve.resources.lake.delta.errors import OvertakenError

APPLICATION_ID = "pgsieve"

#: The column that has the Delta version of the row's own commit. The `txn` action of this commit has the application id
#: `VERSION_APPLICATION_ID`.
VERSION_COLUMN = "version"
VERSION_APPLICATION_ID = "pgsieve.version"
#: The key in the user metadata that marks a commit as one of `check --repair`.
REPAIRED_KEY = "repaired"
#: The key in the user metadata that marks a commit as a copy of all rows.
COPIED_KEY = "copied"
#: A position is searched in at most this many of the newest commits.
SEARCHED_COMMITS = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit has besides its rows.

    - `position`: if the table already has this or a later position, the commit is skipped, or an overwrite raises
      OvertakenError
    - `overwrite`: whether the rows replace all rows of the table
    - `expected_version`, `expected_position`: the version and the position (0: none) that the table had when the rows
      were planned. If the table now has another version or position, OvertakenError is raised.
    - `metadata`: is added to the user metadata
    - `properties`: the Delta properties of the table, if it is created
    """

    position: int | None = None
    overwrite: bool = False
    expected_version: int | None = None
    expected_position: int | None = None
    metadata: Mapping[str, Any] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def user_metadata(self) -> str:
        """The user metadata of the commit, as it is written to the log."""
        return commit_metadata(self.position, self.metadata)

    def raise_if_overtaken(self, path: str, head: "TableHead") -> None:
        """Raise OvertakenError if the table's present version or position (`head`) is not the expected one."""
        if self.expected_version not in {None, head.version} or self.expected_position not in {
            None,
            head.position or 0,
        }:
            raise OvertakenError(path)


@dataclass(frozen=True, slots=True)
class TableHead:
    """The newest version of a table (-1 if there is no table), and the position of the table at this version."""

    version: int = -1
    position: int | None = None


def quote_name(name: str) -> str:
    """An identifier or a path, quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def quote_text(text: str) -> str:
    """A text, quoted for Spark SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def commit_metadata(position: int | None, extra: Mapping[str, Any] | None = None) -> str:
    """The user metadata of a commit that pgsieve makes."""
    return json.dumps({APPLICATION_ID: {"lsn": position, **(extra or {})}})


def find_version_of_position(commits: Iterable[Mapping[str, Any]], position: int) -> int | None:
    """The version of the newest commit that wrote a position. None if there is none.

    A commit that only kept the position does not count (see `make_unchanged_position_metadata`).
    """
    return next(
        (
            int(commit["version"])
            for commit in commits
            if parse_position(commit.get("userMetadata")) == (position, False)
        ),
        None,
    )


def parse_position(metadata: str | None) -> tuple[int | None, bool]:
    """The position in the user metadata of a commit, and whether the commit only kept the table's position.

    See `make_unchanged_position_metadata` about kept positions.
    """
    metadata_of_pgsieve = _parse_pgsieve_metadata(metadata)
    lsn = metadata_of_pgsieve.get("lsn")
    return (lsn if isinstance(lsn, int) else None), bool(metadata_of_pgsieve.get("kept"))


def has_repair(commits: Iterable[Mapping[str, Any]]) -> bool:
    """True if one of these commits is a repair."""
    return any(REPAIRED_KEY in _parse_pgsieve_metadata(commit.get("userMetadata")) for commit in commits)


def find_own_version(entries: Iterable[tuple[int, Sequence[Mapping[str, Any]]]], since_version: int) -> int:
    """The newest version whose rows no other writer has changed since `since_version`.

    `entries` has all later versions, the oldest first, each with the actions of its log entry. A copy or a repair replaces what
    another writer has changed.
    """
    own_version, is_own = since_version, True
    for version, actions in entries:
        metadata = next(
            (action["commitInfo"].get("userMetadata") for action in actions if "commitInfo" in action), None
        )
        metadata_of_pgsieve = _parse_pgsieve_metadata(metadata)
        if {COPIED_KEY, REPAIRED_KEY} & metadata_of_pgsieve.keys():
            is_own = True
        elif not metadata_of_pgsieve and any(map(_changes_rows, actions)):
            is_own = False
        if is_own:
            own_version = version
    return own_version


def _changes_rows(action: Mapping[str, Any]) -> bool:
    """True if an action of a log entry adds or removes a file, and is not part of a compaction."""
    return any(action.get(kind, {}).get("dataChange", False) for kind in ("add", "remove"))


def _parse_pgsieve_metadata(metadata: str | None) -> Mapping[str, Any]:
    """The part of a commit's user metadata that pgsieve has written."""
    try:
        document = json.loads(metadata or "null")
    except ValueError:
        return {}  # Another writer's metadata.
    metadata_of_pgsieve = document.get(APPLICATION_ID) if isinstance(document, dict) else None
    return metadata_of_pgsieve if isinstance(metadata_of_pgsieve, dict) else {}


def make_unchanged_position_metadata(position: int | None) -> str:
    """The user metadata of a commit that changes neither the rows nor the position.

    Spark finds the position of a table by searching its newest commits. So this commit repeats the position that
    its writer has read. Another commit may have written a later position meanwhile; the mark `kept` says that this
    commit did not write the position itself.
    """
    return commit_metadata(position, {"kept": True})


def add_version_column(rows: pa.Table, version: int) -> pa.Table:
    """The rows, with one more column: the Delta version of their commit."""
    return rows.append_column(VERSION_COLUMN, pa.array([version] * rows.num_rows, pa.int64()))


def get_commit_version(row: Mapping[str, Any]) -> int:
    """The Delta version of a row's commit. -1 if the row was written by an earlier pgsieve, which did not record it."""
    version = row.get(VERSION_COLUMN)
    return -1 if version is None else int(version)


def sort_by_version(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows that `append_versioned` has written, oldest first. Rows without a version are ordered by their time."""
    return sorted(rows, key=lambda row: (get_commit_version(row), row["at"]))


class Records(Protocol):
    """Reads small tables, appends rows to them, and reads the log of any table."""

    def exists(self, path: str) -> bool:
        """True if a Delta table exists."""

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table for which an SQL condition is true. Empty if there is no table."""

    def newest_rows(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column. Empty if there is no table."""

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        expected_version: int | None = None,
        expected_position: int | None = None,
    ) -> None:
        """Append rows in one commit. With a position, nothing is appended if the table already has this or a later position.

        `expected_version` and `expected_position` have the same meaning as in `Commit`.
        """

    def append_versioned(self, path: str, rows: pa.Table, expected_version: int | None = None) -> None:
        """Append rows. A column `version` gets the Delta version of their commit.

        So the order of the rows does not depend on a clock, and survives compaction and vacuum. If another writer
        commits this version first, an error is raised. `expected_version` is the version that the table had when the
        rows were planned; 0 also stands for no table. If the table has another version, OvertakenError is raised. A
        table that does not exist is created.
        """

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit to a table. None if there is no table, or no such commit."""

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, both read at the same moment."""

    def stamp(self, path: str) -> tuple[str, int] | None:
        """A stamp of the newest version of a table.

        No other version has the same stamp, not even a version of another table that was at this path before.

        None if there is no table, or if finding the stamp would take as long as reading the table.
        """

    def version(self, path: str) -> int:
        """The newest version of a table."""

    def is_restored(self, path: str, since_version: int, entry_bytes: int | None = None) -> bool:
        """True if a table was put back to a version before `since_version`, by RESTORE or an older copy of its folder.

        The position does not show this, because RESTORE keeps the transaction identifiers of the commits that it
        undoes. Raises DamagedTableError if the log entry of `since_version` has another size than `entry_bytes`, or
        if this entry or a later one is incomplete.
        """

    def is_repaired(self, path: str, since_version: int) -> bool:
        """True if a commit after `since_version` is a repair, which `check --repair` has made.

        The rows of a repair come from a comparison with the publisher, and not from changes.
        """

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of the log entry of a version. None if a request to an object store would be needed."""

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position. None if it is not among the last commits."""

    def size_bytes(self, path: str) -> int:
        """The bytes of all files of a table."""

    def count_rows(self, path: str, version: int | None = None) -> int:
        """The number of rows of a table, without `version` of its newest version."""

    def slices(self, path: str, after_lsn: int) -> Sequence[int]:
        """The ends (LSNs, in order) of those slices of a change log that end after an LSN."""

    def has_deletion_vectors(self, path: str) -> bool | None:
        """True if a table's property allows writers to mark rows in deletion vectors. None if the property is not set."""
