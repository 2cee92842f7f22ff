"""Spark's MERGE of a net change into a replica, and the clauses for a table without a key.

The net change is what all changes that are applied together do to each row. `pgsieve.resources.lake.delta.merge` has
the clauses for a table with a key, and what Spark and delta-rs share. delta-rs merges in `Commits.merge`.
"""

from collections.abc import Collection, Mapping, Sequence
from uuid import uuid4

from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StructType

from pgsieve.resources.lake.delta.held_settings import hold_settings
from pgsieve.resources.lake.delta.merge import Clauses, make_clauses_without_key, refuse_reserved_columns
from pgsieve.resources.lake.delta.records import Commit, quote_name
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.spark_writes import add_commit_costs, make_merge_settings
from pgsieve.resources.lake.version_guard import add_version_guard


def make_keyless_clauses(
    source: DataFrame, compared_columns: Collection[str], columns: Sequence[str]
) -> Clauses:
    """Make the clauses for a table without a key. `source` has the columns `action` (delete or insert) and `row`.

    The clauses delete all rows of the table that equal a row with the action delete in `compared_columns`, and insert the
    rows with the action insert. If only some of several equal rows are to go, the caller has the others inserted again.
    `columns` are all columns of the table.
    """
    row_type = source.schema["row"].dataType
    assert isinstance(row_type, StructType)
    conditions = []
    for column in (row_field for row_field in row_type if row_field.name in compared_columns):
        sides = [f"{side}.{quote_name(column.name)}" for side in ("t", "s.row")]
        # Spark takes 0.0 and -0.0 for equal. Their texts differ, so the texts are compared.
        if (text := _find_text_type(column.dataType)) is not None:
            sides = [f"cast({side} as {text})" for side in sides]
        conditions.append(" <=> ".join(sides))
    return make_clauses_without_key(" and ".join(conditions) or "true", columns)


def _find_text_type(column_type: DataType) -> str | None:
    """Find the SQL type to which floating-point numbers and arrays of them are cast; None for other types."""
    if isinstance(column_type, FloatType | DoubleType):
        return "string"
    if isinstance(column_type, ArrayType) and _find_text_type(column_type.elementType):
        return "array<string>"
    return None


def merge_by_spark(
    lake: Lake, path: str, source: DataFrame, clauses: Clauses, commit: Commit, *, can_mark_rows: bool
) -> Mapping[str, int]:
    """Run a MERGE that makes a commit.

    `can_mark_rows` says whether it may mark rows in deletion vectors, if the table has them.

    Returns the number of rows of each kind (inserted, updated, deleted). The result is empty if Delta leaves out the MERGE,
    because the table has reached the LSN of the MERGE already. Raises LakeError if a column of the table has one
    of the names that the MERGE uses itself.
    """
    refuse_reserved_columns(lake.columns(path))
    view = f"pgsieve_{uuid4().hex}"
    add_version_guard(source, path, commit.expected_version, lake.store).createOrReplaceTempView(view)
    session = lake.spark
    with hold_settings(session, make_merge_settings(commit, can_mark_rows=can_mark_rows)):
        result = session.sql(clauses.format_statement(f"delta.{quote_name(path)}", view)).collect()
    session.catalog.dropTempView(view)
    if result:
        add_commit_costs(session, path)
    counts = result[0].asDict() if result else {}
    return {kind: counts[f"num_{kind}_rows"] for kind in ("inserted", "updated", "deleted") if counts}
