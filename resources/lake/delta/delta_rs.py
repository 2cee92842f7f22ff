"""Reads and writes Delta tables by delta-rs, in a folder or on an object store. It implements `Records`.

`Records` is the interface to pgsieve's small tables. For a small write delta-rs needs milliseconds and no JVM, and
Spark needs about a second. So delta-rs writes and merges small batches. Spark writes large batches, and all tables of
a lake that delta-rs cannot reach.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from pgsieve.resources.lake.delta import requirements
from pgsieve.resources.lake.delta.commits import Commits
from pgsieve.resources.lake.delta.deletion_vectors import find_vectors_setting
from pgsieve.resources.lake.delta.key_lookup import (
    FileMatches,
    Flag,
    find_flagged_rows,
    find_key_matches,
    find_rows,
    find_single_value_files,
)
from pgsieve.resources.lake.delta.queries import (
    DELTA_RS_TIME,
    Bound,
    format_time,
    query_table,
    quote_column,
)
from pgsieve.resources.lake.delta.records import (
    SEARCHED_COMMITS,
    find_own_version,
    find_version_of_position,
    has_repair,
)
from pgsieve.resources.lake.delta.slices import Slices
from pgsieve.resources.lake.delta.tables import find_column_names, make_arrow_schema
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import Store, join_path


class DeltaRsRecords(Commits):
    """Delta tables that delta-rs can reach from this process."""

    def find_rows(
        self, path: str, keys: pa.Table, schema: pa.Schema
    ) -> tuple[npt.NDArray[np.int64], pa.Table]:
        """Find the rows of a table that have one of these keys.

        Returns the indices of the keys that the table has, and the rows with these keys in the same order, with the
        columns of `schema`. `keys` and `schema` name columns as the table does.
        """
        return find_rows(self.open_table(path), path, self.store, keys, schema)

    def find_key_matches(
        self,
        path: str,
        keys: pa.Table,
        key_masks: Iterable[npt.NDArray[np.bool_]],
        max_bytes: int | None,
        null_column: str | None = None,
    ) -> list[FileMatches]:
        """The rows of a table that have one of these keys, file by file. See `key_lookup.find_key_matches`."""
        return find_key_matches(
            self.open_table(path), path, self.make_table_store(path), keys, key_masks, max_bytes, null_column
        )

    def find_flagged_rows(
        self, path: str, flag: Flag, candidates: Sequence[FileMatches] | None = None
    ) -> list[FileMatches]:
        """The rows that `flag` selects by the value of a boolean column. See `key_lookup.find_flagged_rows`."""
        return find_flagged_rows(self.open_table(path), path, self.make_table_store(path), flag, candidates)

    def find_single_value_files(self, path: str, column: str) -> set[str]:
        """The files of a table in which all rows have the same integer in a column.

        The names are relative to the table's folder.
        """
        return find_single_value_files(self.open_table(path), column)

    def make_table_store(self, path: str) -> Store:
        """The store with the names that the table's columns have in its files; the plain store if there is no table."""
        table = self.open_if_exists(path)
        return self.store if table is None else replace(self.store, names=find_column_names(table, path))

    def arrow_schema(self, path: str) -> pa.Schema:
        """The columns of a table, as an Arrow schema."""
        return make_arrow_schema(self.open_table(path))

    def columns(self, path: str) -> list[str]:
        """The names of the columns of a table."""
        return [field.name for field in self.open_table(path).schema().fields]

    def remove(self, folder: str) -> bool:
        """Remove a folder and all tables in it. Return False if the folder does not exist."""
        self._tables.forget_all()
        return self.store.remove(folder)

    def release_tables(self) -> None:
        """Let other threads use the tables that this thread has open. This thread must not be using one of them."""
        self._tables.release_tables()

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table for which an SQL condition is true. Empty if there is no table."""
        table = self.open_if_exists(path)
        return [] if table is None else self._query_rows(path, table, where)

    def _query_rows(self, path: str, table: DeltaTable, where: str) -> list[dict[str, Any]]:
        query = f"select * from t where {where}"
        return self._tables.cached_rows(path, table, query, lambda: query_table(table, query).to_pylist())

    def newest_rows(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column. Empty if there is no table."""
        if (table := self.open_if_exists(path)) is None:
            return []
        return self._tables.cached_rows(
            path, table, f"newest {column}", lambda: self._query_newest_rows(path, table, column)
        )

    def _query_newest_rows(self, path: str, table: DeltaTable, column: str) -> list[dict[str, Any]]:
        # The files' statistics show the greatest number. So only files that may contain this number are read.
        files = pa.table(table.get_add_actions(flatten=True))
        greatest = files[f"max.{column}"] if f"max.{column}" in files.column_names else pa.nulls(1)
        if len(greatest) == 0:
            return []
        if greatest.null_count:
            greatest = query_table(table, f"select {quote_column(column)} from t")[column]
        return self._query_rows(path, table, f"{quote_column(column)} = {pc.max(greatest).as_py():d}")

    def read_all_rows(self, path: str) -> pa.Table:
        """All rows of a table. The table must be small."""
        return query_table(self.open_table(path), "select * from t")

    def read_version_batches(self, path: str, version: int) -> Iterator[pa.RecordBatch]:
        """The rows of a table at one of its versions, batch by batch."""
        query = QueryBuilder().register("t", self.open_version(path, version)).execute("select * from t")
        yield from pa.RecordBatchReader.from_stream(query)

    def can_add_files(self, path: str, schema: pa.Schema, *, overwrite: bool = False) -> bool:
        """True if `commit` can add files with this schema to a table.

        This is so if the table does not exist yet, or if `requirements.can_add_files` is true.
        """
        table = self.open_if_exists(path)
        return table is None or requirements.can_add_files(table, schema, overwrite=overwrite)

    def can_replace_rows(self, path: str, schema: pa.Schema) -> bool:
        """True if `commit` can replace all rows of a table by files with this schema, whatever columns the table had.

        This is so if the table does not exist yet, or if `requirements.can_replace_rows` is true.
        """
        table = self.open_if_exists(path)
        return table is None or requirements.can_replace_rows(table, schema)

    def has_permuted_columns(self, path: str, columns: Sequence[str]) -> bool:
        """True if a table has these columns, but in another order. An overwrite by delta-rs would keep the table's order."""
        if not self.exists(path):
            return False
        names = self.columns(path)
        return names != list(columns) and sorted(names) == sorted(columns)

    def is_partitioned_by_other_columns(self, path: str, columns: Collection[str]) -> bool:
        """True if a table is partitioned by a column that is missing in `columns`.

        An overwrite by delta-rs would keep the partitions.
        """
        table = self.open_if_exists(path)
        return table is not None and not set(table.metadata().partition_columns) <= set(columns)

    def can_set_properties(self, path: str) -> bool:
        """True if all readers of a table can still read it after `set_properties`.

        If a table's protocol lists features, delta-rs adds the feature of the variant type, which few readers support.
        """
        table = self.open_table(path)
        return (
            requirements.is_unmapped(table)
            and requirements.can_write(table)
            and table.protocol().writer_features is None
        )

    def stamp(self, path: str) -> tuple[str, int] | None:
        """A stamp of the newest version of a table: the table's identifier, the time of the version, and its number.

        If a table was created again, it has another identifier. If the folder of a table was restored from a copy,
        the new versions have the same numbers as former versions, but other times.
        """
        if (table := self.open_if_exists(path)) is None:
            return None
        entry = join_path(path, f"_delta_log/{table.version():020d}.json")
        (row,) = self._tables.cached_rows(
            path, table, "written", lambda: [{"written": self.store.modification_time_ns(entry)}]
        )
        return f"{table.metadata().id} {row['written']}", table.version()

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return self.open_table(path).version()

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of the log entry of a version. None on an object store, where this would take a request."""
        return None if is_uri(path) else self._tables.log_entries(path).entry_bytes(version)

    def is_restored(self, path: str, since_version: int, entry_bytes: int | None = None) -> bool:
        """True if a table was put back to a version before `since_version`, by RESTORE or an older copy of its folder.

        If `since_version` is the newest version, this only checks that its log entry exists, and that the next one does
        not. `entry_bytes` is the expected size of the entry.
        """
        log_entries = self._tables.log_entries(path)
        stamp_by_version = log_entries.read_stamps_since(since_version, since_version)
        if since_version in stamp_by_version:
            log_entries.raise_if_damaged(since_version, stamp_by_version[since_version], entry_bytes)
        if {since_version, since_version + 1} & stamp_by_version.keys() == {since_version}:
            return False
        table = self.open_table(path)
        later_count = table.version() - since_version
        for later_version in range(since_version + 1, table.version()):
            stamp = stamp_by_version.get(later_version) or log_entries.read_stamp(later_version)
            if stamp is not None:
                log_entries.raise_if_damaged(later_version, stamp)
        return later_count < 0 or any(
            commit.get("operation") == "RESTORE" for commit in table.history(later_count) if later_count
        )

    def is_repaired(self, path: str, since_version: int) -> bool:
        """True if `check --repair` has made a commit after `since_version`.

        If `since_version` is the newest version, this only checks that its log entry exists, and that the next one does
        not.
        """
        if {since_version, since_version + 1} & self._tables.log_entries(path).read_stamps_since(
            since_version, since_version
        ).keys() == {since_version}:
            return False
        table = self.open_table(path)
        later_count = table.version() - since_version
        return later_count > 0 and has_repair(table.history(later_count))

    def find_own_version(self, path: str, since_version: int, version: int) -> int:
        """The newest version up to `version` whose rows no other writer has changed since `since_version`."""
        log_entries = self._tables.log_entries(path)
        later_versions = range(since_version + 1, version + 1)
        return find_own_version(
            ((later_version, log_entries.read_actions(later_version)) for later_version in later_versions),
            since_version,
        )

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position, the LSN up to which the table has all changes.

        None if it is not among the last commits.
        """
        return find_version_of_position(self.open_table(path).history(SEARCHED_COMMITS), position)

    def size_bytes(self, path: str) -> int:
        """The bytes of all files of a table."""
        return sum(pa.table(self.open_table(path).get_add_actions())["size_bytes"].to_pylist())

    def count_rows(self, path: str, version: int | None = None) -> int:
        """The number of rows of a table, without `version` of its newest version."""
        table = self.open_table(path) if version is None else self.open_version(path, version)
        return int(query_table(table, "select count(*) as rows from t")["rows"][0].as_py())

    def read_last_commit_time(self, path: str) -> datetime:
        """The time of the newest commit of a table."""
        (newest_commit,) = self.open_table(path).history(1)
        return datetime.fromtimestamp(newest_commit["timestamp"] / 1000, UTC)

    def find_column_bound(
        self, bound: Bound, path: str, column: str, where: str, time: datetime | None = None
    ) -> Any:
        """The least or greatest value of a column where an SQL condition is true. None if it is true for no row.

        In the condition, `{time}` stands for `time`.
        """
        condition = where.format(time=format_time(DELTA_RS_TIME, time))
        query = f"select {bound}({quote_column(column)}) as bound from t where {condition}"
        return query_table(self.open_table(path), query)["bound"][0].as_py()

    def open_slices(self, path: str) -> Slices:
        """The slices (each the changes between two positions of the slot) in the newest version of a table.

        The table is a change log, which has raw messages, or a change history, which has decoded changes.
        """
        return Slices(self.open_table(path), path, self.store)

    def slices(self, path: str, after_lsn: int) -> Sequence[int]:
        """The slices of a change log that end after an LSN: the LSNs where they end, in order. Empty if there is no table."""
        return (
            []
            if (self.position(path) or 0) <= after_lsn
            else self.open_slices(path).list_ends_after(after_lsn)
        )

    def is_readable(self, path: str) -> bool:
        """True if delta-rs and Arrow can read the rows of a table.

        The table must have no column mapping and no partitions, and must not require a feature that delta-rs
        lacks.
        """
        table = self.open_table(path)
        return (
            requirements.is_unmapped(table)
            and requirements.can_read(table)
            and not table.metadata().partition_columns
        )

    def is_unmapped(self, path: str) -> bool:
        """True if the columns of a table have the same names in its files, or if there is no table."""
        table = self.open_if_exists(path)
        return table is None or requirements.is_unmapped(table)

    def can_write(self, path: str) -> bool:
        """True if delta-rs supports all features that a table requires of its writers, or if there is no table."""
        table = self.open_if_exists(path)
        return table is None or requirements.can_write(table)

    def can_read(self, path: str) -> bool:
        """True if delta-rs supports all features that a table requires of its readers."""
        return requirements.can_read(self.open_table(path))

    def has_deletion_vectors(self, path: str) -> bool | None:
        """True if a table's property allows writers to mark rows in deletion vectors. None if the property is not set."""
        return find_vectors_setting(self.open_table(path).metadata().configuration)
