"""UPDATE transformation: raw messages of one relation -> decoded changes -> what a subscription gets.

A change is (commit_lsn, ordinal, commit_time, operation, unchanged, old, new): `old` and `new` are structs of
the relation's columns, `old` absent where the publisher sent no old tuple, `new` absent for a delete;
`unchanged` names the columns of `new` that were not sent because their TOASTed value did not change.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from assets.frames.row_filter import condition
from assets.frames.schema import field, struct_ddl
from decoding.row_filter import RowFilter
from decoding.transformation import UPDATE_TRANSFORMATION
from decoding.tuples import RelationColumns, decode_changes

#: Spark types whose PostgreSQL type is never stored out of line.
_FIXED = frozenset(
    {"boolean", "smallint", "int", "bigint", "float", "double", "date", "timestamp", "timestamp_ntz"}
)


def decoded_changes(messages: DataFrame, columns: RelationColumns, needed: Collection[str]) -> DataFrame:
    """Decode the Insert, Update and Delete messages of one relation version, column by column.

    `needed` are the columns to keep; the others are passed over in the bytes.
    """
    kept = [(name, t.spark) for name, t in zip(columns.names, columns.types, strict=True) if name in needed]
    struct = struct_ddl(kept)
    schema = (
        "commit_lsn bigint, ordinal bigint, commit_time timestamp, operation string, unchanged array<string>,"
        f" old {struct}, new {struct}"
    )
    names = frozenset(needed)

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if not batch.num_rows:
                continue
            changes = decode_changes(batch.column("data"), columns, old_columns=names, new_columns=names)
            yield pa.RecordBatch.from_arrays(
                [
                    batch.column("commit_lsn"),
                    batch.column("ordinal"),
                    batch.column("commit_time"),
                    changes.operation,
                    changes.unchanged,
                    changes.old,
                    changes.new,
                ],
                names=["commit_lsn", "ordinal", "commit_time", "operation", "unchanged", "old", "new"],
            )

    return messages.select("commit_lsn", "ordinal", "commit_time", "data").mapInArrow(decode, schema)


def completed_changes(changes: DataFrame, columns: RelationColumns) -> DataFrame:
    """Fill columns of `new` that were not sent from `old`, where that has their value (identity columns)."""
    toastable = {n for n, t in zip(columns.names, columns.types, strict=True) if t.spark not in _FIXED}
    names = _fields(changes, "new")

    def filled(name: str) -> Column:
        sent = field("new", name)
        if name not in toastable:
            return sent.alias(name)
        unsent = F.col("unchanged").isNotNull() & F.array_contains("unchanged", name)
        return F.when(unsent, field("old", name)).otherwise(sent).alias(name)

    # A value that TOAST keeps out of line is never NULL: where the old tuple has NULL, it has no value.
    known = F.array(*(F.when(field("old", n).isNotNull(), F.lit(n)) for n in names if n in toastable))
    return changes.withColumns(
        {
            "new": F.when(F.col("new").isNotNull(), F.struct(*(filled(name) for name in names))),
            "unchanged": F.when(
                F.col("unchanged").isNotNull(),
                F.when(F.col("old").isNull(), F.col("unchanged")).otherwise(
                    F.array_except("unchanged", known) if toastable else F.col("unchanged")
                ),
            ),
        }
    )


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
    sent: Column = F.lit(None).cast("string")
    if "delete" in operations:
        sent = F.when((F.col("operation") == "D") & _matches(filters["delete"], "old"), "delete").otherwise(
            sent
        )
    if "update" in operations:
        sent = F.when(F.col("operation") == "U", _update(filters["update"])).otherwise(sent)
    if "insert" in operations:
        sent = F.when((F.col("operation") == "I") & _matches(filters["insert"], "new"), "insert").otherwise(
            sent
        )
    is_insert, is_delete = F.col("operation") == "insert", F.col("operation") == "delete"
    return (
        changes.withColumn("operation", sent)
        .where(F.col("operation").isNotNull())
        .select(
            "commit_lsn",
            "ordinal",
            "commit_time",
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


def _matches(filters: Sequence[RowFilter] | None, struct: str) -> Column:
    """Whether a row passes any of the filters; NULL counts as no."""
    if filters is None:
        return F.lit(True)
    matched = F.lit(False)
    for row_filter in filters:
        matched = matched | F.coalesce(condition(row_filter, lambda name: field(struct, name)), F.lit(False))
    return matched


def _update(filters: Sequence[RowFilter] | None) -> Column:
    """The operation an UPDATE becomes; without an old tuple the new row alone decides."""
    if filters is None:
        return F.lit("update")
    new = _matches(filters, "new")
    old = F.when(F.col("old").isNull(), new).otherwise(_matches(filters, "old"))
    result: Column = F.lit(None).cast("string")
    for (old_matches, new_matches), operation in UPDATE_TRANSFORMATION.items():
        row = (old if old_matches else ~old) & (new if new_matches else ~new)
        result = F.when(row, F.lit(operation)).otherwise(result)
    return result
