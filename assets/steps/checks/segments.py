"""Opens the living rows of a replica, and computes the checksums of its segments.

A segment consists of the rows with hashes that end with the same bits. Its checksums are the number of these rows and
the sum of their hashes. Tasks hash their rows batch by batch (`pgsieve.decoding.checksums.segments`), and send only the
checksums to the driver.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.metadata_columns import keep_living_rows
from pgsieve.decoding.checksums.segments import Checksums, RowHash
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource
from pgsieve.resources.lake.table_rows import open_rows

#: A sum of 64-bit hashes is divided into two halves, since the columns of Delta and Spark have no unsigned numbers.
CHECKSUM_SCHEMA = pa.schema(dict.fromkeys(("segment", "rows", "high", "low"), pa.int64()))


def open_living_rows(
    lake: Lake, path: str, version: int, schema: pa.Schema, deleted_column: str | None
) -> RowSource[pa.RecordBatch]:
    """The rows of a replica that are not deleted, in the columns and types of a schema.

    If the replica keeps deleted rows, the column `deleted_column` marks them.
    """
    read_schema = schema if deleted_column is None else schema.append(pa.field(deleted_column, pa.bool_()))
    keep_rows = partial(keep_living_rows, schema=schema, deleted_column=deleted_column)
    return open_rows(lake, path, read_schema, keep_rows, version, has_few_parts=True)


def compute_checksums(rows: RowSource[pa.RecordBatch], row_hash: RowHash) -> Checksums:
    """Let executors compute the checksums of the segments of some rows."""
    return _add_task_checksums(rows.compute(partial(sum_hashes, row_hash), CHECKSUM_SCHEMA))


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


def _add_task_checksums(sums: pa.Table) -> Checksums:
    """Add up what `sum_hashes` has computed in several tasks."""
    segments, row_counts, high_halves, low_halves = (np.asarray(sums[name]) for name in CHECKSUM_SCHEMA.names)
    checksums = Checksums()
    checksums.add_sums(
        segments,
        row_counts,
        (high_halves.astype(np.uint64) << np.uint64(32)) + low_halves.astype(np.uint64),
    )
    return checksums
