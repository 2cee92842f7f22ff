"""Writes to tables of a lake by Spark: rows together with a position, properties of tables, and deletion vectors.

In: a session, the paths of tables, and the contents of the commit.
Out: commits. The position of a commit (the LSN up to which the table then has all changes) is in Delta's `txn` action
     (application id and version), and in the user metadata.

Raises Spark's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.records import (
    APPLICATION_ID,
    Commit,
    commit_metadata,
    make_unchanged_position_metadata,
    quote_name,
    quote_text,
)
from pgsieve.resources.lake.delta.requirements import COLUMN_MAPPING
from pgsieve.resources.work import add_costs, name_engine

#: Spark's setting for the user metadata of a commit.
METADATA_SETTING = "spark.databricks.delta.commitInfo.userMetadata"
_TXN_APP_SETTING = "spark.databricks.delta.write.txnAppId"
_TXN_VERSION_SETTING = "spark.databricks.delta.write.txnVersion"
_MERGE_VECTORS_SETTING = "spark.databricks.delta.merge.deletionVectors.persistent"
#: Delta's metrics for the number of files that a commit adds, and for their bytes. A MERGE has other names for them than a
#: write, and DELETE and OPTIMIZE have further ones.
_COMMIT_METRICS = (
    ("numFiles", "numTargetFilesAdded", "numAddedFiles"),
    ("numOutputBytes", "numTargetBytesAdded", "numAddedBytes"),
)
_ANY_PROPERTY_SETTING = "spark.databricks.delta.allowArbitraryProperties.enabled"
#: Spark's setting that decides whether tables without a property of their own use deletion vectors.
VECTORS_DEFAULT_SETTING = "spark.databricks.delta.properties.defaults.enableDeletionVectors"


def find_column_mapping_property(columns: Iterable[str]) -> dict[str, str]:
    """The Delta property that enables column mapping, if one of these columns needs it.

    With column mapping, a column has another name in the files than in the table. Without it, Delta in Spark
    refuses names with certain characters, such as spaces.
    """
    if any(set(name) & set(" ,;{}()\n\t=") for name in columns):
        return {COLUMN_MAPPING: "name"}
    return {}


def _list_field_paths(struct: StructType, *path: str) -> Iterator[tuple[str, ...]]:
    """The fields of a struct, including those of nested structs, each as a path of names.

    Column mapping covers names at every depth.
    """
    for field in struct:
        yield (*path, field.name)
        if isinstance(field.dataType, StructType):
            yield from _list_field_paths(field.dataType, *path, field.name)


def write_by_spark(
    frame: DataFrame,
    path: str,
    commit: Commit,
    options: Mapping[str, str],
    exists: Callable[[], bool],
) -> None:
    """Append rows to a table, or overwrite the table with them, in one commit.

    `exists` says whether the table exists. Column mapping is enabled if the name of a column needs it.
    """
    overwrite, position = commit.overwrite, commit.position
    spark, fields = frame.sparkSession, set(_list_field_paths(frame.schema))
    mapping_property = find_column_mapping_property(names[-1] for names in fields)
    if mapping_property and exists() and (overwrite or fields - set(_read_field_paths(spark, path))):
        _enable_column_mapping(spark, path)
    writer = (
        frame.write.format("delta")
        .mode("overwrite" if overwrite else "append")
        .options(**({} if position is None else {"txnAppId": APPLICATION_ID, "txnVersion": str(position)}))
        .option("userMetadata", commit.user_metadata)
        .options(**commit.properties, **mapping_property, **options)
    )
    writer = writer.option("overwriteSchema", "true") if overwrite else writer.option("mergeSchema", "true")
    writer.save(path)


def _read_field_paths(spark: SparkSession, path: str) -> Iterator[tuple[str, ...]]:
    return _list_field_paths(spark.read.format("delta").load(path).schema)


def _is_mapped(spark: SparkSession, path: str) -> bool:
    """True if the table has column mapping."""
    properties: Mapping[str, str] = spark.sql(f"describe detail delta.{quote_name(path)}").collect()[0][
        "properties"
    ]
    return properties.get(COLUMN_MAPPING, "none") != "none"


def _lacks_mapping(spark: SparkSession, path: str) -> bool:
    """True if a column of the table needs column mapping, and the table has none yet.

    Until it is enabled, Delta in Spark refuses each alteration of the table.
    """
    return bool(
        find_column_mapping_property(names[-1] for names in _read_field_paths(spark, path))
    ) and not _is_mapped(spark, path)


def _enable_column_mapping(spark: SparkSession, path: str) -> None:
    """Enable column mapping in a table, unless the table has it already."""
    if not _is_mapped(spark, path):
        spark.sql(f"alter table delta.{quote_name(path)} set tblproperties ('{COLUMN_MAPPING}' = 'name')")


def set_properties_by_spark(
    spark: SparkSession, path: str, properties: Mapping[str, str], position: int | None
) -> None:
    """Set Delta properties of a table. Its rows and its position stay as they are."""
    assignments = ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
    _alter_by_spark(spark, path, [f"set tblproperties ({assignments})"], position)


def drop_constraints_by_spark(
    spark: SparkSession, path: str, names: Sequence[str], position: int | None
) -> None:
    """Drop CHECK constraints of a table. Its rows and its position stay as they are."""
    _alter_by_spark(spark, path, [f"drop constraint {quote_name(name)}" for name in names], position)


def write_comments_by_spark(
    spark: SparkSession, path: str, description: str | None, columns: Mapping[str, str], position: int | None
) -> None:
    """Set the descriptions of a table and of some of its columns. Its rows and its position stay as they are."""
    table_changes = (
        [] if description is None else [f"set tblproperties ('comment' = {quote_text(description)})"]
    )
    column_changes = [
        f"alter column {quote_name(name)} comment {quote_text(text)}" for name, text in columns.items()
    ]
    _alter_by_spark(spark, path, [*table_changes, *column_changes], position)


def _alter_by_spark(spark: SparkSession, path: str, changes: Sequence[str], position: int | None) -> None:
    """Run ALTER TABLE with each of these changes. The commits keep the table's position."""
    settings = {
        METADATA_SETTING: make_unchanged_position_metadata(position),
        # Without this setting, Spark refuses the property for the size of files, which only delta-rs and Databricks know.
        _ANY_PROPERTY_SETTING: "true",
    }
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        if _lacks_mapping(spark, path):
            _enable_column_mapping(spark, path)
        for change in changes:
            spark.sql(f"alter table delta.{quote_name(path)} {change}")
    finally:
        for name in settings:
            spark.conf.unset(name)


