"""Reads the segments of a replica: the checksums of all segments, or the rows of some.

A segment consists of the rows with hashes that end with the same bits. Its checksums are the number of these rows and
the sum of their hashes. Tasks hash their rows batch by batch (`pgsieve.decoding.checksums.segments`), and send only the
checksums to the driver. If only Spark can read a replica, its rows are a DataFrame.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.decoding.changes.metadata_columns import keep_living_rows, mask_living_rows
from pgsieve.decoding.checksums.segments import Checksums, RowHash, SegmentSelection
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.records import quote_name
from pgsieve.resources.lake.derived_rows import FileRows, list_file_rows
from pgsieve.resources.lake.spark_writes import number_columns

#: A sum of 64-bit hashes is divided into two halves, so that Spark can add the sums without an overflow.
CHECKSUM_SCHEMA = pa.schema(dict.fromkeys(("segment", "rows", "high", "low"), pa.int64()))
_CHECKSUMS_DDL = ", ".join(f"{name} bigint" for name in CHECKSUM_SCHEMA.names)


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


def list_living_rows(
    delta_rs: DeltaRsRecords, path: str, version: int, schema: pa.Schema, deleted_column: str | None
) -> list[FileRows]:
    """The rows of each file of a replica that are not deleted, in the columns and types of a schema.

    If the replica keeps deleted rows, the column `deleted_column` marks them.
    """
    read_schema = schema if deleted_column is None else schema.append(pa.field(deleted_column, pa.bool_()))
    keep_rows = partial(keep_living_rows, schema=schema, deleted_column=deleted_column)
    return list_file_rows(delta_rs, path, read_schema, keep_rows, version)


def compute_replica_checksums(replica: DataFrame, row_hash: RowHash) -> Checksums:
    """Let Spark compute the checksums of a replica's segments."""
    summed_rows = (
        number_columns(replica)
        .mapInArrow(partial(sum_hashes, row_hash), _CHECKSUMS_DDL)
        .groupBy("segment")
        .agg(*(F.sum(name).alias(name) for name in ("rows", "high", "low")))
    )
    return add_task_checksums(summed_rows.toArrow())


def sum_hashes(row_hash: RowHash, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compute the checksums of the segments of some rows; yields a batch (`CHECKSUM_SCHEMA`)."""
    checksums = Checksums()
    for batch in batches:
        checksums.add(row_hash.compute_hashes(batch))
    segments = np.flatnonzero(checksums.row_counts)
    hash_sums = checksums.hash_sums[segments]
    high_halves, low_halves = (
        (hash_sums >> np.uint64(32)).view(np.int64),
        (hash_sums & np.uint64(2**32 - 1)).view(np.int64),
    )
    columns = (segments, checksums.row_counts[segments], high_halves, low_halves)
    yield pa.RecordBatch.from_arrays([pa.array(column) for column in columns], schema=CHECKSUM_SCHEMA)


def add_task_checksums(sums: pa.Table) -> Checksums:
    """Add up what `sum_hashes` has computed in several tasks."""
    segments, row_counts, high_halves, low_halves = (np.asarray(sums[name]) for name in CHECKSUM_SCHEMA.names)
    checksums = Checksums()
    checksums.add_sums(
        segments,
        row_counts,
        (high_halves.astype(np.uint64) << np.uint64(32)) + low_halves.astype(np.uint64),
    )
    return checksums


def select_segment_rows(replica: DataFrame, segments: SegmentSelection) -> DataFrame:
    """Select the rows of a replica that are in the chosen segments."""

    def select_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return map(segments.select, batches)

    numbered_rows = number_columns(replica)
    return numbered_rows.mapInArrow(select_rows, numbered_rows.schema).toDF(*replica.columns)
