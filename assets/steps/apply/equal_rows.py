"""Compares whole rows in Spark, for a MERGE and for grouping, as `pgsieve.decoding.changes.digests` does.

Rows are equal if all their values are the same; NULL equals NULL, NaN equals NaN, and 0.0 differs from -0.0. Spark
treats 0.0 and -0.0 as one value when it joins, groups or sorts. So floating-point numbers are compared as text.
"""

from pyspark.sql import Column, DataFrame
from pyspark.sql.types import ArrayType, DataType, DoubleType, FloatType, StructType

from pgsieve.assets.steps.records.columns import field
from pgsieve.resources.lake.delta.records import quoted


def _compared_as(kind: DataType) -> str | None:
    """The type to which values are cast before they are compared; None if they are compared as they are."""
    if isinstance(kind, FloatType | DoubleType):
        return "string"
    if isinstance(kind, ArrayType) and _compared_as(kind.elementType):
        return "array<string>"
    return None


def exact_values(rows: DataFrame, struct: str) -> list[Column]:
    """The fields of a struct column in the form for grouping and sorting: they are equal only if the rows are the same."""
    kind = rows.schema[struct].dataType
    assert isinstance(kind, StructType)
    return [_exact_field(struct, f.name, f.dataType).alias(f"exact_{i}") for i, f in enumerate(kind)]


def _exact_field(struct: str, name: str, kind: DataType) -> Column:
    compared = _compared_as(kind)
    return field(struct, name).cast(compared) if compared else field(struct, name)


def same_row_sql(rows: DataFrame, struct: str, target: str, source: str) -> str:
    """SQL that compares the columns of `target` with the fields of the struct column `source`."""
    kind = rows.schema[struct].dataType
    assert isinstance(kind, StructType)
    conditions = []
    for each in kind:
        sides = [f"{side}.{quoted(each.name)}" for side in (target, source)]
        if compared := _compared_as(each.dataType):
            sides = [f"cast({side} as {compared})" for side in sides]
        conditions.append(" <=> ".join(sides))
    return " and ".join(conditions) or "true"
