"""Delta tables that delta-rs can reach, in a folder or on an object store: `Records`, and small writes without a JVM.

A small write takes delta-rs milliseconds, and Spark about a second. So delta-rs writes and merges small batches.
Spark writes large batches, and all tables of a lake that delta-rs cannot reach.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from pgsieve.resources.lake.delta import requirements
from pgsieve.resources.lake.delta.commits import Commits
from pgsieve.resources.lake.delta.deletion_vectors import PROPERTY
from pgsieve.resources.lake.delta.key_lookup import (
    FileMatches,
    Flag,
    files_of_one_value,
    flagged_rows,
    matches_among,
    rows_of,
)
from pgsieve.resources.lake.delta.queries import query_table, quoted_column
from pgsieve.resources.lake.delta.records import LAST_COMMITS, has_repair, version_with
from pgsieve.resources.lake.delta.slices import Slices
from pgsieve.resources.lake.delta.tables import arrow_schema
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import join_path


class LocalRecords(Commits):
    """Delta tables that delta-rs can reach."""

    def rows_of(self, path: str, keys: pa.Table, schema: pa.Schema) -> tuple[npt.NDArray[np.int64], pa.Table]:
        """The indices of the keys that a table has, and its rows with these keys in the same order.

        The columns of `keys` and `schema` have the table's names. The rows have the columns of `schema`.
        """
        return rows_of(self.table_at(path), path, self.store, keys, schema)

    def matches(
        self,
        path: str,
        keys: pa.Table,
        among: Iterable[npt.NDArray[np.bool_]],
        max_bytes: int | None,
        null_column: str | None = None,
    ) -> list[FileMatches] | None:
        """The rows of a table with some keys, file by file, as `key_lookup.matches_among` returns them."""
        return matches_among(self.table_at(path), path, self.store, keys, among, max_bytes, null_column)

    def flagged_rows(
        self, path: str, flag: Flag, among: Sequence[FileMatches] | None = None
    ) -> list[FileMatches]:
        """The rows with a flag, file by file, as `key_lookup.flagged_rows` returns them."""
        return flagged_rows(self.table_at(path), path, self.store, flag, among)

    def files_of_one_value(self, path: str, column: str) -> set[str]:
        """The files of a table, relative to its folder, whose rows all have the same integer in a column."""
        return files_of_one_value(self.table_at(path), column)

    def arrow_schema(self, path: str) -> pa.Schema:
        """The columns of a table, as an Arrow schema."""
        return arrow_schema(self.table_at(path))

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns."""
        return [field.name for field in self.table_at(path).schema().fields]

    def remove(self, folder: str) -> bool:
        """Remove a folder with all tables in it; False if it does not exist."""
        self._tables.forget()
        return self.store.remove(folder)

    def release_tables(self) -> None:
        """Release this thread's open tables for other threads; this thread must not be using one."""
        self._tables.release()

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table that fulfil an SQL condition; empty if there is no table."""
        table = self.open_if_exists(path)
        return [] if table is None else self._rows(path, table, where)

    def _rows(self, path: str, table: DeltaTable, where: str) -> list[dict[str, Any]]:
        query = f"select * from t where {where}"
        return self._tables.cached_rows(path, table, query, lambda: query_table(table, query).to_pylist())

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; empty if there is no table."""
        if (table := self.open_if_exists(path)) is None:
            return []
        return self._tables.cached_rows(
            path, table, f"newest {column}", lambda: self._newest(path, table, column)
        )

    def _newest(self, path: str, table: DeltaTable, column: str) -> list[dict[str, Any]]:
        # The files' statistics have the number, so only files that may have it are read.
        files = pa.table(table.get_add_actions(flatten=True))
        greatest = files[f"max.{column}"] if f"max.{column}" in files.column_names else pa.nulls(1)
        if len(greatest) == 0:
            return []
        if greatest.null_count:
            greatest = query_table(table, f"select {quoted_column(column)} from t")[column]
        return self._rows(path, table, f"{quoted_column(column)} = {pc.max(greatest).as_py():d}")

    def table(self, path: str) -> pa.Table:
        """All rows of a table, which must be small."""
        return query_table(self.table_at(path), "select * from t")

    def batches(self, path: str, version: int) -> Iterator[pa.RecordBatch]:
        """The rows of one version of a table, batch by batch."""
        query = QueryBuilder().register("t", self.table_as_of(path, version)).execute("select * from t")
        yield from pa.RecordBatchReader.from_stream(query)

    def as_of(self, path: str, version: int) -> DeltaTable:
        """A table at one version, which is not updated later."""
        return self._tables.as_of(path, version)

    def can_add_files(self, path: str, schema: pa.Schema, *, overwrite: bool = False) -> bool:
        """Whether `commit` can add files of this schema: the table is missing, or `requirements.allows_files`."""
        table = self.open_if_exists(path)
        return table is None or requirements.allows_files(table, schema, overwrite=overwrite)

    def permutes(self, path: str, columns: Sequence[str]) -> bool:
        """Whether a table has these columns in another order. An overwrite by delta-rs would keep that order."""
        if not self.exists(path):
            return False
        names = self.columns(path)
        return names != list(columns) and sorted(names) == sorted(columns)

    def is_partitioned_by_others(self, path: str, columns: Collection[str]) -> bool:
        """Whether a table is partitioned by another column than these. An overwrite by delta-rs would keep that."""
        table = self.open_if_exists(path)
        return table is not None and not set(table.metadata().partition_columns) <= set(columns)

    def can_set_properties(self, path: str) -> bool:
        """Whether `set_properties` keeps a table readable for all of its readers.

        To a protocol with a list of features, delta-rs adds the feature of the variant type, which few readers
        support.
        """
        table = self.table_at(path)
        return (
            requirements.is_unmapped(table)
            and requirements.can_write(table)
            and table.protocol().writer_features is None
        )

    def stamp(self, path: str) -> tuple[str, int] | None:
        """The table's identifier with the newest version's time, and the number of that version.

        A table that was made again has another identifier. If a folder was restored from a copy, its new
        versions have the same numbers, but other times.
        """
        if (table := self.open_if_exists(path)) is None:
            return None
        entry = join_path(path, f"_delta_log/{table.version():020d}.json")
        (row,) = self._tables.cached_rows(
            path, table, "written", lambda: [{"written": self.store.written_at(entry)}]
        )
        return f"{table.metadata().id} {row['written']}", table.version()

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return self.table_at(path).version()

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of a version's log entry; None on a store, where that would take a request."""
        return None if is_uri(path) else self._tables.log_of(path).bytes_of(version)

    def is_restored(self, path: str, since: int, entry_bytes: int | None = None) -> bool:
        """As in `Records`. If the version is the newest, this checks only two files."""
        log = self._tables.log_of(path)
        entries = log.since(since, since)
        if since in entries:
            log.refuse_damaged(since, entries[since], entry_bytes)
        if {since, since + 1} & entries.keys() == {since}:
            return False
        table = self.table_at(path)
        later = table.version() - since
        for between in range(since + 1, table.version()):
            if (stamp := entries.get(between) or log.stamp(between)) is not None:
                log.refuse_damaged(between, stamp)
        return later < 0 or any(c.get("operation") == "RESTORE" for c in table.history(later) if later)

    def is_repaired(self, path: str, since: int) -> bool:
        """As in `Records`. If the version is the newest, this checks only two files."""
        if {since, since + 1} & self._tables.log_of(path).since(since, since).keys() == {since}:
            return False
        table = self.table_at(path)
        later = table.version() - since
        return later > 0 and has_repair(table.history(later))

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position; None if it is not among the last commits."""
        return version_with(self.table_at(path).history(LAST_COMMITS), position)

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        return sum(pa.table(self.table_at(path).get_add_actions())["size_bytes"].to_pylist())

    def count(self, path: str) -> int:
        """The number of a table's rows."""
        return int(query_table(self.table_at(path), "select count(*) as rows from t")["rows"][0].as_py())

    def written_at(self, path: str) -> datetime:
        """The time of the newest commit."""
        (newest,) = self.table_at(path).history(1)
        return datetime.fromtimestamp(newest["timestamp"] / 1000, UTC)

    def least(self, path: str, column: str, where: str) -> Any:
        """The least value of a column in the rows that fulfil an SQL condition; None without such rows."""
        least = query_table(
            self.table_at(path), f"select min({quoted_column(column)}) as m from t where {where}"
        )["m"]
        return least[0].as_py()

    def greatest(self, path: str, column: str, where: str) -> Any:
        """The greatest value of a column in the rows that fulfil an SQL condition; None without such rows."""
        greatest = query_table(
            self.table_at(path), f"select max({quoted_column(column)}) as m from t where {where}"
        )["m"]
        return greatest[0].as_py()

    def change_log(self, path: str) -> Slices:
        """The slices of the newest version of a change log, or of a change history."""
        return Slices(self.table_at(path), path, self.store)

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends (LSNs) of the slices after an LSN, in order; empty if there is no table."""
        return [] if (self.position(path) or 0) <= after else self.change_log(path).ends(after)

    def is_readable(self, path: str) -> bool:
        """Whether delta-rs and Arrow can read the rows of a table.

        The table must have no mapped columns and no partitions, and must require no feature that delta-rs lacks.
        """
        table = self.table_at(path)
        return (
            requirements.is_unmapped(table)
            and requirements.can_read(table)
            and not table.metadata().partition_columns
        )

    def is_unmapped(self, path: str) -> bool:
        """Whether the columns of a table have the same names in its files; True if there is no table."""
        table = self.open_if_exists(path)
        return table is None or requirements.is_unmapped(table)

    def can_write(self, path: str) -> bool:
        """Whether delta-rs supports all features that a table requires of writers; True if there is no table."""
        table = self.open_if_exists(path)
        return table is None or requirements.can_write(table)

    def can_read(self, path: str) -> bool:
        """Whether delta-rs supports all features that a table requires of readers."""
        return requirements.can_read(self.table_at(path))

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of a table may mark rows in deletion vectors; None if the property is unset."""
        setting = self.table_at(path).metadata().configuration.get(PROPERTY)
        return None if setting is None else setting.lower() == "true"
