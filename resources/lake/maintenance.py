"""Keeps a Delta table small: deletes rows, joins small files, and removes files that no version needs.

In: a lake, and the path of a table.
Out: - commits that keep the table's position (the LSN up to which the table has all changes)
     - figures about what was done

delta-rs does this work if it can. Spark does it in lakes that delta-rs cannot reach, and for tables that delta-rs
cannot maintain: tables with partitions, column mapping or other features that delta-rs lacks, and tables of which some
version has deletion vectors. Spark also clusters large tables (`MAX_CLUSTERED_BYTES`). Each commit is atomic, and a
vacuum removes only files that no version within the retention period needs. So each operation can be repeated after the
process was killed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, QueryBuilder, WriterProperties
from pyspark.sql import Row
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.resources.lake.delta.bounds import write_with_bounds
from pgsieve.resources.lake.delta.compaction import cluster_files, compact
from pgsieve.resources.lake.delta.deletion_vectors import is_vector_file
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.held_settings import hold_settings
from pgsieve.resources.lake.delta.layout import FILE_BYTES_PROPERTY, find_target_file_bytes
from pgsieve.resources.lake.delta.queries import DELTA_RS_TIME, SPARK_TIME, format_time
from pgsieve.resources.lake.delta.records import make_unchanged_position_metadata, quote_name
from pgsieve.resources.lake.delta.tables import make_arrow_schema
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_writes import METADATA_SETTING, add_commit_costs
from pgsieve.resources.work import DRIVER, add_costs, name_engine

#: The size up to which delta-rs clusters a table, that is, sorts all its rows into new files. Spark clusters
#: larger tables.
MAX_CLUSTERED_BYTES = 128 * 1024 * 1024
#: The query of `find_last_slice_before`. Its parameters are a table and a time.
_LAST_SLICE = (
    "select coalesce(max(slice), 0) as slice from {0} where commit_time < {1} and slice <"
    " (select coalesce(min(slice), 9223372036854775807) from {0} where commit_time >= {1})"
)
#: The query of `find_last_lsn_before`. Its parameters are a table and a time.
_LAST_LSN = "select coalesce(max(lsn), 0) as lsn from {0} where at < {1}"
#: Spark's setting for the number of tasks that list the files of a table during a vacuum. The default is 10,000
#: tasks, most of which have nothing to do.
_LISTING_TASKS_SETTING = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
#: Spark's settings for the sizes of the files that OPTIMIZE joins and writes. The default is 1 GB.
_FILE_SIZE_SETTINGS = (
    "spark.databricks.delta.optimize.minFileSize",
    "spark.databricks.delta.optimize.maxFileSize",
)
#: Spark's setting that makes OPTIMIZE ZORDER BY refuse columns without statistics. By default only the first 32
#: columns of a table have statistics.
_STATISTICS_CHECK_SETTING = "spark.databricks.delta.optimize.zorder.checkStatsCollection.enabled"
_RETENTION_CHECK_SETTING = "spark.databricks.delta.retentionDurationCheck.enabled"
#: Delta's properties for the retention of removed files and of the log, with their defaults in hours.
_FILES_PROPERTY, _DEFAULT_FILES_HOURS = "delta.deletedFileRetentionDuration", 7 * 24
_LOG_PROPERTY, _DEFAULT_LOG_HOURS = "delta.logRetentionDuration", 30 * 24
#: The form of the values that pgsieve itself sets. A value of another form was set by the user.
_HOURS_PATTERN = re.compile(r"interval \d+ hours")
#: The form of a duration in Delta's properties, and of one part of it. Delta allows no months and years in it.
_DURATION_PATTERN = re.compile(r"(?:interval\s+)?((?:[+-]?\d+\s+[a-z]+\s*)+)", re.IGNORECASE)
_DURATION_PART_PATTERN = re.compile(r"([+-]?\d+)\s+([a-z]+?)s?(?:\s|$)", re.IGNORECASE)
_MICROSECONDS_BY_UNIT = {
    "microsecond": 1,
    "millisecond": 1000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 24 * 3_600_000_000,
    "week": 7 * 24 * 3_600_000_000,
}


class TableMaintenance(Protocol):
    """The operations that keep one table small."""

    def find_last_slice_before(self, time: datetime) -> int:
        """The last slice before the first slice with a transaction of this time or later. 0 if there is none.

        A slice is the changes from one position of the slot to another. It is identified by the LSN where it ends.
        """

    def find_last_lsn_before(self, time: datetime) -> int:
        """The greatest `lsn` of the rows whose time (`at`) is before this time. 0 if there are no such rows."""

    def delete(self, condition: str, since: datetime | None = None) -> int:
        """Delete the rows for which a condition is true. Return their number.

        The condition is SQL that both delta-rs and Spark understand. In it, `{since}` stands for the time `since`.
        """

    def list_file_times_and_sizes(self) -> list[tuple[int, int]]:
        """The time at which each file was written, in milliseconds since 1970, and the size of each file in bytes."""

    def compact(self, columns: Sequence[str] = ()) -> int:
        """Join small files into large ones. Return by how much the number of files has decreased.

        With the columns `columns`, all files are written again, so that rows with similar values in these columns are
        in the same file.
        """

    def vacuum(self, hours: int) -> int:
        """Remove the files that no version of the last `hours` hours needs. Return their number; 0 if Spark removed them.

        If the user has set a longer time in the table, the files are kept for that time.
        """


def make_table_maintenance(lake: Lake, path: str) -> TableMaintenance:
    """The maintenance of a table by delta-rs if delta-rs can do it, otherwise by Spark."""
    reader = lake.policy.choose_reader(path)
    if (
        isinstance(reader, DeltaRsRecords)
        and reader.can_write(path)
        and not any(map(is_vector_file, reader.store.list_file_names(path)))
    ):
        return _DeltaRsMaintenance(lake, reader, path)
    return _SparkMaintenance(lake, path)


def _parse_hours(duration: str) -> int:
    """The whole hours of a duration in Delta's properties, such as `interval 90 days`. 0 for another text."""
    match = _DURATION_PATTERN.fullmatch(duration.strip())
    parts = _DURATION_PART_PATTERN.findall(match[1]) if match else []
    microseconds = sum(int(count) * _MICROSECONDS_BY_UNIT.get(unit.lower(), 0) for count, unit in parts)
    return microseconds // _MICROSECONDS_BY_UNIT["hour"]


