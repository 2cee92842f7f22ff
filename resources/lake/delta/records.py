"""pgsieve's small Delta tables, and the positions of all tables: the interface for both engines.

The small tables record pgsieve's own work; positions are Delta's `txn` actions. Where delta-rs reaches the
lake, it implements this (`delta_rs`), in milliseconds and without a JVM. Elsewhere Spark does (`spark`),
which can reach whatever the data is written to. Both leave the same tables.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from pgsieve.resources.lake.delta.errors import OverrunError

APPLICATION = "pgsieve"

#: The column with the Delta version of a row's commit, and the application of that commit's `txn` action.
VERSION = "version"
VERSIONED = "pgsieve.version"
#: The member of the user metadata of a commit that `check --repair` makes.
REPAIRED = "repaired"
#: This many commits are searched for the one that wrote a position.
LAST_COMMITS = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """The properties of a commit besides its rows; with a `position` it is made once per position.

    `overwrite`: the rows replace the table's. `base` is the version that the rows were planned from, `after`
    the position (0: none): OverrunError is raised where the table has another one. `metadata` is added to the
    user metadata, beside the position. `properties` are Delta's, of a new table.
    """

    position: int | None = None
    overwrite: bool = False
    base: int | None = None
    after: int | None = None
    metadata: Mapping[str, Any] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def user_metadata(self) -> str:
        """Its user metadata in the log."""
        return commit_metadata(self.position, self.metadata)

    def refuse_overrun(self, path: str, head: "TableHead") -> None:
        """Raise OverrunError where a table with this head is not the one from which the rows were planned."""
        if self.base not in {None, head.version} or self.after not in {None, head.position or 0}:
            raise OverrunError(path)


@dataclass(frozen=True, slots=True)
class TableHead:
    """A table at one moment: its newest version, -1 where there is no table, and the position of that version."""

    version: int = -1
    position: int | None = None


def quoted(name: str) -> str:
    """An identifier or path quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text as Spark's SQL writes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def commit_metadata(position: int | None, more: Mapping[str, Any] | None = None) -> str:
    """The user metadata of a commit by pgsieve."""
    return json.dumps({APPLICATION: {"lsn": position, **(more or {})}})


def version_with(commits: Iterable[Mapping[str, Any]], position: int) -> int | None:
    """The version of the newest commit that wrote a position; commits that only kept it do not count."""
    return next(
        (int(c["version"]) for c in commits if position_in(c.get("userMetadata")) == (position, False)), None
    )


def position_in(metadata: str | None) -> tuple[int | None, bool]:
    """The position in a commit's user metadata, and whether the commit only kept the position that its writer had read."""
    own = _own(metadata)
    lsn = own.get("lsn")
    return (lsn if isinstance(lsn, int) else None), bool(own.get("kept"))


def has_repair(commits: Iterable[Mapping[str, Any]]) -> bool:
    """Whether one of some commits is a repair."""
    return any(REPAIRED in _own(commit.get("userMetadata")) for commit in commits)


def _own(metadata: str | None) -> Mapping[str, Any]:
    """What pgsieve says in a commit's user metadata."""
    try:
        read = json.loads(metadata or "null")
    except ValueError:
        return {}  # Another writer's metadata.
    own = read.get(APPLICATION) if isinstance(read, dict) else None
    return own if isinstance(own, dict) else {}


def kept_metadata(position: int | None) -> str:
    """The user metadata of a commit that keeps rows and position: Spark looks for the position in the newest commit.

    The position was read before, and another one may have been committed since.
    """
    return commit_metadata(position, {"kept": True})


def versioned(rows: pa.Table, version: int) -> pa.Table:
    """Rows for the commit of this version."""
    return rows.append_column(VERSION, pa.array([version] * rows.num_rows, pa.int64()))


def version_of(row: Mapping[str, Any]) -> int:
    """The Delta version of a row's commit; -1 for rows of older lakes, which do not record it."""
    version = row.get(VERSION)
    return -1 if version is None else int(version)


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of `append_versioned`, oldest first: clocks decide only between rows without a version."""
    return sorted(rows, key=lambda row: (version_of(row), row["at"]))


class Records(Protocol):
    """Reads and appends small tables, and reads the log of any table."""

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table that fulfil an SQL condition; empty where there is no table.

        Files whose statistics exclude such rows are not read.
        """

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; empty where there is no table."""

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

        `base` is the version that the rows were planned from, `after` the position (0: none): OverrunError is
        raised where the table has another one.
        """

    def append_versioned(self, path: str, rows: pa.Table, base: int | None = None) -> None:
        """Append rows that have, in a column `version`, the Delta version of their commit.

        No clock orders such rows, and neither compaction nor vacuum loses their order. Where another writer
        commits meanwhile, its error is raised: the version would be wrong. `base` is the version that the
        rows were planned from (0 also where there is no table): OverrunError is raised where the table has
        another one.
        """

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit; None where there is no table or none of its commits."""

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, read together."""

    def stamp(self, path: str) -> tuple[str, int] | None:
        """Distinguishes the newest version of a table from its others, and from those of former tables at its path.

        None where there is no table, or where reading the table costs no more.
        """

    def version(self, path: str) -> int:
        """The newest version of a table."""

    def is_restored(self, path: str, since: int, entry_bytes: int | None = None) -> bool:
        """Whether a table was put back behind this version: by RESTORE, or from an older copy of its folder.

        RESTORE keeps the transaction identifiers of the commits that it undoes, so the position alone is not
        enough. Raises DamagedTableError where the log's entry of this version, or of a later one, is
        incomplete, or has another size than it had.
        """

    def is_repaired(self, path: str, since: int) -> bool:
        """Whether a commit after this version is a repair: rows that no change has made."""

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of the log's entry of a version; None where it would take a request."""

    def committed_at(self, path: str, position: int) -> int | None:
        """The version with which pgsieve wrote a position; None where the last commits do not have it."""

    def size(self, path: str) -> int:
        """The bytes of a table's files."""

    def count(self, path: str) -> int:
        """How many rows a table has."""

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends of the change log's slices beyond an LSN, in order."""

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of the table may mark rows in deletion vectors.

        None where its properties do not say.
        """
