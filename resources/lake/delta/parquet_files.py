"""Writes Arrow batches into Parquet files of a Delta table, in the process that has the rows.

If delta-rs reaches the lake, rows that need no Spark expression need not become rows of the JVM. The executor
that made the rows writes the files, and the driver commits them (`Commits.commit`). If an executor fails, its
files are not committed, and VACUUM removes them. Executors run this module, so it needs no configuration.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pgsieve.resources.lake.delta.layout import FILE_BYTES
from pgsieve.resources.lake.stores.store import Store, join_path

#: The columns of the rows that describe written files, as Arrow and as Spark's DDL. A row without a `path` is not
#: about a file: its `tally` has the counts of a part.
FILE_SCHEMA = pa.schema({"path": pa.string(), "size": pa.int64(), "stats": pa.string(), "tally": pa.string()})
FILE_DDL = "path string, size bigint, stats string, tally string"

#: The number of rows in a row group. Several cores can decode the row groups of a file, but each group takes
#: requests to an object store.
ROW_GROUP = 128 * 1024
#: Zstandard's level. At level 1 files have half the size of Snappy's. Higher levels take longer, and gain
#: little.
COMPRESSION_LEVEL = 1
#: The largest size of a row group, roughly; a row group is in memory until it is written.
_GROUP_BYTES = 16 * 1024 * 1024

_FOLDER = Store()

#: How many of the first columns have statistics, as by Delta's default. Integers always have them, at little
#: cost.
_INDEXED_COLUMNS = 32
#: The length up to which texts are bounds; a UUID has 36 characters.
_MAX_BOUND_CHARACTERS = 64
#: Enough for Delta's decimals, which have at most 38 digits.
_DECIMAL_CONTEXT = Context(prec=76)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the zone is written separately


def write_files(
    folder: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    store: Store = _FOLDER,
    size: int = FILE_BYTES,
    encodings: Mapping[str, str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Write batches into new files of a table's folder; yield one row (`FILE_SCHEMA`) per file.

    A file with `size` bytes or more gets no further row group. `encodings` are Parquet's encodings of columns
    without a dictionary, by default plain. Raises OSError.
    """
    remaining = _row_groups(batches, min(_GROUP_BYTES, size))
    group = next(remaining, None)
    while group is not None:
        name = f"part-{uuid.uuid4()}.parquet"
        files, path = store.system(join_path(folder, name))
        files.create_dir(path.rpartition("/")[0])
        with (
            files.open_output_stream(path) as stream,
            pq.ParquetWriter(
                stream,
                schema,
                compression="zstd",
                compression_level=COMPRESSION_LEVEL,
                use_dictionary=_dictionary_columns(schema),
                column_encoding=encodings,
                write_statistics=_columns_with_bounds(schema),
            ) as writer,
        ):
            # A file gets at least one row group, however small `size` is.
            while group is not None:
                # Spark may declare fields as not nullable, but the table's fields are nullable.
                writer.write_table(pa.Table.from_batches(group).cast(schema), row_group_size=ROW_GROUP)
                group = next(remaining, None)
                if stream.tell() >= size:
                    break
            writer.close()
            # A store would need two requests for the size later, one of them for a folder of this name.
            file_bytes = stream.tell()
        # After a failed write, a metadata_collector would raise its own error, and hide the first one.
        footer: pq.FileMetaData = writer.writer.metadata
        row = {"path": name, "size": file_bytes, "stats": _statistics(footer)}
        yield pa.RecordBatch.from_pylist([row], FILE_SCHEMA)


