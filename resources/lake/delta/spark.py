"""Reads and writes small Delta tables by Spark. It implements `Records` for lakes that delta-rs cannot reach.

A position is the LSN up to which a table has all changes. A slice is the changes from one position of the slot to
another. A repair is a commit of `check --repair`.

Each query takes one or more jobs of Spark, and most queries are repeated for the same version of a table. So their
results are cached per version (`SparkQueryCache`). The log of a table is read without a job (`SparkLog`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice, takewhile
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.pandas.types import from_arrow_schema

from pgsieve.resources.lake.delta.deletion_vectors import find_vectors_setting
from pgsieve.resources.lake.delta.errors import ConcurrentWriteError, OvertakenError
from pgsieve.resources.lake.delta.held_settings import save
from pgsieve.resources.lake.delta.queries import SPARK_TIME, Bound, format_time
from pgsieve.resources.lake.delta.records import (
    SEARCHED_COMMITS,
    VERSION_APPLICATION_ID,
    Commit,
    TableHead,
    add_version_column,
    commit_metadata,
    find_version_of_position,
    get_commit_version,
    has_repair,
    parse_position,
    quote_name,
)
from pgsieve.resources.lake.delta.spark_log import SparkLog
from pgsieve.resources.lake.delta.spark_query_cache import SparkQueryCache

#: Usually there are fewer newest rows than this number.
_LAST_ROWS = 8
#: The names of Spark's error conditions if there is no Delta table at a path.
_NO_TABLE_CONDITIONS = {
    "PATH_NOT_FOUND",
    "DELTA_TABLE_NOT_FOUND",
    "DELTA_MISSING_DELTA_TABLE",
    "DELTA_PATH_DOES_NOT_EXIST",
    "DELTA_TABLE_ONLY_OPERATION",
}


class SparkRecords:
    """Delta tables that Spark can reach."""

    def __init__(self, get_session: Callable[[], SparkSession]) -> None:
        self._get_session = get_session
        self._log = SparkLog(get_session)
        self._query_cache = SparkQueryCache(get_session, self._log)

    def exists(self, path: str) -> bool:
        """True if a Delta table exists."""
        if self.stamp(path) is not None:
            return True
        with _ignore_missing_table():
            self._get_session().read.format("delta").load(path).schema  # noqa: B018 - Connect resolves only here
            return True
        return False

    def rows(self, path: str, where: str = "true") -> list[dict[str, Any]]:
        """The rows of a small table for which an SQL condition is true. Empty if there is no table."""
        rows = self._query_cache.get(path, f"where {where}", lambda: self._query_rows(path, where))
        return [dict(row) for row in rows]

    def _query_rows(self, path: str, where: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with _ignore_missing_table():
            rows += self._get_session().read.format("delta").load(path).where(where).toArrow().to_pylist()
        return rows

    def newest_rows(self, path: str, column: str) -> list[dict[str, Any]]:
        """The rows with the greatest number in a column. Empty if there is no table."""
        rows = self._query_cache.get(path, f"newest {column}", lambda: self._query_newest_rows(path, column))
        return [dict(row) for row in rows]

    def _query_newest_rows(self, path: str, column: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        with _ignore_missing_table():
            table = self._get_session().read.format("delta").load(path)
            # An aggregation and a query of its result would take several jobs more.
            rows += table.orderBy(F.desc(column)).limit(_LAST_ROWS).toArrow().to_pylist()
            greatest = rows[0][column] if rows else None
            rows = [row for row in rows if row[column] == greatest]
            if len(rows) == _LAST_ROWS:
                rows = table.where(F.col(column) == F.lit(greatest)).toArrow().to_pylist()
        return rows

    def append(
        self,
        path: str,
        rows: pa.Table,
        position: int | None = None,
        *,
        expected_version: int | None = None,
        expected_position: int | None = None,
    ) -> None:
        """Append rows in one commit. With a position, the rows are appended only once per position.

        Spark itself compares only positions. `expected_version` and `expected_position` are checked before the write.
        So a commit of another process between this check and the write is noticed only if both commits have a position.
        """
        commit = Commit(position, expected_version=expected_version, expected_position=expected_position)
        if expected_version is not None or expected_position is not None:
            commit.raise_if_overtaken(path, self.head(path))
        # The schema is given, because Spark Connect cannot infer the columns of a table without rows.
        frame = self._get_session().createDataFrame(rows, from_arrow_schema(rows.schema))
        # An earlier version of pgsieve may have created the table with fewer columns, so add the missing ones.
        writer = frame.coalesce(1).write.format("delta").mode("append").option("mergeSchema", "true")
        save(frame.sparkSession, writer, path, commit)

    def append_versioned(self, path: str, rows: pa.Table, expected_version: int | None = None) -> None:
        """Append rows, with the Delta version of their commit in a column.

        Delta refuses the slower of two writers that append for the same application at the same time. But Delta skips
        an append without an error if its `txn` version is not above that of the table. This function detects that, and
        raises ConcurrentWriteError.
        """
        version = self.version(path) + 1 if self.exists(path) else 0
        if expected_version not in {None, max(version - 1, 0)}:
            raise OvertakenError(path)
        versioned_rows = add_version_column(rows, version)
        frame = self._get_session().createDataFrame(versioned_rows, from_arrow_schema(versioned_rows.schema))
        writer = frame.coalesce(1).write.format("delta").mode("append").option("mergeSchema", "true")
        writer = writer.option("userMetadata", commit_metadata(None))
        writer.option("txnAppId", VERSION_APPLICATION_ID).option("txnVersion", str(version)).save(path)
        stored_rows = [row for row in self.rows(path) if get_commit_version(row) == version]
        if len(stored_rows) != versioned_rows.num_rows or any(
            row not in stored_rows for row in versioned_rows.to_pylist()
        ):
            raise ConcurrentWriteError(f'Delta table "{path}": another writer committed version {version}')

    def position(self, path: str) -> int | None:
        """The position of pgsieve's newest commit to a table.

        It comes from the user metadata of the table's commits. The transaction identifiers have the same position,
        but Delta in Spark does not show them.
        """
        return self.head(path).position

    def head(self, path: str) -> TableHead:
        """The newest version of a table and its position, both read at the same moment."""
        return self._query_cache.get(path, "head", lambda: self._query_head(path))

    def _query_head(self, path: str) -> TableHead:
        head, position = TableHead(), 0
        for commit in self._read_commits(path):
            head = TableHead(max(head.version, commit["version"]))
            lsn, only_keeps_position = parse_position(commit.get("userMetadata"))
            position = max(position, lsn or 0)
            if lsn is not None and not only_keeps_position:
                return TableHead(head.version, position)
        return TableHead(head.version, position or None)

    def _read_commits(self, path: str) -> Iterator[Mapping[str, Any]]:
        """Yield the commits of a table that are in its log, the newest first. Nothing is yielded if there is no table."""
        next_version = None
        if (stamp := self._log.read_stamp(path)) is not None:
            next_version = stamp[1]
            # Usually few commits are needed, and reading an entry takes much less time than a query.
            for _ in range(SEARCHED_COMMITS):
                if next_version < 0:
                    return
                if (commit := self._log.read_commit(path, next_version)) is None:
                    break
                yield commit
                next_version -= 1
        for limit in ("",) if stamp else (" limit 1", ""):
            with _ignore_missing_table():
                history = self._get_session().sql(f"describe history delta.{quote_name(path)}{limit}")
                commits = history.orderBy(F.desc("version")).select("version", "operation", "userMetadata")
                for row in commits.toLocalIterator():
                    if next_version is None or row["version"] <= next_version:
                        yield row.asDict()
                        next_version = row["version"] - 1

    def stamp(self, path: str) -> tuple[str, int] | None:
        """A stamp that distinguishes the newest version of a table from all others.

        None if there is no table, and with Spark Connect.
        """
        return self._log.read_stamp(path)

    def version(self, path: str) -> int:
        """The newest version of a table."""
        if (stamp := self.stamp(path)) is not None:
            return stamp[1]
        row = self._get_session().sql(f"describe history delta.{quote_name(path)} limit 1").first()
        assert row is not None
        return int(row["version"])

    def entry_bytes(self, path: str, version: int) -> int | None:  # noqa: ARG002 - as the protocol has it
        """None: the size of a log entry is unknown here."""
        return None

    def is_restored(
        self,
        path: str,
        since_version: int,
        entry_bytes: int | None = None,  # noqa: ARG002 - as the protocol has it
    ) -> bool:
        """True if a table was put back, as `Records` describes.

        If `since_version` is the newest version, this takes no job of Spark.
        """
        if (stamp := self.stamp(path)) is not None and stamp[1] == since_version:
            return False
        return self._query_cache.get(
            path, f"restored {since_version}", lambda: self._query_is_restored(path, since_version)
        )

    def _query_is_restored(self, path: str, since_version: int) -> bool:
        later_commits = self._read_commits_since(path, since_version)
        return not later_commits or any(
            commit["operation"] == "RESTORE" for commit in later_commits if commit["version"] > since_version
        )

    def _read_commits_since(self, path: str, version: int) -> list[Mapping[str, Any]]:
        return list(takewhile(lambda commit: commit["version"] >= version, self._read_commits(path)))

    def is_repaired(self, path: str, since_version: int) -> bool:
        """True if a table was repaired, as `Records` describes.

        If `since_version` is the newest version, this takes no job of Spark.
        """
        if (stamp := self.stamp(path)) is not None and stamp[1] == since_version:
            return False
        return self._query_cache.get(
            path, f"repaired {since_version}", lambda: self._query_is_repaired(path, since_version)
        )

    def _query_is_repaired(self, path: str, since_version: int) -> bool:
        return has_repair(self._read_commits_since(path, since_version + 1))

    def version_of_position(self, path: str, position: int) -> int | None:
        """The version in which pgsieve wrote a position. None if it is not among the last commits."""
        return self._query_cache.get(
            path, f"committed {position}", lambda: self._query_version_of_position(path, position)
        )

    def _query_version_of_position(self, path: str, position: int) -> int | None:
        return find_version_of_position(islice(self._read_commits(path), SEARCHED_COMMITS), position)

    def size_bytes(self, path: str) -> int:
        """The bytes of all files of a table."""
        row = self._get_session().sql(f"describe detail delta.{quote_name(path)}").first()
        assert row is not None
        return int(row["sizeInBytes"])

    def count_rows(self, path: str, version: int | None = None) -> int:
        """The number of rows of a table, without `version` of its newest version."""
        reader = self._get_session().read.format("delta")
        if version is not None:
            return reader.option("versionAsOf", version).load(path).count()
        return self._query_cache.get(path, "count", lambda: reader.load(path).count())

    def find_column_bound(
        self, bound: Bound, path: str, column: str, where: str, time: datetime | None = None
    ) -> Any:
        """The least or greatest value of a column where an SQL condition is true. None if it is true for no row.

        In the condition, `{time}` stands for `time`.
        """
        table = self._get_session().read.format("delta").load(path)
        rows = table.where(where.format(time=format_time(SPARK_TIME, time)))
        return rows.select(F.expr(f"{bound}({quote_name(column)})")).collect()[0][0]

    def slices(self, path: str, after_lsn: int) -> Sequence[int]:
        """The slices of a change log that end after an LSN: the LSNs where they end, in order.

        Spark skips files whose statistics show that they have no such slices.
        """
        if (position := self.position(path)) is not None and position <= after_lsn:
            return ()
        return self._query_cache.get(path, f"slices {after_lsn}", lambda: self._query_slices(path, after_lsn))

    def _query_slices(self, path: str, after_lsn: int) -> tuple[int, ...]:
        ends: list[int] = []
        with _ignore_missing_table():
            newer_rows = self._get_session().read.format("delta").load(path).where(F.col("slice") > after_lsn)
            ends += sorted(int(row[0]) for row in newer_rows.select("slice").distinct().collect())
        return tuple(ends)

    def has_deletion_vectors(self, path: str) -> bool | None:
        """True if a table's property allows writers to mark rows in deletion vectors. None if the property is not set."""
        row = self._get_session().sql(f"describe detail delta.{quote_name(path)}").first()
        assert row is not None
        return find_vectors_setting(row["properties"])


@contextmanager
def _ignore_missing_table() -> Iterator[None]:
    """End the block without an error if there is no Delta table at the path."""
    try:
        yield
    except AnalysisException as error:
        if error.getCondition() not in _NO_TABLE_CONDITIONS:
            raise