def enable_vectors_by_spark(spark: SparkSession, path: str) -> None:
    """Let Spark mark rows of a table in deletion vectors, unless the user disabled deletion vectors for all tables.

    The table is not altered if that would need column mapping, which some readers do not support.
    """
    if spark.conf.get(VECTORS_DEFAULT_SETTING, "true") == "true" and not _lacks_mapping(spark, path):
        spark.sql(
            f"alter table delta.{quote_name(path)} set tblproperties ('delta.enableDeletionVectors' = 'true')"
        )


@contextmanager
def idempotent_writes(
    spark: SparkSession,
    position: int | None,
    *,
    can_mark_rows: bool,
    metadata: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Commit each SQL write of the block only once per table and position.

    Without a position, the tables keep their positions.

    `can_mark_rows` says whether MERGE may mark rows in tables that have deletion vectors. `metadata` is added to the
    user metadata of the commits.
    """
    if position is not None:
        spark.conf.set(_TXN_APP_SETTING, APPLICATION_ID)
        spark.conf.set(_TXN_VERSION_SETTING, str(position))
    spark.conf.set(METADATA_SETTING, commit_metadata(position, metadata))
    spark.conf.set(_MERGE_VECTORS_SETTING, str(can_mark_rows).lower())
    try:
        yield
    finally:
        for key in (_TXN_APP_SETTING, _TXN_VERSION_SETTING, METADATA_SETTING, _MERGE_VECTORS_SETTING):
            spark.conf.unset(key)


def add_commit_costs(spark: SparkSession, path: str) -> None:
    """Add the files of a table's newest commit, which Spark has made, to the costs of the work: a task for each file.

    Spark does not say how many tasks a commit took. At least the writing of each file was a task.
    """
    commits = (
        spark.sql(f"describe history delta.{quote_name(path)} limit 1").select("operationMetrics").collect()
    )
    metrics: Mapping[str, str] = (commits[0][0] if commits else None) or {}
    file_count, byte_count = (
        next((int(metrics[name]) for name in names if name in metrics), 0) for names in _COMMIT_METRICS
    )
    add_costs(name_engine(spark), max(1, file_count), byte_count)


def number_columns(frame: DataFrame) -> DataFrame:
    """The same rows with the column names c0, c1 and so on.

    mapInArrow() misreads names that contain dots or backticks.
    """
    return frame.toDF(*(f"c{number}" for number in range(len(frame.columns))))
