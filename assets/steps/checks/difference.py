"""Finds the rows that the publisher (`expected`) or the replica (`actual`) has more often than the other side.

Both sides are multisets of typed rows. NULL equals NULL, NaN equals NaN and -0.0 equals 0.0, as in PostgreSQL. The
comparison is exact, because it compares rows, and not their hashes.

The result has the columns c0, c1 and so on, in the order of the replica, and `count`. If a row is missing in the replica,
its `count` is greater than 0. If the replica has a row too often, its `count` is less than 0. Spark computes the
result, or Arrow if there are few rows; both give the same result. Both group the rows by their bytes, as `encode_rows`
computes them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention
from pyspark.sql.types import BinaryType, StructField, StructType

from pgsieve.decoding.changes.equality import encode_rows
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.spark_writes import number_columns

#: The column with the bytes of a row.
OCTETS = "octets"


class SideCounts(NamedTuple):
    """How many rows only the publisher has, how many only the replica has, and how many have other values on each side.

    A row with other values is one whose key both sides have. In a table without a key there is no such row.
    """

    only_publisher: int = 0
    only_replica: int = 0
    different: int = 0

    @property
    def total(self) -> int:
        """The number of rows that one side has more often than the other. A row with other values counts on both sides."""
        return self.only_publisher + self.only_replica + 2 * self.different


def count_rows_by_side(differences: DataFrame, key_columns: Sequence[str]) -> SideCounts:
    """Let Spark count the rows that `find_differing_rows` has found; `key_columns` are c0, c1 and so on."""
    counts = "sum(greatest(count, 0)) AS expected", "sum(greatest(-count, 0)) AS actual"
    groups = (
        add_octets(differences, key_columns, unify_zeros=True).groupBy(OCTETS)
        if key_columns
        else differences.groupBy()
    )
    different = "sum(least(expected, actual))" if key_columns else "0"
    row = (
        groups.agg(*map(F.expr, counts))
        .selectExpr("sum(expected) AS expected", "sum(actual) AS actual", f"{different} AS different")
        .first()
    )
    assert row is not None
    return _make_side_counts(row["expected"] or 0, row["actual"] or 0, row["different"] or 0)


def count_few_rows_by_side(differences: pa.Table, key_columns: Sequence[str]) -> SideCounts:
    """Count the rows that `find_few_differing_rows` has found; `key_columns` are c0, c1 and so on."""
    counts = differences["count"].to_numpy()
    expected, actual = np.maximum(counts, 0), np.maximum(-counts, 0)
    if not key_columns:
        return _make_side_counts(expected.sum(), actual.sum(), 0)
    keys = [
        encode_rows(batch, unify_zeros=True) for batch in differences.select(list(key_columns)).to_batches()
    ]
    groups = (
        pa.table({OCTETS: pa.chunked_array(keys, pa.large_binary()), "expected": expected, "actual": actual})
        .group_by(OCTETS)
        .aggregate([("expected", "sum"), ("actual", "sum")])
    )
    different = np.minimum(groups["expected_sum"].to_numpy(), groups["actual_sum"].to_numpy())
    return _make_side_counts(expected.sum(), actual.sum(), different.sum())


def _make_side_counts(expected: int, actual: int, different: int) -> SideCounts:
    return SideCounts(int(expected - different), int(actual - different), int(different))


def find_differing_rows(
    expected: DataFrame, replica: DataFrame, columns: Sequence[str], *, unify_zeros: bool = True
) -> DataFrame:
    """Let Spark find the rows that one side has more often than the other side.

    Without `unify_zeros`, -0.0 differs from 0.0.
    """

    def encode_side(frame: DataFrame, count: int) -> DataFrame:
        rows = _encode_rows(frame, columns, unify_zeros=unify_zeros)
        row = F.struct(*(f"c{index}" for index in range(len(columns))))
        return rows.select(OCTETS, row.alias("row"), F.lit(count).alias("count"))

    both_sides = encode_side(expected, 1).unionByName(encode_side(replica, -1))
    counts = both_sides.groupBy(OCTETS).agg(F.first("row").alias("row"), F.sum("count").alias("count"))
    return counts.where("count <> 0").select("row.*", "count")


def _encode_rows(frame: DataFrame, columns: Sequence[str], *, unify_zeros: bool) -> DataFrame:
    """Name the columns of the rows c0, c1 and so on, and add a column with the bytes of each row."""
    # A table may have no columns, and mapInArrow needs at least one.
    numbered_rows = number_columns(
        frame.select(*(F.col(quote_name(name)) for name in columns), F.lit(None).cast("boolean"))
    )
    return add_octets(numbered_rows, numbered_rows.columns, unify_zeros=unify_zeros)


def add_octets(frame: DataFrame, columns: Sequence[str], *, unify_zeros: bool) -> DataFrame:
    """Add the column `OCTETS`, which has the bytes of some columns (`encode_rows`). Names must not have dots."""
    names = frame.columns

    def encode_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            octets = encode_rows(batch.select(list(columns)), unify_zeros=unify_zeros).cast(pa.binary())
            yield pa.RecordBatch.from_arrays([*batch.columns, octets], [*names, OCTETS])

    return frame.mapInArrow(encode_batches, StructType([*frame.schema, StructField(OCTETS, BinaryType())]))


def find_few_differing_rows(expected: pa.Table, replica: pa.Table, *, unify_zeros: bool = True) -> pa.Table:
    """Find the rows that one of two tables in memory has more often than the other. Both have the replica's schema.

    Without `unify_zeros`, -0.0 differs from 0.0.
    """
    names = [f"c{index}" for index in range(expected.num_columns)]
    both_sides = pa.concat_tables([expected, replica]).rename_columns(names)
    signs = np.where(np.arange(both_sides.num_rows) < expected.num_rows, 1, -1)
    encoded_batches = [encode_rows(batch, unify_zeros=unify_zeros) for batch in both_sides.to_batches()]
    encoded_table = pa.table(
        {
            OCTETS: pa.chunked_array(encoded_batches, pa.large_binary()),
            "count": pa.array(signs, pa.int64()),
            "index": pa.array(np.arange(both_sides.num_rows)),
        }
    )
    counted_rows = encoded_table.group_by(OCTETS).aggregate([("count", "sum"), ("index", "min")])
    different_rows = counted_rows.filter(pc.not_equal(counted_rows["count_sum"], 0))
    return both_sides.take(different_rows["index_min"]).append_column("count", different_rows["count_sum"])
