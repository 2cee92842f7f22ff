"""The committers of a lake's tables: delta-rs in this process, with rows or with files, or Delta in Spark.

In: a table's path, and rows or files. Out: one commit; a position is committed only once. Raises a
`LakeError` that names the table, and OverrunError if the table has another version or position than the plan
expects. `pgsieve.resources.lake.policy` chooses the committer.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.deletion_vectors import Marked
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.errors import OverrunError
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.layout import file_bytes
from pgsieve.resources.lake.delta.log import UnmarkableError
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.overrun import guarded
from pgsieve.resources.lake.row_lookup import row_matches
from pgsieve.resources.lake.spark_writes import write_by_spark

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class InProcess:
    """Commits few rows by delta-rs; the rows pass through this process."""

    local: LocalRecords
    access: LakeAccess

    def write(
        self,
        path: str,
        rows: pa.Table,
        commit: Commit,
    ) -> None:
        """Append rows to a table, or overwrite it with them."""
        with self.access.refusing(path):
            self.local.write(path, rows, commit)


@dataclass(frozen=True)
class ByFiles:
    """Commits files that a runner wrote, by this process: for many rows that need no Spark expression.

    `vectors` says whether the user wants deletion vectors in large tables.
    """

    local: LocalRecords
    access: LakeAccess
    vectors: bool = True

    def commit(
        self,
        written: Callable[[], pa.Table],
        path: str,
        schema: pa.Schema,
        commit: Commit,
        removed: Mapping[str, int] | None = None,
    ) -> list[dict[str, Any]]:
        """Let `written` write files (`pgsieve.resources.lake.delta.parquet_files`), and commit them.

        Returns the rows that describe the files. `removed` as in `Commits.commit`.
        """
        with self.access.refusing(path):
            files: list[dict[str, Any]] = written().to_pylist()
            self.local.commit(path, schema, files, commit, removed)
        return files

    def commit_marked(
        self,
        written: Callable[[], pa.Table],
        path: str,
        marked: Sequence[Marked],
        position: int | None,
        base: int,
    ) -> list[dict[str, Any]]:
        """Let `written` write files as for `commit`, and commit them with rows `marked` as deleted.

        Returns the rows that describe the files.
        """
        with self.access.refusing(path):
            files: list[dict[str, Any]] = written().to_pylist()
            row_removal.mark_rows(self.local, path, marked, files, position, base)
        return files

    def marked_files(self, path: str, matches: Sequence[FileMatches], base: int) -> list[Marked] | None:
        """The files that have `matches`, with these rows marked, for `commit_marked`.

        None if rows cannot be marked. Deletion vectors are enabled if need be, which makes a new version.
        Raises OverrunError if the version is not `base`, or no longer.
        """
        with self.access.refusing(path):
            try:
                if not self.local.has_deletion_vectors(path):
                    row_removal.enable_marking(self.local, path)
                if self.local.version(path) != base:
                    raise OverrunError(path)
                return row_removal.marked_files(self.local, path, matches, base)
            except UnmarkableError as error:
                _LOGGER.debug("%s: %s", path, error)
                return None

    def row_matches(
        self, path: str, sought: WantedDigests, schema: pa.Schema, runner: Executors
    ) -> list[FileMatches]:
        """The rows of a table whose columns have one of the `sought` digests.

        A match's `keys` are their indices.
        """
        with self.access.refusing(path):
            return row_matches(self.local.table_at(path), path, self.local.store, sought, schema, runner)

    def takes_rewriting(self, path: str, columns: Collection[str]) -> bool:
        """Whether a commit may replace files of a table by files with fewer rows.

        `columns` are the table's.
        """
        with self.access.refusing(path):
            return row_removal.takes_rewriting(self.local, path, columns)

    def takes_marking(self, path: str, columns: Collection[str]) -> bool:
        """Whether rows of a table may be marked in deletion vectors; `columns` are the table's."""
        if not self.vectors:
            return False
        with self.access.refusing(path):
            return row_removal.takes_marking(self.local, path, columns)

    def file_bytes(self, path: str, properties: Mapping[str, str]) -> int:
        """The target size of a table's files; `properties` are those of a new table."""
        with self.access.refusing(path):
            return file_bytes(self.local.properties(path) if self.local.exists(path) else properties)


@dataclass(frozen=True)
class BySpark:
    """Commits of Delta in Spark: for tables that delta-rs cannot reach or write, and for rows that a MERGE needs."""

    access: LakeAccess

    def write(
        self,
        frame: DataFrame,
        path: str,
        commit: Commit,
        *,
        exists: Callable[[], bool],
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Append rows to a table, or overwrite it.

        `exists` says whether the table exists, `options` are Spark's.
        """
        with self.access.refusing(path):
            write_by_spark(
                guarded(frame, path, commit.base, self.access.store), path, commit, options or {}, exists
            )


#: The committer of a table.
Committer = InProcess | ByFiles | BySpark
