"""Parquet files of a lake written where the rows are: Arrow batches -> files of a Delta table.

Where delta-rs reaches the lake, rows that no Spark expression has to see need not become JVM rows: the executor that made them
writes them, and the driver commits the files (`LocalRecords.commit`). What an executor writes and then fails
is never committed; VACUUM removes it. For executors: nothing here needs pgsieve's configuration.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pgsieve.resources.lake.delta.layout import FILE_BYTES
from pgsieve.resources.lake.stores.store import Store, joined

#: What is known of a written file, as Arrow and as Spark's DDL.
WRITTEN = pa.schema({"path": pa.string(), "size": pa.int64(), "stats": pa.string(), "tally": pa.string()})
WRITTEN_DDL = "path string, size bigint, stats string, tally string"

_FOLDER = Store()
_ROW_GROUP = 128 * 1024

#: Delta's default: so many columns have statistics, but for integers, which cost nearly nothing.
_INDEXED_COLUMNS = 32
#: Texts up to this length are bounds as they are: a UUID has 36 characters.
_TEXT_CHARACTERS = 64
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the zone is told beside

Tally = dict[str, Any]


def write_files(
    folder: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    count: Callable[[pa.RecordBatch, Tally], None] | None = None,
    store: Store = _FOLDER,
    size: int = FILE_BYTES,
) -> Iterator[pa.RecordBatch]:
    """Write batches into new files of a table's folder; yields one row (`WRITTEN`) a file.

    A file that has `size` bytes gets no further batch. `count` adds what it wants to know of each batch to the file's tally, a
    JSON object. Raises OSError.
    """
    remaining = iter(batches)
    first = next(remaining, None)
    while first is not None:
        name = f"part-{uuid.uuid4()}.parquet"
        files, path = store.system(joined(folder, name))
        files.create_dir(path.rpartition("/")[0])
        tally = Tally()
        with (
            files.open_output_stream(path) as stream,
            pq.ParquetWriter(stream, schema, compression="snappy") as writer,
        ):
            while first is not None and stream.tell() < size:
                if count:
                    count(first, tally)
                # From Spark fields may come as never NULL, which the table's are not.
                writer.write_table(pa.Table.from_batches([first]).cast(schema), row_group_size=_ROW_GROUP)
                first = next(remaining, None)
        # Not by a metadata_collector: where a write fails, it asks for what is not there, and hides the error.
        footer: pq.FileMetaData = writer.writer.metadata
        row = {
            "path": name,
            "size": files.get_file_info(path).size,
            "stats": json.dumps(_statistics(footer)),
            "tally": json.dumps(tally),
        }
        yield pa.RecordBatch.from_pylist([row], WRITTEN)


def _statistics(metadata: pq.FileMetaData) -> dict[str, Any]:
    """Delta's statistics of a file: its rows, and the bounds of those top-level columns that can be told exactly.

    A bound that is cut would have to stay one for every reader; so long texts have none.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    least, greatest = {}, {}
    for i in range(metadata.num_columns):
        column = metadata.schema.column(i)
        bounded = [group.column(i).statistics for group in groups]
        if (
            column.path != column.name
            or (read := _bound(column, i)) is None
            or not bounded
            or not all(s is not None and s.has_min_max for s in bounded)
        ):
            continue
        bounds = read(min(s.min_raw for s in bounded)), read(max(s.max_raw for s in bounded))
        if None not in bounds:
            least[column.name], greatest[column.name] = bounds
    return {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest}


def _bound(column: pq.ColumnSchema, place: int) -> Callable[[Any], int | str | None] | None:
    """How Delta writes a bound of a column, which may be None for one; None for a column without statistics."""
    logical, physical = column.logical_type.type, column.physical_type
    if physical in {"INT32", "INT64"} and logical in {"NONE", "INT"}:
        return int
    if place >= _INDEXED_COLUMNS:
        return None
    if logical == "TIMESTAMP":
        unit = json.loads(column.logical_type.to_json())
        if unit["timeUnit"] != "microseconds":
            return None
        return _instant if unit["isAdjustedToUTC"] else _local_time
    if logical == "STRING":
        return _text
    return _date if logical == "DATE" else None


def _text(raw: bytes) -> str | None:
    text = raw.decode()
    return text if len(text) <= _TEXT_CHARACTERS else None


def _date(days: int) -> str | None:
    try:
        return (_EPOCH + timedelta(days)).date().isoformat()
    except OverflowError:  # Before the year 1, or after 9999, which not every reader of statistics takes.
        return None


def _local_time(microseconds: int) -> str | None:
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds")
    except OverflowError:
        return None


def _instant(microseconds: int) -> str | None:
    local = _local_time(microseconds)
    return None if local is None else f"{local}Z"
