"""Parquet files of a local lake written where the rows are: Arrow batches -> files of a Delta table.

In a local lake rows that no Spark expression has to see need not become JVM rows: the executor that made them
writes them, and the driver commits the files (`LocalRecords.commit`). What an executor writes and then fails
is never committed; VACUUM removes it. For executors: nothing here needs pgsieve's configuration.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

#: What is known of a written file, as Arrow and as Spark's DDL.
WRITTEN = pa.schema({"path": pa.string(), "size": pa.int64(), "stats": pa.string(), "tally": pa.string()})
WRITTEN_DDL = "path string, size bigint, stats string, tally string"

_ROW_GROUP = 128 * 1024
_FILE_BYTES = 256 * 1024 * 1024

Tally = dict[str, Any]


def write_files(
    folder: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    count: Callable[[pa.RecordBatch, Tally], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Write batches into new files of a table's folder; yields one row (`WRITTEN`) a file.

    `count` adds what it wants to know of each batch to the file's tally, a JSON object.
    """
    remaining = iter(batches)
    first = next(remaining, None)
    while first is not None:
        name = f"part-{uuid.uuid4()}.parquet"
        path, tally, written = Path(folder, name), Tally(), 0
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, schema, compression="snappy") as writer:
            while first is not None and written < _FILE_BYTES:
                if count:
                    count(first, tally)
                # From Spark fields may come as never NULL, which the table's are not.
                writer.write_table(pa.Table.from_batches([first]).cast(schema), row_group_size=_ROW_GROUP)
                written += first.nbytes
                first = next(remaining, None)
        row = {
            "path": name,
            "size": path.stat().st_size,
            "stats": json.dumps(_statistics(pq.read_metadata(path))),
            "tally": json.dumps(tally),
        }
        yield pa.RecordBatch.from_pylist([row], WRITTEN)


def _statistics(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Delta's statistics of a file: its rows, and the bounds of top-level integer columns."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    least, greatest = {}, {}
    for i in range(metadata.num_columns):
        column = metadata.schema.column(i)
        found = [group.column(i).statistics for group in groups]
        if (
            column.path == column.name
            and column.physical_type in {"INT32", "INT64"}
            and column.logical_type.type in {"NONE", "INT"}
            and all(s is not None and s.has_min_max for s in found)
            and found
        ):
            least[column.name] = min(s.min for s in found)
            greatest[column.name] = max(s.max for s in found)
    return {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest}
