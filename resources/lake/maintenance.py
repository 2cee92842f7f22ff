"""What keeps a Delta table small: rows deleted, small files made one, files that no version needs removed.

In: a lake and a table's path. Out: commits that leave the table's position as it is, and figures. delta-rs does
it, except for tables that it does not write (mapped columns, deletion vectors, also of old versions, features that it lacks) and in
lakes that it does not reach, where Spark does. Each commit is whole or not there, and a file is removed only when no version
younger than the hours given needs it: killed anywhere, all of this can be repeated.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import pyarrow as pa
from deltalake import CommitProperties, QueryBuilder, WriterProperties
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.resources.lake.delta.bounds import bounded_if_possible
from pgsieve.resources.lake.delta.compaction import cluster, compact
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.layout import FILE_BYTES_PROPERTY, file_bytes
from pgsieve.resources.lake.delta.records import kept_metadata, quoted
from pgsieve.resources.lake.delta.tables import arrow_schema
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_writes import METADATA

#: Larger tables are clustered by Spark.
CLUSTERED_HERE_BYTES = 128 * 1024 * 1024
#: `last_slice_before`, of a table and a moment.
_LAST_SLICE = (
    "select coalesce(max(slice), 0) as slice from {0} where commit_time < {1} and slice <"
    " (select coalesce(min(slice), 9223372036854775807) from {0} where commit_time >= {1})"
)
#: `last_before`, of a table and a moment.
_LAST_BEFORE = "select coalesce(max(lsn), 0) as lsn from {0} where at < {1}"
#: A time in SQL, by its microseconds.
_DELTA_RS, _SPARK = "arrow_cast({}, 'Timestamp(Microsecond, Some(\"UTC\"))')", "timestamp_micros({})"
#: How many tasks list a table's files in a vacuum: 10,000 if nothing is said, most of them for nothing.
_LISTING_TASKS = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
#: Of which sizes OPTIMIZE takes files, and makes them: 1 GB if nothing is said.
_SIZES = ("spark.databricks.delta.optimize.minFileSize", "spark.databricks.delta.optimize.maxFileSize")
#: OPTIMIZE ZORDER BY refuses columns without statistics otherwise: those beyond the first 32.
_ANY_STATISTICS = "spark.databricks.delta.optimize.zorder.checkStatsCollection.enabled"
_RETENTION_CHECK = "spark.databricks.delta.retentionDurationCheck.enabled"
#: How long Delta keeps removed files and its log if nothing is said.
_FILES_PROPERTY, _FILES_HOURS = "delta.deletedFileRetentionDuration", 7 * 24
_LOG_PROPERTY, _LOG_HOURS = "delta.logRetentionDuration", 30 * 24
#: How pgsieve says so many hours; what says it in another way is the user's.
_HOURS = re.compile(r"interval \d+ hours")


class TableMaintenance(Protocol):
    """What can be done to one table."""

    def last_slice_before(self, time: datetime) -> int:
        """The last slice before the first that holds a commit of this time or later; 0 where there is none."""

    def last_before(self, time: datetime) -> int:
        """The greatest LSN of a row that is older; 0 where there is none."""

    def delete(self, condition: str, since: datetime | None = None) -> int:
        """Delete the rows for which a condition holds; how many there were.

        It is SQL that every engine understands; `{since}` in it is a time.
        """

    def files(self) -> list[tuple[int, int]]:
        """When each file was written, in milliseconds, and its size."""

    def compact(self, by: Sequence[str] = ()) -> int:
        """Make large files of small ones; how many files there are less.

        With columns to cluster `by`, all files are made anew, and rows that are close in these columns come into the same ones.
        """

    def vacuum(self, hours: int) -> int:
        """Remove the files that no version of the last so many hours has; how many, 0 where that is not told."""


def maintenance(lake: Lake, path: str) -> TableMaintenance:
    """Who maintains the table at a path."""
    local = lake.policy.reader(path)
    if (
        local
        and local.is_written(path)
        and not any(map(_is_vector, local.store.names(path)))
        and not local.table_at(path).metadata().partition_columns
    ):
        return _ByDeltaRs(lake, local, path)
    return _BySpark(lake, path)


def _is_vector(name: str) -> bool:
    return name.startswith("deletion_vector_") and name.endswith(".bin")


def _lacking(properties: Mapping[str, str], hours: int) -> dict[str, str]:
    """The table properties without which a version of so many hours ago could not be read, or the log be kept for longer.

    What nobody set, or pgsieve: who wants files or a log for longer than pgsieve does keeps them. Delta keeps no log for a
    shorter time than removed files, so the two are set together.
    """
    needed = {_FILES_PROPERTY: _FILES_HOURS, _LOG_PROPERTY: _LOG_HOURS}
    wanted = {
        name: f"interval {hours} hours"
        for name, default in needed.items()
        if hours > default or _HOURS.fullmatch(properties.get(name, "interval 0 hours"))
    }
    if _FILES_PROPERTY not in wanted:
        wanted.pop(_LOG_PROPERTY, None)
    return dict(wanted.items() - properties.items())


def _moment(written: str, time: datetime | None) -> str:
    """A time in the SQL of an engine."""
    return written.format(round(time.timestamp() * 1_000_000)) if time else "null"


@dataclass(frozen=True)
class _ByDeltaRs:
    lake: Lake
    local: LocalRecords
    path: str

    def last_slice_before(self, time: datetime) -> int:
        query = _LAST_SLICE.format("t", _moment(_DELTA_RS, time))
        rows = QueryBuilder().register("t", self.local.table_at(self.path)).execute(query)
        return int(pa.table(rows.read_all())["slice"][0].as_py())

    def last_before(self, time: datetime) -> int:
        query = _LAST_BEFORE.format("t", _moment(_DELTA_RS, time))
        rows = QueryBuilder().register("t", self.local.table_at(self.path)).execute(query)
        return int(pa.table(rows.read_all())["lsn"][0].as_py())

    def delete(self, condition: str, since: datetime | None = None) -> int:
        condition = condition.format(since=_moment(_DELTA_RS, since))
        table = self.local.table_at(self.path)

        def deleted(files: WriterProperties) -> int:
            metrics = table.delete(condition, writer_properties=files, commit_properties=self._commit())
            return int(metrics["num_deleted_rows"])

        return bounded_if_possible(deleted, arrow_schema(table))

    def files(self) -> list[tuple[int, int]]:
        files = pa.table(self.local.table_at(self.path).get_add_actions())
        times = files["modification_time"].cast(pa.int64()).to_pylist()
        return list(zip(times, files["size_bytes"].to_pylist(), strict=True))

    def compact(self, by: Sequence[str] = ()) -> int:
        if not by:
            return compact(self.local, self.path)
        if self.local.size(self.path) > CLUSTERED_HERE_BYTES:
            return _BySpark(self.lake, self.path).compact(by)
        return cluster(self.local, self.path, by)

    def vacuum(self, hours: int) -> int:
        table = self.local.table_at(self.path)
        lacking = _lacking(table.metadata().configuration, hours)
        # Where only Spark may set them, a log that is kept for longer than it need be is no reason to start it.
        if lacking and (hours > _FILES_HOURS or self.local.takes_properties(self.path)):
            self.lake.set_properties(self.path, lacking)
            table = self.local.table_at(self.path)
        unneeded = table.vacuum(hours, enforce_retention_duration=False, full=True)
        if unneeded:  # a vacuum is two commits, even where it finds nothing
            table.vacuum(
                hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=self._commit(),
            )
        return len(unneeded)

    def _commit(self) -> CommitProperties:
        metadata = kept_metadata(self.lake.records.position(self.path))
        return CommitProperties(custom_metadata={"userMetadata": metadata})


@dataclass(frozen=True)
class _BySpark:
    lake: Lake
    path: str

    def last_slice_before(self, time: datetime) -> int:
        return int(self._sql(_LAST_SLICE.format(self._table, _moment(_SPARK, time)))["slice"])

    def last_before(self, time: datetime) -> int:
        return int(self._sql(_LAST_BEFORE.format(self._table, _moment(_SPARK, time)))["lsn"])

    def delete(self, condition: str, since: datetime | None = None) -> int:
        condition = condition.format(since=_moment(_SPARK, since))
        return int(self._sql(f"delete from {self._table} where {condition}")["num_affected_rows"])

    def compact(self, by: Sequence[str] = ()) -> int:
        properties = self._sql(f"describe detail {self._table}")["properties"]
        settings = {_ANY_STATISTICS: "false"}
        if FILE_BYTES_PROPERTY in properties:
            settings |= dict.fromkeys(_SIZES, str(file_bytes(properties)))
        order = f" zorder by ({', '.join(map(quoted, by))})" if by else ""
        metrics = self._sql(f"optimize {self._table}{order}", settings)["metrics"]
        return int(metrics["numFilesRemoved"]) - int(metrics["numFilesAdded"])

    def files(self) -> list[tuple[int, int]]:
        """When each file was written, in milliseconds, and its size."""
        told = ("file_path", "file_modification_time", "file_size")
        files = self.lake.current(self.path).select(*(F.col(f"_metadata.{name}") for name in told)).distinct()
        times = files.select(F.unix_millis("file_modification_time").alias("time"), "file_size").collect()
        return [(int(row["time"]), int(row["file_size"])) for row in times]

    def vacuum(self, hours: int) -> int:
        properties = self._sql(f"describe detail {self._table}")["properties"]
        if lacking := _lacking(properties, hours):
            self.lake.set_properties(self.path, lacking)
        self._sql(f"vacuum {self._table} retain {hours:d} hours")
        return 0

    @property
    def _table(self) -> str:
        return f"delta.{quoted(self.path)}"

    def _sql(self, statement: str, more: Mapping[str, str] | None = None) -> Row:
        """Run a statement whose commit tells the table's position, with more settings; its first row."""
        conf = self.lake.spark.conf
        settings = {
            **(more or {}),
            METADATA: kept_metadata(self.lake.records.position(self.path)),
            _RETENTION_CHECK: "false",
            _LISTING_TASKS: str(conf.get("spark.sql.shuffle.partitions")),
        }
        try:
            for name, value in settings.items():
                conf.set(name, value)
            return next(iter(self.lake.spark.sql(statement).collect()), Row())
        finally:
            for name in settings:
                conf.unset(name)
