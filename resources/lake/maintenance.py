"""What keeps a Delta table small: rows deleted, small files made one, files that no version needs removed.

In: a lake and a table's path. Out: commits that leave the table's position as it is, and figures. delta-rs does
it, except for tables that it does not write (mapped columns, deletion vectors, also of old versions) and in lakes that
it does not reach, where Spark does. Each commit is whole or not there, and a file is removed only when no version
younger than the hours given needs it: killed anywhere, all of this can be repeated.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import pyarrow as pa
from deltalake import CommitProperties, QueryBuilder, WriterProperties
from pyspark.sql import Row

from pgsieve.resources.lake.delta.delta_rs import ROW_GROUP, LocalRecords
from pgsieve.resources.lake.delta.records import commit_metadata, quoted
from pgsieve.resources.lake.lake import METADATA, Lake
from pgsieve.resources.lake.way import Way

#: Files up to this size are compacted.
FILE_BYTES = 128 * 1024 * 1024
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
#: In a commit's metadata: its position was read before, and another one may have been committed since.
_KEPT = {"kept": True}
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

    def compact(self) -> int:
        """Make large files of small ones; how many files there are less."""

    def vacuum(self, hours: int) -> int:
        """Remove the files that no version of the last so many hours has; how many, 0 where that is not told."""


def maintenance(lake: Lake, path: str) -> TableMaintenance:
    """Who maintains the table at a path."""
    local = lake.local
    if (
        local
        and lake.way_to_read(path) is Way.IN_PROCESS
        and not any(map(_is_vector, local.store.names(path)))
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
        deleted = self.local.table_at(self.path).delete(condition, commit_properties=self._commit())
        return int(deleted["num_deleted_rows"])

    def compact(self) -> int:
        # One task: each holds the rows of its files in memory.
        done = self.local.table_at(self.path).optimize.compact(
            target_size=FILE_BYTES,
            max_concurrent_tasks=1,
            writer_properties=WriterProperties(max_row_group_size=ROW_GROUP, compression="SNAPPY"),
            commit_properties=self._commit(),
        )
        return int(done["numFilesRemoved"]) - int(done["numFilesAdded"])

    def vacuum(self, hours: int) -> int:
        table = self.local.table_at(self.path)
        if lacking := _lacking(table.metadata().configuration, hours):
            table.alter.set_table_properties(lacking, commit_properties=self._commit())
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
        """The position stands in the newest commit's metadata, too: Spark looks for it there."""
        position = self.lake.records.position(self.path)
        return CommitProperties(custom_metadata={"userMetadata": commit_metadata(position, _KEPT)})


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

    def compact(self) -> int:
        metrics = self._sql(f"optimize {self._table}")["metrics"]
        return int(metrics["numFilesRemoved"]) - int(metrics["numFilesAdded"])

    def vacuum(self, hours: int) -> int:
        properties = self._sql(f"describe detail {self._table}")["properties"]
        if lacking := _lacking(properties, hours):
            assignments = ", ".join(f"'{name}' = '{value}'" for name, value in lacking.items())
            self._sql(f"alter table {self._table} set tblproperties ({assignments})")
        self._sql(f"vacuum {self._table} retain {hours:d} hours")
        return 0

    @property
    def _table(self) -> str:
        return f"delta.{quoted(self.path)}"

    def _sql(self, statement: str) -> Row:
        """Run a statement whose commit tells the table's position; its first row."""
        conf = self.lake.spark.conf
        settings = {
            METADATA: commit_metadata(self.lake.records.position(self.path), _KEPT),
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