def _find_users_hours(properties: Mapping[str, str], name: str) -> int | None:
    """The hours of a property that the user has set. None if it is not set, or set by pgsieve."""
    duration = properties.get(name)
    return None if duration is None or _HOURS_PATTERN.fullmatch(duration) else _parse_hours(duration)


def _find_kept_hours(properties: Mapping[str, str], hours: int) -> int:
    """How long a vacuum keeps removed files: `hours`, or longer if the user has set a longer time in the table."""
    return max(hours, _find_users_hours(properties, _FILES_PROPERTY) or 0)


def _find_missing_properties(properties: Mapping[str, str], hours: int) -> dict[str, str]:
    """The properties to set in a table, so that all versions of the last `hours` hours can be read.

    They also let Delta delete older parts of its log. A property that the user has set is changed only if both it and
    Delta's default are shorter than `hours`. Delta must keep the log at least as long as removed files. So the time for
    the log is shortened only if the time for removed files is set, too.
    """
    kept_hours = _find_kept_hours(properties, hours)
    users_files_hours, users_log_hours = (
        _find_users_hours(properties, name) for name in (_FILES_PROPERTY, _LOG_PROPERTY)
    )
    is_files_time_changed = users_files_hours is None or users_files_hours < hours > _DEFAULT_FILES_HOURS
    if users_log_hours is None:
        log_hours = _parse_hours(properties.get(_LOG_PROPERTY, f"{_DEFAULT_LOG_HOURS} hours"))
        is_log_time_changed = is_files_time_changed or log_hours < kept_hours
    else:
        is_log_time_changed = users_log_hours < hours > _DEFAULT_LOG_HOURS
    needed_properties = {_FILES_PROPERTY: f"interval {hours} hours"} if is_files_time_changed else {}
    if is_log_time_changed:
        needed_properties[_LOG_PROPERTY] = f"interval {kept_hours} hours"
    return dict(needed_properties.items() - properties.items())


@dataclass(frozen=True)
class _DeltaRsMaintenance:
    lake: Lake
    delta_rs: DeltaRsRecords
    path: str

    def find_last_slice_before(self, time: datetime) -> int:
        query = _LAST_SLICE.format("t", format_time(DELTA_RS_TIME, time))
        rows = QueryBuilder().register("t", self.delta_rs.open_table(self.path)).execute(query)
        return int(pa.table(rows.read_all())["slice"][0].as_py())

    def find_last_lsn_before(self, time: datetime) -> int:
        query = _LAST_LSN.format("t", format_time(DELTA_RS_TIME, time))
        rows = QueryBuilder().register("t", self.delta_rs.open_table(self.path)).execute(query)
        return int(pa.table(rows.read_all())["lsn"][0].as_py())

    def delete(self, condition: str, since: datetime | None = None) -> int:
        condition = condition.format(since=format_time(DELTA_RS_TIME, since))
        table = self.delta_rs.open_table(self.path)
        former_paths = _read_size_by_path(table).keys()

        def delete_rows(file_properties: WriterProperties) -> int:
            metrics = table.delete(
                condition, writer_properties=file_properties, commit_properties=self._commit_properties()
            )
            return int(metrics["num_deleted_rows"])

        deleted_count = write_with_bounds(delete_rows, make_arrow_schema(table))
        size_by_path = _read_size_by_path(self.delta_rs.open_table(self.path))
        add_costs(DRIVER, 1, sum(size for path, size in size_by_path.items() if path not in former_paths))
        return deleted_count

    def list_file_times_and_sizes(self) -> list[tuple[int, int]]:
        files = pa.table(self.delta_rs.open_table(self.path).get_add_actions())
        times = files["modification_time"].cast(pa.int64()).to_pylist()
        return list(zip(times, files["size_bytes"].to_pylist(), strict=True))

    def compact(self, columns: Sequence[str] = ()) -> int:
        if not columns:
            return compact(self.delta_rs, self.path)
        if self.delta_rs.size_bytes(self.path) > MAX_CLUSTERED_BYTES:
            return _SparkMaintenance(self.lake, self.path).compact(columns)
        return cluster_files(self.delta_rs, self.path, columns)

    def vacuum(self, hours: int) -> int:
        table = self.delta_rs.open_table(self.path)
        missing_properties = _find_missing_properties(table.metadata().configuration, hours)
        # In some tables only Spark can set properties. Do not start Spark only to shorten a retention period.
        if missing_properties and (
            hours > _DEFAULT_FILES_HOURS or self.delta_rs.can_set_properties(self.path)
        ):
            self.lake.set_properties(self.path, missing_properties)
            table = self.delta_rs.open_table(self.path)
        kept_hours = _find_kept_hours(table.metadata().configuration, hours)
        unneeded_files = table.vacuum(kept_hours, enforce_retention_duration=False, full=True)
        if unneeded_files:  # Even if there were no files to remove, a vacuum would make two commits.
            table.vacuum(
                kept_hours,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
                commit_properties=self._commit_properties(),
            )
        return len(unneeded_files)

    def _commit_properties(self) -> CommitProperties:
        metadata = make_unchanged_position_metadata(self.lake.records.position(self.path))
        return CommitProperties(custom_metadata={"userMetadata": metadata})


