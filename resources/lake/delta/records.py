"""What pgsieve asks of Delta tables besides the rows that Spark reads and writes.

Small tables about pgsieve's own work, and the positions of all tables (Delta's `txn` action). In a lake on a
local path this is delta-rs (`local_records`), in milliseconds and without a JVM; for any other URI it is Spark
(`spark_records`), which can reach whatever the data is written to. Both leave the same tables.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from pgsieve.resources.lake.delta.errors import OverrunError

APPLICATION = "pgsieve"

#: The column with the Delta version that a row came with, and the application of that commit's `txn` action.
VERSION = "version"
VERSIONED = "pgsieve.version"
#: So many commits are looked through for the one that wrote a position.
LAST_COMMITS = 16


@dataclass(frozen=True, slots=True)
class Commit:
    """What a commit is besides its rows; with a `position` it is made once per position.

    `overwrite`: the rows replace the table's. `base` is the version that the rows were planned from, `after` the position (0: none):
    OverrunError is raised where the table has another one. `metadata` stands in the user metadata, beside the position. `properties`
    are Delta's, of a new table.
    """

    position: int | None = None
    overwrite: bool = False
    base: int | None = None
    after: int | None = None
    metadata: Mapping[str, Any] | None = None
    properties: Mapping[str, str] = field(default_factory=dict)

    @property
    def user_metadata(self) -> str:
        """The user metadata that it has in the log."""
        return commit_metadata(self.position, self.metadata)

    def refuse_overrun(self, path: str, standing: "Standing") -> None:
        """Raise OverrunError where a table that stands so is not the one that the rows were planned from."""
        if self.base not in {None, standing.version} or self.after not in {None, standing.position or 0}:
            raise OverrunError(path)


@dataclass(frozen=True, slots=True)
class Standing:
    """A table at one moment: its newest version, -1 where there is no table, and the position that this version has."""

    version: int = -1
    position: int | None = None


def quoted(name: str) -> str:
    """An identifier or path quoted for Spark SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text as Spark's SQL writes it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def commit_metadata(position: int | None, more: Mapping[str, Any] | None = None) -> str:
    """The user metadata of a commit of pgsieve's."""
    return json.dumps({APPLICATION: {"lsn": position, **(more or {})}})


def version_with(commits: Iterable[Mapping[str, Any]], position: int) -> int | None:
    """The version of the newest commit that wrote a position; commits that kept it do not count."""
    return next(
        (int(c["version"]) for c in commits if position_in(c.get("userMetadata")) == (position, False)), None
    )


def position_in(metadata: str | None) -> tuple[int | None, bool]:
    """The position that a commit's user metadata has, and whether it only kept the one that its writer had read before."""
    try:
        read = json.loads(metadata or "null")
    except ValueError:
        return None, False  # Another writer's words.
    if not isinstance(read, dict) or not isinstance(read.get(APPLICATION), dict):
        return None, False
    lsn = read[APPLICATION].get("lsn")
    return (lsn if isinstance(lsn, int) else None), bool(read[APPLICATION].get("kept"))


def kept_metadata(position: int | None) -> str:
    """The user metadata of a commit that leaves rows and position: Spark looks for the position in the newest commit.

    It was read before, and another one may have been committed since.
    """
    return commit_metadata(position, {"kept": True})


def versioned(rows: pa.Table, version: int) -> pa.Table:
    """Rows as the commit of this version is to write them."""
    return rows.append_column(VERSION, pa.array([version] * rows.num_rows, pa.int64()))


def version_of(row: Mapping[str, Any]) -> int:
    """The Delta version that a row came with; -1 for rows of lakes from before they said so."""
    version = row.get(VERSION)
    return -1 if version is None else int(version)


def in_order(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows of `append_versioned`, oldest first: clocks decide only between those that do not tell their version."""
    return sorted(rows, key=lambda row: (version_of(row), row["at"]))


class Records(Protocol):
    """Reads and appends small tables, and tells what stands in the log of any."""

    def exists(self, path: str) -> bool:
        """Whether there is a Delta table."""

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table for which an SQL condition holds; none where there is no table.

        Files of which the statistics tell that no row can be among them are not read.
        """

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; none where there is no table."""

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

        `base` is the version that the rows were planned from, `after` the position (0: none): OverrunError is raised
        where the table has another one.
        """

    def append_versioned(self, path: str, rows: pa.Table, base: int | None = None) -> None:
        """Append rows that say, in a column `version`, which Delta version they came with.

        No clock orders such rows, and neither compaction nor vacuum loses their order. Raises what another writer's
        commit meanwhile raises: then the version would be wrong. `base` is the version that the rows were planned from
        (0 also where there is no table): OverrunError is raised where the table has another one.
        """

    def position(self, path: str) -> int | None:
        """The position of the newest commit of pgsieve's; None where there is no table or none of its commits."""

    def standing(self, path: str) -> Standing:
        """The newest version and the position of it, of one moment."""

    def stamp(self, path: str) -> tuple[str, int] | None:
        """What tells the newest version of a table from every other of it and of the tables that were there before it.

        None where there is no table, or where reading it costs no more.
        """

    def version(self, path: str) -> int:
        """The newest version of a table."""

    def is_restored(self, path: str, since: int, entry_bytes: int | None = None) -> bool:
        """Whether somebody has gone back in a table that had this version: by RESTORE, or an older folder put back.

        Delta keeps the transaction identifiers of what RESTORE undoes: the position alone does not tell. Raises DamagedTableError
        where the log's entry of this version, or of a later one, is not whole, or has not the bytes that it had.
        """

    def entry_bytes(self, path: str, version: int) -> int | None:
        """How many bytes the log's entry of a version has; None where only a request would tell."""

    def committed_at(self, path: str, position: int) -> int | None:
        """The version with which pgsieve wrote a position; None where the last commits do not tell."""

    def size(self, path: str) -> int:
        """The bytes of a table's files."""

    def count(self, path: str) -> int:
        """How many rows a table has."""

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends of the change log's slices beyond an LSN, in order."""

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of the table may mark rows in deletion vectors; None where its properties do not say."""
