"""Subscriber consistency: expected rows and replica rows -> the rows that one side has more often.

Both sides are multisets of typed rows; NULL equals NULL, NaN equals NaN and -0.0 equals 0.0, as in
PostgreSQL. The comparison is exact: it compares rows, not their hashes. Spark and, for few rows, Arrow give
the same result: columns c0, c1, ... in the replica's order, and `count`. `count` is > 0 for rows missing from
the replica, and < 0 for rows that it has too often. Both group rows by the bytes that a function of Arrow batches gives
them.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BinaryType, StructField, StructType

from pgsieve.decoding.changes.equality import encoded_rows
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.spark_writes import number_columns

#: The column with the bytes of a row.
OCTETS = "octets"


def differing_rows(expected: DataFrame, replica: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows that one side has more often than the other, by Spark."""
    counts = _counted(expected, replica, columns, one_zero=True)
    return counts.select("row.*", (F.col("expected") - F.col("actual")).alias("count")).where("count <> 0")


def differing_row_counts(expected: DataFrame, replica: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows that the sides have in different numbers: `row`, `expected` and `actual`. Here -0.0 differs from 0.0."""
    counts = _counted(expected, replica, columns, one_zero=False).where("expected <> actual")
    row = F.struct(*(F.col(f"row.c{i}").alias(name) for i, name in enumerate(columns)))
    return counts.select(row.alias("row"), "expected", "actual")


def _counted(expected: DataFrame, replica: DataFrame, columns: Sequence[str], *, one_zero: bool) -> DataFrame:
    """Each distinct `row` (the columns c0, c1, …), and how often each side has it."""

    def side(frame: DataFrame, is_replica: int) -> DataFrame:
        rows = _encode(frame, columns, one_zero=one_zero)
        row = F.struct(*(f"c{i}" for i in range(len(columns))))
        counts = F.lit(1 - is_replica).alias("expected"), F.lit(is_replica).alias("actual")
        return rows.select(OCTETS, row.alias("row"), *counts)

    both = side(expected, 0).unionByName(side(replica, 1))
    return both.groupBy(OCTETS).agg(
        F.first("row").alias("row"), F.sum("expected").alias("expected"), F.sum("actual").alias("actual")
    )


def _encode(frame: DataFrame, columns: Sequence[str], *, one_zero: bool) -> DataFrame:
    """The columns c0, c1, … of rows, and their bytes."""
    # mapInArrow needs a column, also of rows without any.
    plain = number_columns(
        frame.select(*(F.col(quoted(name)) for name in columns), F.lit(None).cast("boolean"))
    )
    return add_octets(plain, plain.columns, one_zero=one_zero)


def add_octets(frame: DataFrame, columns: Sequence[str], *, one_zero: bool) -> DataFrame:
    """The DataFrame with the bytes of some of its columns (`encoded_rows`) as the column `OCTETS`. Names have no dots."""
    names = frame.columns

    def encoded(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            octets = encoded_rows(batch.select(list(columns)), one_zero=one_zero).cast(pa.binary())
            yield pa.RecordBatch.from_arrays([*batch.columns, octets], [*names, OCTETS])

    return frame.mapInArrow(encoded, StructType([*frame.schema, StructField(OCTETS, BinaryType())]))


def few_differing_rows(expected: pa.Table, replica: pa.Table) -> pa.Table:
    """The rows that one of two tables in memory has more often; both have the replica's schema."""
    names = [f"c{i}" for i in range(expected.num_columns)]
    both = pa.concat_tables([expected, replica]).rename_columns(names)
    sign = np.where(np.arange(both.num_rows) < expected.num_rows, 1, -1)
    octets = [encoded_rows(batch, one_zero=True) for batch in both.to_batches()]
    grouped = pa.table(
        {
            OCTETS: pa.chunked_array(octets, pa.large_binary()),
            "count": pa.array(sign, pa.int64()),
            "row": pa.array(np.arange(both.num_rows)),
        }
    )
    counted = grouped.group_by(OCTETS).aggregate([("count", "sum"), ("row", "min")])
    different = counted.filter(pc.not_equal(counted["count_sum"], 0))
    return both.take(different["row_min"]).append_column("count", different["count_sum"])
