"""Tables without a key: a multiset of rows, where each change touches exactly one of several equal rows.

In: transformed changes (`pgsieve.assets.steps.update_transformation.changes`). Out: how many rows of each kind come or go (`net_rows`).

Rows are equal when all their values are the same, NULL and NaN included. Spark takes 0.0 and -0.0 for one value
where it joins, groups and sorts, and would give back either: floating-point numbers are compared by their text.
"""

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StructType

from pgsieve.assets.steps.records.columns import field
from pgsieve.resources.lake.delta.records import quoted


def net_rows(changes: DataFrame, columns: Sequence[str]) -> DataFrame:
    """For a table without a key: `row`, `count`, how many equal rows come (> 0) or go (< 0), and `needed`.

    `needed` is how many of these rows the replica must hold for every change to find its row: only then is
    `count` what the changes do. Every row that a change has is there, also where `count` is 0.
    """
    events = _row_events(changes, columns)
    values = exact_values(events, "row")
    # Of an UPDATE the old row goes before the new one comes.
    in_order = Window.partitionBy(*values).orderBy("commit_lsn", "ordinal", "count")
    return (
        events.withColumn("held", F.sum("count").over(in_order.rowsBetween(Window.unboundedPreceding, 0)))
        .groupBy(*values)
        .agg(
            F.first("row").alias("row"),
            F.sum("count").alias("count"),
            F.greatest(F.lit(0), -F.min("held")).alias("needed"),
        )
        .select("row", "count", "needed")
    )


def _row_events(changes: DataFrame, columns: Sequence[str]) -> DataFrame:
    def row(side: str) -> Column:
        return F.struct(*(field(side, name).alias(name) for name in columns)).alias("row")

    at = ("commit_lsn", "ordinal")
    came = changes.where("new is not null").select(row("new"), *at, F.lit(1).alias("count"))
    went = changes.where("old is not null").select(row("old"), *at, F.lit(-1).alias("count"))
    return came.unionByName(went)


def _compared_as(kind: DataType) -> str | None:
    """The type that values are cast to where they are compared; None where they are compared as they are."""
    if isinstance(kind, FloatType | DoubleType):
        return "string"
    if isinstance(kind, ArrayType) and _compared_as(kind.elementType):
        return "array<string>"
    return None


def exact_values(rows: DataFrame, struct: str) -> list[Column]:
    """The values of a struct column, to group and order by; equal where they are the same."""
    kind = rows.schema[struct].dataType
    assert isinstance(kind, StructType)
    return [_exact(struct, f.name, f.dataType).alias(f"exact_{i}") for i, f in enumerate(kind)]


def _exact(struct: str, name: str, kind: DataType) -> Column:
    compared = _compared_as(kind)
    return field(struct, name).cast(compared) if compared else field(struct, name)


def same_row(rows: DataFrame, left: str, right: str) -> Column:
    """Whether two structs hold equal rows; NULL equals NULL. `left` is a column of `rows`."""
    kind = rows.schema[left].dataType
    assert isinstance(kind, StructType)
    equal = F.lit(True)
    for each in kind:
        equal = equal & _exact(left, each.name, each.dataType).eqNullSafe(
            _exact(right, each.name, each.dataType)
        )
    return equal


def same_row_sql(rows: DataFrame, struct: str, target: str, source: str) -> str:
    """The same as SQL, of the columns of `target` and the fields of `source`."""
    kind = rows.schema[struct].dataType
    assert isinstance(kind, StructType)
    conditions = []
    for each in kind:
        sides = [f"{side}.{quoted(each.name)}" for side in (target, source)]
        if compared := _compared_as(each.dataType):
            sides = [f"cast({side} as {compared})" for side in sides]
        conditions.append(" <=> ".join(sides))
    return " and ".join(conditions) or "true"


def numbered_rows(net: DataFrame) -> DataFrame:
    """The rows of `net_rows` with a `number` each, 0, 1, ..., the same at every evaluation."""
    ordered = Window.orderBy(*exact_values(net, "row"))
    return net.select("row", (F.row_number().over(ordered) - 1).alias("number"))


def row_changes(changes: DataFrame, numbered: DataFrame) -> DataFrame:
    """Each change by the numbers of its rows: `old` and `new`, NULL where it has none, in order."""
    sides = changes.select("commit_lsn", "ordinal", "old", "new")
    for side in ("old", "new"):
        equal = numbered.select(F.col("row").alias(f"{side}_row"), F.col("number").alias(f"{side}_number"))
        is_same = same_row(equal, f"{side}_row", side)
        sides = sides.join(equal, F.col(side).isNotNull() & is_same, "left")
    return sides.orderBy("commit_lsn", "ordinal").select(
        F.col("old_number").alias("old"), F.col("new_number").alias("new")
    )
