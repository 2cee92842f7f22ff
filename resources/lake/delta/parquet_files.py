"""Writes Arrow batches into Parquet files of a Delta table, in the process that has the rows.

If delta-rs can reach the lake, and the rows need no expression of Spark, they do not pass through the JVM. The executor
that has made the rows writes them into files, and the driver commits these files (`Commits.commit`). If an executor
fails, its files are not committed, and VACUUM removes them later. Executors have no configuration of pgsieve, so the
functions get all that they need as arguments.

In: the folder of a table, its schema, and batches of rows.
Out: files, and a row for each file that describes it (`FILE_SCHEMA`).
"""

import inspect
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Context, Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pgsieve.resources.lake.delta.layout import DEFAULT_FILE_BYTES
from pgsieve.resources.lake.stores.store import Store, join_path

#: The columns of the rows that describe files, as an Arrow schema and as Spark's DDL. A row without a `path` describes
#: no file: it has the counts of a task, as JSON in `tally`.
FILE_SCHEMA = pa.schema({"path": pa.string(), "size": pa.int64(), "stats": pa.string(), "tally": pa.string()})
FILE_DDL = "path string, size bigint, stats string, tally string"

#: The number of rows in a row group. Several cores can decode the row groups of a file at the same time; but on an
#: object store each row group takes more requests.
ROW_GROUP_ROWS = 128 * 1024
#: A page has all rows of a row group, up to a megabyte. By default pyarrow divides columns into pages of 20,000 rows. Then
#: files take a tenth longer to write, and are a quarter larger. Older versions of pyarrow do not limit the rows.
_PAGE_OPTIONS = (
    {"max_rows_per_page": ROW_GROUP_ROWS}
    if "max_rows_per_page" in inspect.signature(pq.write_table).parameters
    else {}
)
#: The compression level of Zstandard. At level 1 files have half the size of files that are compressed with
#: Snappy. Higher levels take longer, and make files only a little smaller.
COMPRESSION_LEVEL = 1
#: About the largest size of a row group in bytes. A row group is in memory until it is written.
_GROUP_BYTES = 16 * 1024 * 1024

_LOCAL_STORE = Store()

#: Only this many columns, the first ones, have statistics: bounds, and the number of NULLs. That is Delta's default.
#: Columns of integers after these have bounds, too, because such bounds cost little.
_INDEXED_COLUMNS = 32
#: This many values of a text column are sampled. If more than this share of them are distinct, the column gets no
#: dictionary. A sample of a column with 100,000 distinct values has about five repetitions.
_SAMPLED_VALUES, _MAX_DISTINCT_SHARE = 1000, 0.995
#: Longer texts are not used as bounds. A UUID has 36 characters.
_MAX_BOUND_CHARACTERS = 64
#: The number of digits is enough for decimals of Delta, which have at most 38 digits.
_DECIMAL_CONTEXT = Context(prec=76)
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - the zone is written separately


