"""The committers of a lake's tables: delta-rs in this process, with rows or with files, or Delta in Spark.

In: a table's path, and rows or files. Out: one commit; each position is committed only once. Raises a
`LakeError` that names the table, and OvertakenError if the table has another version or position than the plan
expects. `pgsieve.resources.lake.policy` chooses the committer.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.decoding.changes.net_change import Mask, Numbers
from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.key_lookup import FileMatches, Flag
from pgsieve.resources.lake.delta.layout import file_bytes
from pgsieve.resources.lake.delta.log import Action, UnmarkableError
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.row_lookup import row_matches
from pgsieve.resources.lake.spark_writes import write_by_spark
from pgsieve.resources.lake.version_guard import with_version_guard

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class InProcessCommitter:
    """Commits few rows, which pass through this process, by delta-rs."""

    local: LocalRecords
    access: LakeAccess

    def write(
        self,
        path: str,
        rows: pa.Table,
        commit: Commit,
    ) -> None:
        """Append rows to a table, or overwrite it with them."""
        with self.access.translate_errors(path):
            self.local.write(path, rows, commit)

    def merge(self, path: str, source: pa.Table, merge: Merge, commit: Commit) -> None:
        """Merge a net change into a table with a key."""
        with self.access.translate_errors(path):
            self.local.merge(path, source, merge, commit)

    def rows_of(self, path: str, keys: pa.Table, schema: pa.Schema) -> tuple[Numbers, pa.Table]:
        """The indices of the keys that a table has, and its rows with these keys in the columns of a schema."""
        with self.access.translate_errors(path):
            return self.local.rows_of(path, keys, schema)


@dataclass(frozen=True)
class FileCommitter:
    """Commits files that a runner has written: for many rows that need no Spark expression.

    `vectors` says whether the user wants deletion vectors in large tables.
    """

    local: LocalRecords
    access: LakeAccess
    vectors: bool = True

    def commit(
        self,
        write: Callable[[], pa.Table],
        path: str,
        schema: pa.Schema,
        commit: Commit,
        removed: Mapping[str, int] | None = None,
    ) -> list[dict[str, Any]]:
        """Let `write` write files, and commit them; return the rows that describe the files (`FILE_SCHEMA`).

        `removed` as in `Commits.commit`.
        """
        with self.access.translate_errors(path):
            files: list[dict[str, Any]] = write().to_pylist()
            self.local.commit(path, schema, files, commit, removed)
        return files

    def commit_marked(
        self,
        write: Callable[[], pa.Table],
        path: str,
        marked: Sequence[MarkedFile],
        position: int | None,
        base: int,
    ) -> list[dict[str, Any]]:
        """Let `write` write files as for `commit`, and commit them together with the rows that are `marked` as deleted.

        Returns the rows that describe the files. `base` as in `Commit`.
        """
        with self.access.translate_errors(path):
            files: list[dict[str, Any]] = write().to_pylist()
            row_removal.mark_rows(self.local, path, marked, files, position, base)
        return files

    def marked_files(self, path: str, matches: Sequence[FileMatches], base: int) -> list[MarkedFile] | None:
        """The files that have `matches`, with these rows marked as deleted, for `commit_marked`.

        None and OvertakenError as for `markable_files`.
        """
        files = self.markable_files(path, {match.name for match in matches}, base)
        return None if files is None else row_removal.with_marks(files, matches)

    def markable_files(self, path: str, names: Collection[str], base: int) -> dict[str, Action] | None:
        """The `add` actions of some files, by the files' names, to mark rows of them as deleted.

        Returns None if rows cannot be marked. Enables deletion vectors if need be, by a new version. Raises
        OvertakenError if the table's version is not `base`.
        """
        with self.access.translate_errors(path):
            try:
                if not self.local.has_deletion_vectors(path):
                    row_removal.enable_marking(self.local, path)
                if self.local.version(path) != base:
                    raise OvertakenError(path)
                return row_removal.markable_files(self.local, path, names, base)
            except UnmarkableError as error:
                _LOGGER.debug("%s: %s", path, error)
                return None

    def row_matches(
        self, path: str, digests: WantedDigests, schema: pa.Schema, runner: Executors
    ) -> list[FileMatches]:
        """The rows of a table with one of these digests. The `keys` of a match are indices into the digests."""
        with self.access.translate_errors(path):
            return row_matches(self.local.table_at(path), path, self.local.store, digests, schema, runner)

    def key_matches(
        self,
        path: str,
        keys: pa.Table,
        among: Iterable[Mask],
        most_bytes: int | None,
        lacking: str | None = None,
    ) -> list[FileMatches] | None:
        """The rows of a table with some keys, file by file; the parameters are those of `matches_among`."""
        with self.access.translate_errors(path):
            return self.local.matches(path, keys, among, most_bytes, lacking)

    def flagged_rows(
        self, path: str, flag: Flag, among: Sequence[FileMatches] | None = None
    ) -> list[FileMatches]:
        """The rows with a flag, file by file: those in `among`, or of the whole table (None)."""
        with self.access.translate_errors(path):
            return self.local.flagged_rows(path, flag, among)

    def schema(self, path: str) -> pa.Schema:
        """The columns of a table."""
        with self.access.translate_errors(path):
            return self.local.arrow_schema(path)

    def can_rewrite_files(self, path: str, columns: Collection[str]) -> bool:
        """Whether files of a table with these columns may be replaced by files with fewer rows."""
        with self.access.translate_errors(path):
            return row_removal.can_rewrite_files(self.local, path, columns)

    def can_mark_rows(self, path: str, columns: Collection[str]) -> bool:
        """Whether rows of a table with these columns may be marked in deletion vectors."""
        if not self.vectors:
            return False
        with self.access.translate_errors(path):
            return row_removal.can_mark_rows(self.local, path, columns)

    def file_bytes(self, path: str, properties: Mapping[str, str]) -> int:
        """The target size of a table's files in bytes; `properties` are used if the table does not exist."""
        with self.access.translate_errors(path):
            return file_bytes(self.local.properties(path) if self.local.exists(path) else properties)


@dataclass(frozen=True)
class SparkCommitter:
    """Commits by Delta in Spark, for tables that delta-rs cannot reach or write, and for work that needs Spark's MERGE."""

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
        """Append rows to a table, or overwrite it with them.

        `exists` says whether the table exists; `options` are for Spark's writer.
        """
        with self.access.translate_errors(path):
            write_by_spark(
                with_version_guard(frame, path, commit.base, self.access.store),
                path,
                commit,
                options or {},
                exists,
            )


Committer = InProcessCommitter | FileCommitter | SparkCommitter