def _read_size_by_path(table: DeltaTable) -> dict[str, int]:
    """The sizes in bytes of a table's files, by their paths."""
    files = pa.table(table.get_add_actions())
    return dict(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True))


@dataclass(frozen=True)
class _SparkMaintenance:
    lake: Lake
    path: str

    def find_last_slice_before(self, time: datetime) -> int:
        return int(
            self._run_sql(_LAST_SLICE.format(self._quoted_table, format_time(SPARK_TIME, time)))["slice"]
        )

    def find_last_lsn_before(self, time: datetime) -> int:
        return int(self._run_sql(_LAST_LSN.format(self._quoted_table, format_time(SPARK_TIME, time)))["lsn"])

    def delete(self, condition: str, since: datetime | None = None) -> int:
        condition = condition.format(since=format_time(SPARK_TIME, since))
        result = self._run_sql(f"delete from {self._quoted_table} where {condition}")
        if deleted_count := int(result["num_affected_rows"]):
            add_commit_costs(self.lake.spark, self.path)
        return deleted_count

    def compact(self, columns: Sequence[str] = ()) -> int:
        properties = self._run_sql(f"describe detail {self._quoted_table}")["properties"]
        settings = {_STATISTICS_CHECK_SETTING: "false"}
        if FILE_BYTES_PROPERTY in properties:
            settings |= dict.fromkeys(_FILE_SIZE_SETTINGS, str(find_target_file_bytes(properties)))
        order = f" zorder by ({', '.join(map(quote_name, columns))})" if columns else ""
        metrics = self._run_sql(f"optimize {self._quoted_table}{order}", settings)["metrics"]
        added_file_count, added_files = int(metrics["numFilesAdded"]), metrics["filesAdded"]
        add_costs(name_engine(self.lake.spark), max(1, added_file_count), int(added_files["totalSize"] or 0))
        return int(metrics["numFilesRemoved"]) - added_file_count

    def list_file_times_and_sizes(self) -> list[tuple[int, int]]:
        fields = ("file_path", "file_modification_time", "file_size")
        files = (
            self.lake.read_table(self.path)
            .select(*(F.col(f"_metadata.{name}") for name in fields))
            .distinct()
        )
        times = files.select(F.unix_millis("file_modification_time").alias("time"), "file_size").collect()
        return [(int(row["time"]), int(row["file_size"])) for row in times]

    def vacuum(self, hours: int) -> int:
        properties = self._run_sql(f"describe detail {self._quoted_table}")["properties"]
        if missing_properties := _find_missing_properties(properties, hours):
            self.lake.set_properties(self.path, missing_properties)
        kept_hours = _find_kept_hours(properties, hours)
        self._run_sql(f"vacuum {self._quoted_table} retain {kept_hours:d} hours")
        return 0

    @property
    def _quoted_table(self) -> str:
        return f"delta.{quote_name(self.path)}"

    def _run_sql(self, statement: str, further_settings: Mapping[str, str] | None = None) -> Row:
        """Run a statement whose commit keeps the table's position. Return the first row of its result.

        `further_settings` are settings of Spark for this statement.
        """
        spark = self.lake.spark
        settings = {
            **(further_settings or {}),
            METADATA_SETTING: make_unchanged_position_metadata(self.lake.records.position(self.path)),
            _RETENTION_CHECK_SETTING: "false",
            _LISTING_TASKS_SETTING: str(spark.conf.get("spark.sql.shuffle.partitions")),
        }
        with hold_settings(spark, settings):
            return next(iter(spark.sql(statement).collect()), Row())
