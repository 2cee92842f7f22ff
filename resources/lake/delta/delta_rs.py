"""Delta tables that delta-rs can reach, in a folder or on an object store: `Records`, and small writes without a JVM.

A small write takes milliseconds here, and about a second in Spark. So delta-rs in this process writes and
merges small batches. Spark writes large ones, and everything in a lake that delta-rs cannot reach.
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
from pgsieve.resources.lake.delta.key_lookup import FileMatches, Flag, flagged_rows, matches_among, rows_of
from pgsieve.resources.lake.delta.queries import queried, quoted_column
from pgsieve.resources.lake.delta.records import LAST_COMMITS, has_repair, version_with
from pgsieve.resources.lake.delta.slices import Slices
from pgsieve.resources.lake.delta.tables import arrow_schema
from pgsieve.resources.lake.stores.storage import is_uri
from pgsieve.resources.lake.stores.store import joined


class LocalRecords(Commits):
    """Delta tables that delta-rs can reach."""

    def rows_of(self, path: str, keys: pa.Table, schema: pa.Schema) -> tuple[npt.NDArray[np.int64], pa.Table]:
        """The indices of those keys that a table has, and its rows with these keys in the same order.

        The columns of `keys` have the table's names, as `schema` does. The rows have the columns of `schema`.
        """
        return rows_of(self.table_at(path), path, self.store, keys, schema)

    def matches(
        self,
        path: str,
        keys: pa.Table,
        among: Iterable[npt.NDArray[np.bool_]],
        most_bytes: int | None,
        lacking: str | None = None,
    ) -> list[FileMatches] | None:
        """The rows of a table with some keys, file by file; None where they are in too many bytes of files.

        `among` are parts of the keys with bounds of their own: only files whose bounds may include a key of a
        part are read. The result is None if the files with matches have more than `most_bytes`, if the files
        to read have more than twice as many (then none is read), or if files have to be read and the table is
        not plain. Without `most_bytes` there is no limit, and files may have deletion vectors. Files in which
        every row has a value of the column `lacking` are not read.
        """
        return matches_among(self.table_at(path), path, self.store, keys, among, most_bytes, lacking)

    def flagged(self, path: str, flag: Flag, among: Sequence[FileMatches] | None = None) -> list[FileMatches]:
        """The rows with a flag, file by file, in order; `among` some rows of a table, or all (None), whose keys are 0."""
        return flagged_rows(self.table_at(path), path, self.store, flag, among)

    def arrow_schema(self, path: str) -> pa.Schema:
        """The columns of a table as Arrow."""
        return arrow_schema(self.table_at(path))

    def columns(self, path: str) -> list[str]:
        """The names of a table's columns."""
        return [field.name for field in self.table_at(path).schema().fields]

    def remove(self, folder: str) -> bool:
        """Remove a folder with all tables in it; False where there is none."""
        self._tables.forget()
        return self.store.remove(folder)

    def release_tables(self) -> None:
        """Release this thread's open tables for other threads: it uses none of them at the moment."""
        self._tables.release()

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table that fulfil an SQL condition; empty where there is no table."""
        table = self.opened(path)
        return [] if table is None else self._rows(path, table, where)

    def _rows(self, path: str, table: DeltaTable, where: str) -> list[dict[str, Any]]:
        query = f"select * from t where {where}"
        return self._tables.remembered(path, table, query, lambda: queried(table, query).to_pylist())

    def newest(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column; empty where there is no table."""
        if (table := self.opened(path)) is None:
            return []
        return self._tables.remembered(
            path, table, f"newest {column}", lambda: self._newest(path, table, column)
        )

    def _newest(self, path: str, table: DeltaTable, column: str) -> list[dict[str, Any]]:
        # The statistics of the files have the number; then only the file that has it is read.
        files = pa.table(table.get_add_actions(flatten=True))
        greatest = files[f"max.{column}"] if f"max.{column}" in files.column_names else pa.nulls(1)
        if len(greatest) == 0:
            return []
        if greatest.null_count:
            greatest = queried(table, f"select {quoted_column(column)} from t")[column]
        return self._rows(path, table, f"{quoted_column(column)} = {pc.max(greatest).as_py():d}")

    def table(self, path: str) -> pa.Table:
        """All rows of a table that is known to be small."""
        return queried(self.table_at(path), "select * from t")

    def batches(self, path: str, version: int) -> Iterator[pa.RecordBatch]:
        """The rows of one version of a table, a batch at a time."""
        query = QueryBuilder().register("t", self.table_as_of(path, version)).execute("select * from t")
        yield from pa.RecordBatchReader.from_stream(query)

    def as_of(self, path: str, version: int) -> DeltaTable:
        """One version of a table, which stays at it."""
        return self._tables.as_of(path, version)

    def takes_files(self, path: str, schema: pa.Schema, *, overwrite: bool = False) -> bool:
        """Whether `commit` can add files of this schema: there is no table, or it has these columns.

        Other columns of the table are NULL in the new rows; with an overwrite there may be none. A table that
        is partitioned, or has constraints on rows, takes no files.
        """
        table = self.opened(path)
        return table is None or requirements.takes_files(table, schema, overwrite=overwrite)

    def permutes(self, path: str, columns: Sequence[str]) -> bool:
        """Whether a table has these columns in another order, which delta-rs would keep when overwriting."""
        if not self.exists(path):
            return False
        names = self.columns(path)
        return names != list(columns) and sorted(names) == sorted(columns)

    def is_partitioned_by_others(self, path: str, columns: Collection[str]) -> bool:
        """Whether a table is partitioned by other columns than these.

        delta-rs keeps the partitioning when overwriting.
        """
        table = self.opened(path)
        return table is not None and not set(table.metadata().partition_columns) <= set(columns)

    def takes_properties(self, path: str) -> bool:
        """Whether `set_properties` keeps a table readable for its present readers.

        Where the protocol lists features, delta-rs adds the one for the variant type, which few readers
        support.
        """
        table = self.table_at(path)
        return (
            requirements.is_unmapped(table)
            and requirements.is_written(table)
            and table.protocol().writer_features is None
        )

    def stamp(self, path: str) -> tuple[str, int] | None:
        """The table's identifier, which a table made anew does not share, its newest version, and the time of that.

        The time matters as a folder that was put back gets other commits with the same numbers.
        """
        if (table := self.opened(path)) is None:
            return None
        entry = joined(path, f"_delta_log/{table.version():020d}.json")
        (row,) = self._tables.remembered(
            path, table, "written", lambda: [{"written": self.store.written_at(entry)}]
        )
        return f"{table.metadata().id} {row['written']}", table.version()

    def version(self, path: str) -> int:
        """The newest version of a table."""
        return self.table_at(path).version()

    def entry_bytes(self, path: str, version: int) -> int | None:
        """The size in bytes of the log's entry of a version; None on a store, where it would take a request."""
        return None if is_uri(path) else self._tables.log_of(path).bytes_of(version)

    def is_restored(self, path: str, since: int, entry_bytes: int | None = None) -> bool:
        """Whether a table was put back behind this version.

        Cheap, two looks at its folder, where it still has the version.

        Raises DamagedTableError where the entry of this version, or of a later one, is incomplete, or has
        another size than it had.
        """
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
        """Whether a commit after this version is a repair; a look at the folder where it is the newest."""
        if {since, since + 1} & self._tables.log_of(path).since(since, since).keys() == {since}:
            return False
        table = self.table_at(path)
        later = table.version() - since
        return later > 0 and has_repair(table.history(later))

    def committed_at(self, path: str, position: int) -> int | None:
        """The version with which pgsieve wrote a position; None where the last commits do not have it."""
        return version_with(self.table_at(path).history(LAST_COMMITS), position)

    def size(self, path: str) -> int:
        """The bytes of a table's files."""
        return sum(pa.table(self.table_at(path).get_add_actions())["size_bytes"].to_pylist())

    def count(self, path: str) -> int:
        """How many rows a table has."""
        return int(queried(self.table_at(path), "select count(*) as rows from t")["rows"][0].as_py())

    def written_at(self, path: str) -> datetime:
        """When the newest commit was made."""
        (newest,) = self.table_at(path).history(1)
        return datetime.fromtimestamp(newest["timestamp"] / 1000, UTC)

    def least(self, path: str, column: str, where: str) -> Any:
        """The least value of a column in the rows that fulfil an SQL condition; None without such rows."""
        least = queried(
            self.table_at(path), f"select min({quoted_column(column)}) as m from t where {where}"
        )["m"]
        return least[0].as_py()

    def greatest(self, path: str, column: str, where: str) -> Any:
        """The greatest value of a column in the rows for which an SQL condition holds; None where there is none."""
        greatest = queried(
            self.table_at(path), f"select max({quoted_column(column)}) as m from t where {where}"
        )["m"]
        return greatest[0].as_py()

    def change_log(self, path: str) -> Slices:
        """The slices of a change log, or of a change history, as it is now."""
        return Slices(self.table_at(path), path, self.store)

    def slices(self, path: str, after: int) -> Sequence[int]:
        """The ends of the slices beyond an LSN, in order; empty where there is no table."""
        return [] if (self.position(path) or 0) <= after else self.change_log(path).ends(after)

    def is_readable(self, path: str) -> bool:
        """Whether delta-rs and Arrow can read the rows of a table as they are: no mapped columns, and no partitions.

        Nor may the table require of its readers anything that delta-rs does not support.
        """
        table = self.table_at(path)
        return (
            requirements.is_unmapped(table)
            and requirements.is_read(table)
            and not table.metadata().partition_columns
        )

    def is_unmapped(self, path: str) -> bool:
        """Whether the columns of a table, if there is one, have their own names in its files."""
        table = self.opened(path)
        return table is None or requirements.is_unmapped(table)

    def is_written(self, path: str) -> bool:
        """Whether delta-rs can write a table, if there is one: it supports all that the table requires of writers."""
        table = self.opened(path)
        return table is None or requirements.is_written(table)

    def is_read(self, path: str) -> bool:
        """Whether delta-rs can read a table: it supports all that the table requires of readers."""
        return requirements.is_read(self.table_at(path))

    def has_deletion_vectors(self, path: str) -> bool | None:
        """Whether writers of the table may mark rows in deletion vectors.

        None where its properties do not say.
        """
        setting = self.table_at(path).metadata().configuration.get(PROPERTY)
        return None if setting is None else setting.lower() == "true"
