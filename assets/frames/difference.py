"""Subscriber consistency: expected rows and replica rows -> the rows on which they differ.

Both sides are multisets of typed rows; NULL equals NULL. The comparison is exact: no hashes stand in for
rows.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from resources.records import quoted


def differing_rows(expected: DataFrame, replica: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Rows that one side has oftener: columns c0, c1, ... in the order of `columns`, and `count`.

    `count` is > 0 for rows missing from the replica and < 0 for rows it has too many.
    """

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
