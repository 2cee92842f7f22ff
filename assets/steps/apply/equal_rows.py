"""Whole rows compared by Spark: expressions that are equal where `pgsieve.decoding.changes.digests` are, for a MERGE and for grouping.

Rows are equal when all their values are the same, NULL and NaN included. Spark takes 0.0 and -0.0 for one value
where it joins, groups and sorts, and would give back either: floating-point numbers are compared by their text.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StructType

from pgsieve.assets.steps.records.columns import field
from pgsieve.resources.lake.delta.records import quoted


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


def same_row_sql(rows: DataFrame, struct: str, target: str, source: str) -> str:
    """SQL that says whether the columns of `target` equal the fields of `source`, which are those of a struct column."""
    kind = rows.schema[struct].dataType
    assert isinstance(kind, StructType)
    conditions = []
    for each in kind:
        sides = [f"{side}.{quoted(each.name)}" for side in (target, source)]
        if compared := _compared_as(each.dataType):
            sides = [f"cast({side} as {compared})" for side in sides]
        conditions.append(" <=> ".join(sides))
    return " and ".join(conditions) or "true"
