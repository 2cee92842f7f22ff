"""Subscriber consistency: expected rows and replica rows -> the rows that one side has more often.

Both sides are multisets of typed rows. NULL equals NULL, NaN equals NaN and -0.0 equals 0.0, as in PostgreSQL. Rows
are compared, not their hashes. Spark and, for few rows, Arrow give the same result: the columns c0, c1, … in the
replica's order, and `count`, which is > 0 for rows that the replica lacks, and < 0 for rows that it has too often.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.apply.equal_rows import exact_values
from pgsieve.decoding.changes.equality import to_comparable
from pgsieve.resources.lake.delta.records import quoted


def differing_rows(expected: DataFrame, replica: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows that one side has more often than the other, by Spark."""

    def side(frame: DataFrame, sign: int) -> DataFrame:
        return frame.select(
            *(F.col(quoted(name)).alias(f"c{i}") for i, name in enumerate(columns)),
            F.lit(sign).alias("count"),
        )

    grouping = [f"c{i}" for i in range(len(columns))]
    return (
        side(expected, 1)
        .unionByName(side(replica, -1))
        .groupBy(*grouping)
        .agg(F.sum("count").alias("count"))
        .where("count <> 0")
    )


def differing_row_counts(expected: DataFrame, replica: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows that the sides have in different numbers: `row`, `expected` and `actual`. Here -0.0 differs from 0.0."""

    def side(frame: DataFrame, is_replica: int) -> DataFrame:
        row = F.struct(*(F.col(quoted(name)).alias(name) for name in columns))
        return frame.select(
            row.alias("row"), F.lit(1 - is_replica).alias("expected"), F.lit(is_replica).alias("actual")
        )

    both = side(expected, 0).unionByName(side(replica, 1))
    return (
        both.groupBy(*exact_values(both, "row"))
        .agg(
            F.first("row").alias("row"), F.sum("expected").alias("expected"), F.sum("actual").alias("actual")
        )
        .where("expected <> actual")
        .select("row", "expected", "actual")
    )


def few_differing_rows(expected: pa.Table, replica: pa.Table) -> pa.Table:
    """The rows that one of two tables in memory has more often; both have the replica's schema."""
    names = [f"c{i}" for i in range(expected.num_columns)]
    both = pa.concat_tables([expected, replica]).rename_columns(names)
    sign = np.where(np.arange(both.num_rows) < expected.num_rows, 1, -1)
    grouped = pa.table(
        {
            **{name: to_comparable(both[name]) for name in names},
            "count": pa.array(sign, pa.int64()),
            "row": pa.array(np.arange(both.num_rows)),
        }
    )
    counted = grouped.group_by(names).aggregate([("count", "sum"), ("row", "min")])
    different = counted.filter(pc.not_equal(counted["count_sum"], 0))
    return both.take(different["row_min"]).append_column("count", different["count_sum"])