def write_files(
    folder: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    store: Store = _LOCAL_STORE,
    target_bytes: int = DEFAULT_FILE_BYTES,
    encodings: Mapping[str, str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Write batches into new files in the folder of a table. Yield one row (`FILE_SCHEMA`) per file.

    Once a file has `target_bytes` bytes, it gets no further row group. `encodings` maps columns that have no dictionary to
    encodings of Parquet; by default the encoding is plain. Raises OSError.
    """
    remaining_groups = _divide_into_row_groups(batches, min(_GROUP_BYTES, target_bytes))
    group = next(remaining_groups, None)
    while group is not None:
        name = make_file_name()
        stored_schema = store.stored_schema(join_path(folder, name), schema)
        file_system, path = store.find_file_system(join_path(folder, name))
        file_system.create_dir(path.rpartition("/")[0])
        with (
            file_system.open_output_stream(path) as stream,
            open_writer(stream, stored_schema, group, encodings) as writer,
        ):
            # A file gets at least one row group, however small `target_bytes` is.
            while group is not None:
                # Spark may declare fields as not nullable, but the table's fields are nullable.
                rows = pa.Table.from_batches(group).cast(schema)
                stored_rows = pa.Table.from_arrays(rows.columns, schema=stored_schema)
                writer.write_table(stored_rows, row_group_size=ROW_GROUP_ROWS)
                group = next(remaining_groups, None)
                if stream.tell() >= target_bytes:
                    break
            writer.close()
            # The stream knows the size. To ask an object store for it would take two requests.
            file_bytes = stream.tell()
        # A metadata_collector would have the footer, too. But after a failed write it raises an error of its own, which
        # would hide the error of the write.
        yield describe_file(name, file_bytes, writer.writer.metadata)


def make_file_name() -> str:
    """A name for a new file, which no other file has."""
    return f"part-{uuid.uuid4()}.parquet"


def open_writer(
    stream: pa.NativeFile,
    schema: pa.Schema,
    group: Sequence[pa.RecordBatch],
    encodings: Mapping[str, str] | None,
) -> pq.ParquetWriter:
    """Open a writer of Parquet. `group` is the first row group, from which it is decided which columns get a dictionary."""
    return pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        compression_level=COMPRESSION_LEVEL,
        use_dictionary=_find_dictionary_columns(schema, group),
        column_encoding=encodings,
        write_statistics=_find_columns_with_bounds(schema),
        **_PAGE_OPTIONS,
    )


def describe_file(name: str, size: int, footer: pq.FileMetaData) -> pa.RecordBatch:
    """Describe a new file by a row (`FILE_SCHEMA`)."""
    row = {"path": name, "size": size, "stats": _format_statistics(footer)}
    return pa.RecordBatch.from_pylist([row], FILE_SCHEMA)


def _divide_into_row_groups(
    batches: Iterable[pa.RecordBatch], max_bytes: int
) -> Iterator[list[pa.RecordBatch]]:
    """Gather batches into row groups. Each result is the list of the batches of one row group."""
    group, row_count, group_bytes = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        # Leave out batches without rows. A row group without rows has no bounds, and then the whole file would have none.
        if not batch.num_rows:
            continue
        if group and row_count + batch.num_rows > ROW_GROUP_ROWS:
            yield group
            group, row_count, group_bytes = [], 0, 0
        group.append(batch)
        row_count, group_bytes = row_count + batch.num_rows, group_bytes + batch.nbytes
        if group_bytes >= max_bytes:
            yield group
            group, row_count, group_bytes = [], 0, 0
    if group:
        yield group


def _find_columns_with_bounds(schema: pa.Schema) -> list[str] | bool:
    """The Parquet columns, as paths, that have bounds in row groups. True stands for all columns.

    Floating-point numbers have no bounds. The bounds of Parquet ignore NaN, but Spark and PostgreSQL order NaN
    after every number.
    """
    columns = _list_columns(schema)
    bounded_columns = [path for path, data_type in columns if not pa.types.is_floating(data_type)]
    return True if len(bounded_columns) == len(columns) else bounded_columns


def _find_dictionary_columns(schema: pa.Schema, group: Sequence[pa.RecordBatch]) -> list[str]:
    """The Parquet columns, as paths, that are written with a dictionary of their values. `group` is the first row group.

    Nearly every value of a text column may be distinct. Then a dictionary would have all values and save nothing, so
    the column gets none.
    """
    largest_batch = max(group, key=lambda batch: batch.num_rows)
    step = -(-largest_batch.num_rows // _SAMPLED_VALUES)
    sampled_rows = pa.array(range(0, largest_batch.num_rows, step), pa.int64())
    paths = list[str]()
    for stored_field, values in zip(schema, largest_batch.columns, strict=True):
        text_paths = [
            path
            for path, data_type in list_leaf_columns(stored_field.name, stored_field.type)
            if has_dictionary(data_type)
        ]
        # A nested column always keeps its dictionary: values may repeat within one row.
        if text_paths == [stored_field.name]:
            sample = values.take(sampled_rows)
            if len(sample.unique()) > _MAX_DISTINCT_SHARE * len(sample):
                continue
        paths += text_paths
    return paths


def has_dictionary(data_type: pa.DataType) -> bool:
    """True if a column of this type may get a dictionary. Only texts may.

    Numbers and times would take longer to write with a dictionary, and need more space.
    """
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def _list_columns(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    """All Parquet columns of a schema, as pairs of a path and a type."""
    return [leaf for field in schema for leaf in list_leaf_columns(field.name, field.type)]


def list_leaf_columns(path: str, data_type: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The Parquet columns of one column, as pairs of a path and a type."""
    if pa.types.is_struct(data_type):
        for field in data_type:
            yield from list_leaf_columns(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(data_type) or pa.types.is_large_list(data_type):
        yield from list_leaf_columns(f"{path}.list.element", data_type.value_type)
    else:
        yield path, data_type


def _format_statistics(footer: pq.FileMetaData) -> str:
    """Delta's statistics of a file, as JSON.

    They are the number of rows and, for columns that are not nested, the number of NULLs and exact bounds. Long
    texts have no bounds, because their bounds would have to be truncated.
    """
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    min_values, max_values, null_counts = dict[str, str](), dict[str, str](), dict[str, str]()
    for column_index in range(footer.num_columns):
        column = footer.schema.column(column_index)
        group_statistics = [group.column(column_index).statistics for group in groups]
        if (
            column.path != column.name
            or not groups
            or any(statistics is None for statistics in group_statistics)
        ):
            continue
        if column_index < _INDEXED_COLUMNS and all(
            statistics.has_null_count for statistics in group_statistics
        ):
            null_counts[column.name] = str(sum(statistics.null_count for statistics in group_statistics))
        if (convert_bound := _find_bound_converter(column, column_index)) is None or not all(
            statistics.has_min_max for statistics in group_statistics
        ):
            continue
        lower_bounds, upper_bounds = (
            [convert_bound(statistics.min_raw) for statistics in group_statistics],
            [convert_bound(statistics.max_raw) for statistics in group_statistics],
        )
        if None not in (*lower_bounds, *upper_bounds):
            min_values[column.name], max_values[column.name] = (
                _to_json(min(lower_bounds)),
                _to_json(max(upper_bounds)),
            )
    return _to_json_object(
        {
            "numRecords": str(footer.num_rows),
            "minValues": _to_json_object(min_values),
            "maxValues": _to_json_object(max_values),
            "nullCount": _to_json_object(null_counts),
        }
    )


def _to_json(value: Any) -> str:
    """A value as JSON. A decimal has all its digits."""
    return f"{value:f}" if isinstance(value, Decimal) else json.dumps(value)


def _to_json_object(members: Mapping[str, str]) -> str:
    """A JSON object. `members` maps names to values that are JSON already."""
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members.items()) + "}"


def _find_bound_converter(column: pq.ColumnSchema, column_index: int) -> Callable[[Any], Any] | None:
    """A function that converts the bounds of a column into values that can be compared. None for a column without bounds.

    The function returns None for a bound that Delta cannot represent exactly.
    """
    logical_type, physical_type = column.logical_type.type, column.physical_type
    if physical_type in {"INT32", "INT64"} and logical_type in {"NONE", "INT"}:
        return int
    if column_index >= _INDEXED_COLUMNS:
        return None
    if logical_type == "TIMESTAMP":
        timestamp_type = json.loads(column.logical_type.to_json())
        if timestamp_type["timeUnit"] != "microseconds":
            return None
        return _to_instant if timestamp_type["isAdjustedToUTC"] else _to_local_time
    if logical_type == "DECIMAL" and physical_type == "FIXED_LEN_BYTE_ARRAY":
        return partial(_to_decimal, scale=column.scale)
    if logical_type == "STRING":
        return _to_text
    return _to_date if logical_type == "DATE" else None


def _to_decimal(stored_bytes: bytes, scale: int) -> Decimal:
    return Decimal(int.from_bytes(stored_bytes, "big", signed=True)).scaleb(-scale, _DECIMAL_CONTEXT)


def _to_text(stored_bytes: bytes) -> str | None:
    text = stored_bytes.decode()
    return text if len(text) <= _MAX_BOUND_CHARACTERS else None


def _to_date(days: int) -> str | None:
    try:
        return (_EPOCH + timedelta(days)).date().isoformat()
    except (
        OverflowError
    ):  # The date is before year 1 or after year 9999. Not every reader of statistics accepts it.
        return None


def _to_local_time(microseconds: int) -> str | None:
    try:
        return (_EPOCH + timedelta(microseconds=microseconds)).isoformat(timespec="microseconds")
    except OverflowError:
        return None


def _to_instant(microseconds: int) -> str | None:
    local_time = _to_local_time(microseconds)
    return None if local_time is None else f"{local_time}Z"
