"""UPDATE transformation by Spark: raw messages of one relation -> decoded changes -> what a subscription gets.

`decoded_batches` says what a change is; `in_process` does the same with few messages.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.records.columns import field, struct_ddl
from pgsieve.assets.steps.row_filters.condition import condition
from pgsieve.assets.steps.update_transformation.decoded_batches import (
    CHANGE_COLUMNS,
    ENCODED_COLUMNS,
    FILTERED_SIDES,
    SIDES,
    AddedColumn,
    FilterColumns,
    decoded_batches,
)
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.decoding.publications.update_transformation import UPDATE_TRANSFORMATION
from pgsieve.decoding.row_filters.nodes import RowFilter


def decoded_changes(
    messages: DataFrame,
    columns: RelationColumns,
    needed: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn] = (),
    read: FilterColumns | None = None,
) -> DataFrame:
    """Decode the Insert, Update and Delete messages of one relation version, column by column.

    `needed` are the columns to keep; the others are passed over in the bytes. Columns of `new` that were not
    sent are taken from `old`, where that has their value (identity columns). `key` names a row in an error.
    `added` columns come last. What filters `read` in other types comes besides, in `filtered_old` and `filtered_new`.
    """
    struct = _struct(columns, needed, added)
    schema = (
        "commit_lsn bigint, ordinal bigint, number bigint, commit_time timestamp, operation string,"
        f" unchanged array<string>, old {struct}, new {struct}"
    )
    names = frozenset(needed)
    if read is not None:
        filtered = _struct(read.columns, read.names, read.added)
        schema += "".join(f", {name} {filtered}" for name in FILTERED_SIDES)

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return decoded_batches(batches, columns, names, key, added, read)

    return messages.select(*ENCODED_COLUMNS).mapInArrow(decode, schema)


def _struct(columns: RelationColumns, names: Collection[str], added: Sequence[AddedColumn]) -> str:
    kept = [(name, t.spark) for name, t in zip(columns.names, columns.types, strict=True) if name in names]
    return struct_ddl([*kept, *((a.name, a.spark) for a in added)])


def transformed_changes(
    changes: DataFrame,
    filters: Mapping[str, Sequence[RowFilter] | None],
    operations: Collection[str],
    columns: Sequence[str],
) -> DataFrame:
    """What a subscription gets of decoded changes: filtered, UPDATEs transformed, published columns only.

    `filters` has for insert, update and delete the row filters that are ORed, None for no filter. An
    UPDATE that is transformed is sent whatever `operations` says of insert and delete (29.4.3).
    """
    if all(texts is None for texts in filters.values()):
        # Nothing to evaluate, and no UPDATE becomes anything else.
        sent = changes.where(F.col("operation").isin(sorted(operations)))
        return sent.withColumns({side: _projected(changes, side, columns) for side in SIDES})
    old, new = FILTERED_SIDES if FILTERED_SIDES[0] in changes.columns else SIDES
    operation = F.col("operation")
    becomes: Column = F.lit(None).cast("string")
    if "delete" in operations:
        matches = (operation == "delete") & _matches(filters["delete"], old, "delete")
        becomes = F.when(matches, "delete").otherwise(becomes)
    if "update" in operations:
        becomes = F.when(operation == "update", _update(filters["update"], old, new)).otherwise(becomes)
    if "insert" in operations:
        matches = (operation == "insert") & _matches(filters["insert"], new, "insert")
        becomes = F.when(matches, "insert").otherwise(becomes)
    is_insert, is_delete = operation == "insert", operation == "delete"
    return (
        changes.withColumn("operation", becomes)
        .where(F.col("operation").isNotNull())
        .select(
            *CHANGE_COLUMNS[:4],
            "operation",
            F.when(~is_delete & (F.size("unchanged") > 0), F.col("unchanged")).alias("unchanged"),
            F.when(~is_insert, _projected(changes, "old", columns)).alias("old"),
            F.when(~is_delete, _projected(changes, "new", columns)).alias("new"),
        )
    )


def _fields(changes: DataFrame, struct: str) -> list[str]:
    return list(changes.schema[struct].dataType.fieldNames())  # type: ignore[attr-defined]


def _projected(changes: DataFrame, struct: str, columns: Sequence[str]) -> Column:
    if _fields(changes, struct) == list(columns):
        return F.col(struct)
    return F.when(F.col(struct).isNotNull(), F.struct(*(field(struct, name).alias(name) for name in columns)))


def _matches(filters: Sequence[RowFilter] | None, struct: str, operation: str) -> Column:
    """Whether a row of this operation passes any of the filters; NULL counts as no."""
    if filters is None:
        return F.lit(True)
    concerned = (F.col("operation") == operation) & F.col(struct).isNotNull()
    matched = F.lit(False)
    for row_filter in filters:
        passes = condition(row_filter, lambda name: field(struct, name), concerned)
        matched = matched | F.coalesce(passes, F.lit(False))
    return matched


def _update(filters: Sequence[RowFilter] | None, old: str, new: str) -> Column:
    """The operation an UPDATE becomes, by these structs; without an old tuple the new row alone decides."""
    if filters is None:
        return F.lit("update")
    after = _matches(filters, new, "update")
    before = F.when(F.col(old).isNull(), after).otherwise(_matches(filters, old, "update"))
    result: Column = F.lit(None).cast("string")
    for (old_matches, new_matches), operation in UPDATE_TRANSFORMATION.items():
        row = (before if old_matches else ~before) & (after if new_matches else ~after)
        result = F.when(row, F.lit(operation)).otherwise(result)
    return result
