"""Commits rows or files to the tables of a lake, by delta-rs in this process or by Delta in Spark.

In: the path of a table, and rows or files.
Out: one commit. Usually it stores a position: the LSN up to which the table then has all changes. A position is
     committed only once, so a commit that is repeated has no effect.

Raises a `LakeError` that names the table. Raises OvertakenError if the table has another version or another
position than the caller's plan expects. `pgsieve.resources.lake.policy` chooses the committer.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from pgsieve.decoding.changes.arrays import Mask, Numbers
from pgsieve.decoding.changes.digests import WantedDigests
from pgsieve.resources.lake.access import LakeAccess
from pgsieve.resources.lake.delta import row_removal
from pgsieve.resources.lake.delta.deletion_vectors import MarkedFile
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.errors import OvertakenError
from pgsieve.resources.lake.delta.key_lookup import FileMatches, Flag
from pgsieve.resources.lake.delta.layout import find_target_file_bytes
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.delta.merge import Merge
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.delta.requirements import has_change_feed
from pgsieve.resources.lake.row_lookup import find_row_matches
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.spark_writes import write_by_spark
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.lake.version_guard import add_version_guard


@dataclass(frozen=True)
class InProcessCommitter:
    """Commits rows that are few enough to pass through this process, by delta-rs."""

    delta_rs: DeltaRsRecords
    access: LakeAccess

    def write(
        self,
        path: str,
        rows: pa.Table,
        commit: Commit,
    ) -> None:
        """Append rows to a table, or overwrite the table with them."""
        with self.access.translate_errors(path):
            self.delta_rs.write(path, rows, commit)

    def merge(self, path: str, source: pa.Table, merge: Merge, commit: Commit) -> None:
        """Merge a net change, which has at most one row per key, into a table that has a key."""
        with self.access.translate_errors(path):
            self.delta_rs.merge(path, source, merge, commit)

    def find_rows(self, path: str, keys: pa.Table, schema: pa.Schema) -> tuple[Numbers, pa.Table]:
        """Find the rows of a table that have one of these keys.

        Returns the indices of the keys that the table has, and the rows in the columns of a schema.
        """
        with self.access.translate_errors(path):
            return self.delta_rs.find_rows(path, keys, schema)


@dataclass(frozen=True)
class FileCommitter:
    """Commits files that a runner (Spark, or a pool of threads) has written.

    `wants_vectors` says whether the user wants deletion vectors in large tables.
    """

    delta_rs: DeltaRsRecords
    access: LakeAccess
    wants_vectors: bool = True

    def commit(
        self,
        write: Callable[[], pa.Table],
        path: str,
        schema: pa.Schema,
        commit: Commit,
        removed_size_by_path: Mapping[str, int] | None = None,
    ) -> list[dict[str, Any]]:
        """Call `write`, which writes files, and commit the files.

        Returns a row for each file (`parquet_files.FILE_SCHEMA`). `removed_size_by_path` has the files to remove: it
        maps their paths in the log to their sizes.
        """
        with self.access.translate_errors(path):
            files: list[dict[str, Any]] = write().to_pylist()
            self.delta_rs.commit(path, schema, files, commit, removed_size_by_path)
        return files

    def commit_marked_files(
        self,
        write: Callable[[], pa.Table],
        path: str,
        marked_files: Sequence[MarkedFile],
        position: int | None,
        expected_version: int,
        metadata: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Call `write`, which writes files. Commit these files, and mark the rows of `marked_files` as deleted.

        `metadata` is added to the user metadata of the commit. Returns a row for each file
        (`parquet_files.FILE_SCHEMA`). Raises OvertakenError if the table is no longer at
        `expected_version`.
        """
        with self.access.translate_errors(path):
            files: list[dict[str, Any]] = write().to_pylist()
            row_removal.mark_rows(
                self.delta_rs, path, marked_files, files, position, expected_version, metadata
            )
        return files

    def prepare_marked_files(
        self, path: str, matches: Sequence[FileMatches], expected_version: int
    ) -> list[MarkedFile]:
        """Return the files that contain the rows `matches`, with these rows marked, for `commit_marked_files`.

        Raises UnmarkableError and OvertakenError in the same cases as `find_markable_files`.
        """
        files = self.find_markable_files(path, {match.name for match in matches}, expected_version)
        return row_removal.make_marked_files(files, matches)

    def has_change_feed(self, path: str) -> bool:
        """True if a table has a change data feed."""
        with self.access.translate_errors(path):
            return self.delta_rs.exists(path) and has_change_feed(self.delta_rs.open_table(path))

    def enable_marking(self, path: str) -> bool:
        """Enable deletion vectors in a table. Returns False if it has them already. Raises UnmarkableError."""
        with self.access.translate_errors(path):
            if self.delta_rs.has_deletion_vectors(path):
                return False
            row_removal.enable_marking(self.delta_rs, path)
            return True

    def find_markable_files(
        self, path: str, names: Collection[str], expected_version: int, *, removes_files: bool = False
    ) -> dict[str, Action]:
        """Maps the names of these files to their `add` actions, for `commit_marked_files`.

        Raises UnmarkableError if the log lacks such an action, or if rows of the table cannot be marked. Raises
        OvertakenError if the table is not, or no longer, at `expected_version`. Without `removes_files`, which says that the
        files are removed as a whole, this first enables deletion vectors if need be. That makes a new version of the table,
        so OvertakenError is raised then, too.
        """
        with self.access.translate_errors(path):
            if not removes_files:
                self.enable_marking(path)
            if self.delta_rs.version(path) != expected_version:
                raise OvertakenError(path)
            return row_removal.find_markable_files(self.delta_rs, path, names, expected_version)

    def find_row_matches(
        self, path: str, digests: WantedDigests, schema: pa.Schema, runner: Runner
    ) -> list[FileMatches]:
        """The rows of a table that have one of these digests, which are hashes of whole rows.

        In the result, `key_indices` are indices into the digests.
        """
        with self.access.translate_errors(path):
            return find_row_matches(
                self.delta_rs.open_table(path),
                path,
                self.delta_rs.make_table_store(path),
                digests,
                schema,
                runner,
            )

    def find_key_matches(
        self,
        path: str,
        keys: pa.Table,
        key_masks: Iterable[Mask],
        max_bytes: int | None,
        null_column: str | None = None,
    ) -> list[FileMatches]:
        """The rows of a table that have one of these keys, file by file. See `key_lookup.find_key_matches`."""
        with self.access.translate_errors(path):
            return self.delta_rs.find_key_matches(path, keys, key_masks, max_bytes, null_column)

    def find_flagged_rows(
        self, path: str, flag: Flag, candidates: Sequence[FileMatches] | None = None
    ) -> list[FileMatches]:
        """The rows that `flag` selects by the value of a boolean column, file by file.

        Only the rows `candidates` are searched; None means the whole table.
        """
        with self.access.translate_errors(path):
            return self.delta_rs.find_flagged_rows(path, flag, candidates)

    def make_table_store(self, path: str) -> Store:
        """The store of the lake. It translates the names of a table's columns, if its files have others (column mapping)."""
        with self.access.translate_errors(path):
            return self.delta_rs.make_table_store(path)

    def read_table_schema(self, path: str) -> pa.Schema:
        """The columns of a table."""
        with self.access.translate_errors(path):
            return self.delta_rs.arrow_schema(path)

    def can_rewrite_files(self, path: str, columns: Collection[str], *, writes_feed: bool = False) -> bool:
        """True if a commit may replace files of a table by files with fewer rows.

        False, for example, if a user has added columns to `columns`, because only a MERGE keeps their values; or if the
        table has a change data feed that the caller does not write.
        """
        with self.access.translate_errors(path):
            return row_removal.can_rewrite_files(self.delta_rs, path, columns, writes_feed=writes_feed)

    def can_mark_rows(self, path: str, columns: Collection[str], *, writes_feed: bool = False) -> bool:
        """True if rows of a table may be marked in deletion vectors. False in the same cases as `can_rewrite_files`."""
        if not self.wants_vectors:
            return False
        with self.access.translate_errors(path):
            return row_removal.can_mark_rows(self.delta_rs, path, columns, writes_feed=writes_feed)

    def find_target_file_bytes(self, path: str, properties: Mapping[str, str]) -> int:
        """The size in bytes that files of a table shall have. If the table does not exist, `properties` decide."""
        with self.access.translate_errors(path):
            return find_target_file_bytes(
                self.delta_rs.properties(path) if self.delta_rs.exists(path) else properties
            )


@dataclass(frozen=True)
class SparkCommitter:
    """Commits by Delta in Spark.

    It is for tables that delta-rs cannot reach or write, and for work that needs the MERGE of Spark.
    """

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
        """Append rows to a table, or overwrite the table with them.

        `exists` says whether the table exists. `options` are options for Spark's writer.
        """
        with self.access.translate_errors(path):
            write_by_spark(
                frame,
                path,
                commit,
                options or {},
                exists,
                lambda frame, version: add_version_guard(frame, path, version, self.access.store),
            )


#: The committers of few rows, and those of any number of rows.
SmallCommitter = InProcessCommitter | SparkCommitter
LargeCommitter = FileCommitter | SparkCommitter
Committer = SmallCommitter | LargeCommitter
