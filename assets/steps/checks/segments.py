"""Reads the segments of a replica by Spark: the checksums of all segments, or the rows of some.

A segment consists of the rows with hashes that end with the same bits. Its checksums are the number of these rows and
the sum of their hashes. The executors hash their rows batch by batch (`pgsieve.decoding.checksums.segments`), and
send only the checksums to the driver.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.decoding.changes.metadata_columns import mask_living_rows
from pgsieve.decoding.checksums.segments import Checksums, RowHash, SegmentSelection
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.spark_writes import number_columns

#: A sum of 64-bit hashes is divided into two halves, so that Spark can add the sums without an overflow.
_CHECKSUMS_DDL = "segment bigint, rows bigint, high bigint, low bigint"


def select_living_rows(rows: DataFrame, columns: Sequence[str], deleted_column: str | None) -> DataFrame:
    """Select the rows of a replica that are not deleted, with these columns.

    If the replica keeps deleted rows, the column `deleted_column` marks them.
    """
    columns_to_read = [F.col(quote_name(name)) for name in columns]
    if deleted_column is None:
        return rows.select(*columns_to_read)
    numbered_rows = number_columns(rows.select(*columns_to_read, F.col(quote_name(deleted_column))))
    *names, deleted_flag = numbered_rows.columns

    def filter_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.filter(mask_living_rows(batch, deleted_flag)).select(names)

    return numbered_rows.mapInArrow(filter_batches, numbered_rows.select(*names).schema).toDF(*columns)


def compute_replica_checksums(replica: DataFrame, row_hash: RowHash) -> Checksums:
    """Compute the checksums of a replica's segments."""

    def sum_hashes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        checksums = Checksums()
        for batch in batches:
            checksums.add(row_hash.compute_hashes(batch))
        segments = np.flatnonzero(checksums.row_counts)
        hash_sums = checksums.hash_sums[segments]
        high_halves, low_halves = (
            (hash_sums >> np.uint64(32)).view(np.int64),
            (hash_sums & np.uint64(2**32 - 1)).view(np.int64),
        )
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(column)
                for column in (segments, checksums.row_counts[segments], high_halves, low_halves)
            ],
            names=["segment", "rows", "high", "low"],
        )

    summed_rows = (
        number_columns(replica)
        .mapInArrow(sum_hashes, _CHECKSUMS_DDL)
        .groupBy("segment")
        .agg(*(F.sum(name).alias(name) for name in ("rows", "high", "low")))
    )
    column_by_name = {
        name: np.asarray(column)
        for name, column in zip(summed_rows.columns, summed_rows.toArrow().columns, strict=True)
    }
    hash_sums = (column_by_name["high"].astype(np.uint64) << np.uint64(32)) + column_by_name["low"].astype(
        np.uint64
    )
    checksums = Checksums()
    checksums.add_sums(column_by_name["segment"], column_by_name["rows"], hash_sums)
    return checksums


def select_segment_rows(replica: DataFrame, segments: SegmentSelection) -> DataFrame:
    """Select the rows of a replica that are in the chosen segments."""

    def select_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(segments.select, batches)

    numbered_rows = number_columns(replica)
    return numbered_rows.mapInArrow(select_rows, numbered_rows.schema).toDF(*replica.columns)
