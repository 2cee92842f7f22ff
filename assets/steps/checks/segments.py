"""Reads the segments of a replica by Spark: the checksums of all segments, or the rows of some.

A segment is the rows whose hashes end with the same bits, and its checksum is the sum of their hashes. The executors
hash their rows batch by batch (`pgsieve.decoding.checksums.segments`), and send only the checksums to the driver.
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
_CHECKSUMS = "segment bigint, rows bigint, high bigint, low bigint"


def select_living_rows(rows: DataFrame, columns: Sequence[str], deleted_column: str | None) -> DataFrame:
    """The columns of those rows of a replica that are not deleted.

    If the replica keeps deleted rows, the column `deleted_column` marks them.
    """
    columns_to_read = [F.col(quote_name(name)) for name in columns]
    if deleted_column is None:
        return rows.select(*columns_to_read)
    numbered_rows = number_columns(rows.select(*columns_to_read, F.col(quote_name(deleted_column))))
    *names, flag = numbered_rows.columns

    def filter_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.filter(mask_living_rows(batch, flag)).select(names)

    return numbered_rows.mapInArrow(filter_batches, numbered_rows.select(*names).schema).toDF(*columns)


def compute_replica_checksums(replica: DataFrame, row_hash: RowHash) -> Checksums:
    """The checksums of a replica's segments."""

    def sum_hashes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        totals = Checksums()
        for batch in batches:
            totals.add(row_hash.compute_hashes(batch))
        segments = np.flatnonzero(totals.row_counts)
        sums = totals.hash_sums[segments]
        high, low = ((sums >> np.uint64(32)).view(np.int64), (sums & np.uint64(2**32 - 1)).view(np.int64))
        yield pa.RecordBatch.from_arrays(
            [pa.array(column) for column in (segments, totals.row_counts[segments], high, low)],
            names=["segment", "rows", "high", "low"],
        )

    summed_rows = (
        number_columns(replica)
        .mapInArrow(sum_hashes, _CHECKSUMS)
        .groupBy("segment")
        .agg(*(F.sum(name).alias(name) for name in ("rows", "high", "low")))
    )
    sums = {
        name: np.asarray(column)
        for name, column in zip(summed_rows.columns, summed_rows.toArrow().columns, strict=True)
    }
    hash_sums = (sums["high"].astype(np.uint64) << np.uint64(32)) + sums["low"].astype(np.uint64)
    totals = Checksums()
    totals.add_sums(sums["segment"], sums["rows"], hash_sums)
    return totals


def select_segment_rows(replica: DataFrame, segments: SegmentSelection) -> DataFrame:
    """The rows of a replica that are in the chosen segments."""

    def select_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(segments.select, batches)

    numbered_rows = number_columns(replica)
    return numbered_rows.mapInArrow(select_rows, numbered_rows.schema).toDF(*replica.columns)
