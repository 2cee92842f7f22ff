"""Segments of a replica, read by Spark: the checksums of all segments, or the rows of some.

Executors hash their rows batch by batch (`pgsieve.decoding.checksums.segments`), and send only checksums to the driver.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.decoding.changes.metadata_columns import mask_living_rows
from pgsieve.decoding.checksums.segments import Checksums, ChosenSegments, RowHash
from pgsieve.resources.lake.delta.records import quoted
from pgsieve.resources.lake.spark_writes import number_columns

#: A sum of 64-bit hashes is in two halves, so that Spark can add them without an overflow.
_CHECKSUMS = "segment bigint, rows bigint, high bigint, low bigint"


def living_rows(rows: DataFrame, columns: Sequence[str], deleted: str | None) -> DataFrame:
    """Columns of the rows of a replica that have not ended; the column `deleted` marks rows that have."""
    columns_to_read = [F.col(quoted(name)) for name in columns]
    if deleted is None:
        return rows.select(*columns_to_read)
    is_deleted = number_columns(rows.select(*columns_to_read, F.col(quoted(deleted))))
    *names, flag = is_deleted.columns

    def living(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.filter(mask_living_rows(batch, flag)).select(names)

    return is_deleted.mapInArrow(living, is_deleted.select(*names).schema).toDF(*columns)


def replica_checksums(replica: DataFrame, row_hash: RowHash) -> Checksums:
    """The checksums of a replica's segments."""

    def checksums(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        totals = Checksums()
        for batch in batches:
            totals.add(row_hash.hashes(batch))
        segments = np.flatnonzero(totals.rows)
        sums = totals.sums[segments]
        high, low = ((sums >> np.uint64(32)).view(np.int64), (sums & np.uint64(2**32 - 1)).view(np.int64))
        yield pa.RecordBatch.from_arrays(
            [pa.array(column) for column in (segments, totals.rows[segments], high, low)],
            names=["segment", "rows", "high", "low"],
        )

    summed_rows = (
        number_columns(replica)
        .mapInArrow(checksums, _CHECKSUMS)
        .groupBy("segment")
        .agg(*(F.sum(name).alias(name) for name in ("rows", "high", "low")))
    )
    sums = {
        name: np.asarray(column)
        for name, column in zip(summed_rows.columns, summed_rows.toArrow().columns, strict=True)
    }
    whole = (sums["high"].astype(np.uint64) << np.uint64(32)) + sums["low"].astype(np.uint64)
    totals = Checksums()
    totals.add_sums(sums["segment"], sums["rows"], whole)
    return totals


def replica_rows(replica: DataFrame, segments: ChosenSegments) -> DataFrame:
    """The replica's rows in chosen segments."""

    def rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(segments.select, batches)

    plain = number_columns(replica)
    return plain.mapInArrow(rows, plain.schema).toDF(*replica.columns)