def _row_groups(batches: Iterable[pa.RecordBatch], max_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """Group batches into row groups."""
    group, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        # A row group without rows has no bounds, and its file would have none.
        if not batch.num_rows:
            continue
        if group and rows + batch.num_rows > ROW_GROUP:
            yield group
            group, rows, size = [], 0, 0
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= max_bytes:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


def _columns_with_bounds(schema: pa.Schema) -> list[str] | bool:
    """The Parquet columns with bounds in row groups, by their paths; True means all.

    Floating-point numbers have no bounds: Parquet's bounds ignore NaN, which Spark and PostgreSQL order after
    every number.
    """
    columns = _columns(schema)
    bounded = [path for path, kind in columns if not pa.types.is_floating(kind)]
    return True if len(bounded) == len(columns) else bounded


def _dictionary_columns(schema: pa.Schema) -> list[str]:
    """The Parquet columns that are written with a dictionary of their values, by their paths."""
    return [path for path, kind in _columns(schema) if has_dictionary(kind)]


def has_dictionary(kind: pa.DataType) -> bool:
    """Whether values of a type are written with a dictionary: only texts are.

    With a dictionary, numbers and times would take longer to write, and more space.
    """
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _columns(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    return [leaf for field in schema for leaf in leaves(field.name, field.type)]


def leaves(path: str, kind: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The Parquet columns of one column, as paths with types."""
    if pa.types.is_struct(kind):
        for field in kind:
            yield from leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from leaves(f"{path}.list.element", kind.value_type)
    else:
        yield path, kind


def _statistics(metadata: pq.FileMetaData) -> str:
    """Delta's statistics of a file, as JSON: the number of rows, and for top-level columns NULLs and exact bounds.

    Long texts have no bounds, because a truncated bound would not be exact.
    """
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    least, greatest, nulls = dict[str, str](), dict[str, str](), dict[str, str]()
    for i in range(metadata.num_columns):
        column = metadata.schema.column(i)
        statistics = [group.column(i).statistics for group in groups]
        if column.path != column.name or not groups or any(s is None for s in statistics):
            continue
        if i < _INDEXED_COLUMNS and all(s.has_null_count for s in statistics):
            nulls[column.name] = str(sum(s.null_count for s in statistics))
        if (read := _bound(column, i)) is None or not all(s.has_min_max for s in statistics):
            continue
        low, high = [read(s.min_raw) for s in statistics], [read(s.max_raw) for s in statistics]
        if None not in (*low, *high):
            least[column.name], greatest[column.name] = _json(min(low)), _json(max(high))
    return _json_object(
        {
            "numRecords": str(metadata.num_rows),
            "minValues": _json_object(least),
            "maxValues": _json_object(greatest),
            "nullCount": _json_object(nulls),
        }
    )


def _json(value: Any) -> str:
    """A value in JSON, with all digits of a decimal."""
    return f"{value:f}" if isinstance(value, Decimal) else json.dumps(value)


def _json_object(members: Mapping[str, str]) -> str:
    """A JSON object, from values that are JSON already."""
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members.items()) + "}"


def _bound(column: pq.ColumnSchema, place: int) -> Callable[[Any], Any] | None:
    """The function that converts a column's bounds into comparable values; None for a column without bounds.

    The function returns None for a bound that Delta cannot represent exactly.
    """
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
    if logical == "DECIMAL" and physical == "FIXED_LEN_BYTE_ARRAY":
        return partial(_decimal, scale=column.scale)
    if logical == "STRING":
        return _text
    return _date if logical == "DATE" else None


def _decimal(raw: bytes, scale: int) -> Decimal:
    return Decimal(int.from_bytes(raw, "big", signed=True)).scaleb(-scale, _DECIMAL_CONTEXT)


def _text(raw: bytes) -> str | None:
    text = raw.decode()
    return text if len(text) <= _MAX_BOUND_CHARACTERS else None


def _date(days: int) -> str | None:
    try:
        return (_EPOCH + timedelta(days)).date().isoformat()
    except OverflowError:  # Before the year 1, or after 9999; not every reader of statistics accepts these.
        return None


def _local_time(microseconds: int) -> str | None:
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds")
    except OverflowError:
        return None


def _instant(microseconds: int) -> str | None:
    local = _local_time(microseconds)
    return None if local is None else f"{local}Z"
