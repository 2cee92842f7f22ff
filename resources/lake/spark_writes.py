"""Writes to tables of a lake by Spark: rows together with a position, properties of tables, and deletion vectors.

In: a session, the paths of tables, and the contents of the commit.
Out: commits. The position of a commit (the LSN up to which the table then has all changes) is in Delta's `txn` action
     (application id and version), and in the user metadata.

Raises Spark's errors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pgsieve.resources.lake.delta.feed_property import FEED_PROPERTY, has_feed
from pgsieve.resources.lake.delta.held_settings import hold_settings, save
from pgsieve.resources.lake.delta.records import (
    APPLICATION_ID,
    Commit,
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
#: Spark's setting that decides whether a new table without a property of its own has a change data feed.
_FEED_DEFAULT_SETTING = "spark.databricks.delta.properties.defaults.enableChangeDataFeed"


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
    add_guard: Callable[[DataFrame, int | None], DataFrame],
) -> None:
    """Append rows to a table, or overwrite the table with them, in one commit.

    `exists` says whether the table exists. `add_guard` makes a DataFrame fail if the table has a later version than the
    given one.

    Column mapping is enabled if the name of a column needs it. Delta refuses a commit that adds rows to a table with a
    feed and also enables column mapping, or drops or renames a mapped column. So a new table with a feed is first created without
    rows, and an existing one has no feed during such a commit.
    """
    mapping_property = find_column_mapping_property(names[-1] for names in _list_field_paths(frame.schema))
    properties = {**commit.properties, **mapping_property}
    with _accepted_columns(frame, path, commit, properties, exists) as altered_count:
        expected_version = (
            None if commit.expected_version is None else commit.expected_version + altered_count
        )
        writer = (
            add_guard(frame, expected_version)
            .write.format("delta")
            .mode("overwrite" if commit.overwrite else "append")
            .options(**properties, **options)
        )
        writer.option("overwriteSchema" if commit.overwrite else "mergeSchema", "true")
        save(frame.sparkSession, writer, path, commit)


@contextmanager
def _accepted_columns(
    frame: DataFrame, path: str, commit: Commit, properties: Mapping[str, str], exists: Callable[[], bool]
) -> Iterator[int]:
    """Within the block Delta accepts the columns of a frame in a table. Yields how many commits that took."""
    spark, fields = frame.sparkSession, set(_list_field_paths(frame.schema))
    is_mapped = COLUMN_MAPPING in properties
    if not (is_mapped or commit.overwrite):
        yield 0
        return
    if not exists():
        default = {FEED_PROPERTY: spark.conf.get(_FEED_DEFAULT_SETTING, None) or "false"}
        if not (is_mapped and has_feed({**default, **properties})):
            yield 0
            return
        with hold_settings(spark, {}):
            spark.createDataFrame([], frame.schema).write.format("delta").options(**properties).save(path)
        yield 1
        return
    table_schema = spark.read.format("delta").load(path).schema
    adds_mapped_columns = is_mapped and (
        commit.overwrite or bool(fields - set(_list_field_paths(table_schema)))
    )
    types = {field.name: field.dataType for field in frame.schema}
    replaces_columns = commit.overwrite and any(
        types.get(field.name) != field.dataType for field in table_schema
    )
    if not (adds_mapped_columns or replaces_columns):
        yield 0
        return
    table_properties = _read_properties(spark, path)
    has_mapping = _has_mapping(table_properties)
    enables_mapping = adds_mapped_columns and not has_mapping
    if enables_mapping:
        _set_property(spark, path, COLUMN_MAPPING, "name")
    if not (replaces_columns and (has_mapping or enables_mapping) and has_feed(table_properties)):
        yield int(enables_mapping)
        return
    _set_property(spark, path, FEED_PROPERTY, "false")
    try:
        yield enables_mapping + 1
    finally:
        _set_property(spark, path, FEED_PROPERTY, "true")


def _read_properties(spark: SparkSession, path: str) -> Mapping[str, str]:
    properties: Mapping[str, str] = spark.sql(f"describe detail delta.{quote_name(path)}").collect()[0][
        "properties"
    ]
    return properties


def _set_property(spark: SparkSession, path: str, name: str, value: str) -> None:
    with hold_settings(spark, {}):
        spark.sql(f"alter table delta.{quote_name(path)} set tblproperties ('{name}' = '{value}')")


def _has_mapping(properties: Mapping[str, str]) -> bool:
    """True if a table with these properties has column mapping."""
    return properties.get(COLUMN_MAPPING, "none") != "none"


def _lacks_mapping(spark: SparkSession, path: str) -> bool:
    """True if a column of the table needs column mapping, and the table has none yet.

    Until it is enabled, Delta in Spark refuses each alteration of the table.
    """
    schema = spark.read.format("delta").load(path).schema
    return bool(
        find_column_mapping_property(names[-1] for names in _list_field_paths(schema))
    ) and not _has_mapping(_read_properties(spark, path))


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
    if _lacks_mapping(spark, path):
        _set_property(spark, path, COLUMN_MAPPING, "name")
    with hold_settings(spark, settings):
        for change in changes:
            spark.sql(f"alter table delta.{quote_name(path)} {change}")


def enable_vectors_by_spark(spark: SparkSession, path: str) -> bool:
    """Let Spark mark rows of a table in deletion vectors, unless the user disabled deletion vectors for all tables.

    The table is not altered if that would need column mapping, which some readers do not support. Returns True if the
    table was altered.
    """
    if spark.conf.get(VECTORS_DEFAULT_SETTING, "true") != "true" or _lacks_mapping(spark, path):
        return False
    _set_property(spark, path, "delta.enableDeletionVectors", "true")
    return True


def make_merge_settings(commit: Commit, *, can_mark_rows: bool) -> dict[str, str]:
    """The settings with which a MERGE makes a commit. It is made only once per position.

    `can_mark_rows` says whether the MERGE may mark rows, if the table has deletion vectors.
    """
    settings = {
        METADATA_SETTING: commit.user_metadata,
        _MERGE_VECTORS_SETTING: str(can_mark_rows).lower(),
    }
    if commit.position is not None:
        settings |= {_TXN_APP_SETTING: APPLICATION_ID, _TXN_VERSION_SETTING: str(commit.position)}
    return settings


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
