"""Prints the rows of a replica on stdout, as CSV or as JSON.

In: batches of rows (Arrow)
Out: CSV with a header line, or one JSON object for each row

Only `pgsieve read` imports this module. The module imports pyarrow, and that would slow down `pgsieve --help`.
"""

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from pgsieve.decoding.values.replica_output import print_values

#: Between these days, counted from 1970, Arrow prints dates and timestamps. It cannot print years from 32768 on.
_ARROW_DAYS = (-30_000 * 365, 30_000 * 365)
#: The days since 1970 that Python knows: those of the years 1 to 9999.
_PYTHON_DAYS = (-719_162, 2_932_897)
#: The types of a replica's timestamps.
_TIMESTAMPS = (pa.timestamp("us"), pa.timestamp("us", "UTC"))
_MICROSECONDS_PER_DAY = 86_400_000_000


def print_rows(batches: Iterator[pa.RecordBatch], schema: pa.Schema, *, as_json: bool) -> None:
    """Print rows on stdout: as CSV with a header line, or as one JSON object for each row."""
    schema_to_print = pa.schema(
        [
            (name, _choose_printed_type(column_type))
            for name, column_type in zip(schema.names, schema.types, strict=True)
        ]
    )
    if as_json:
        for batch in batches:
            for row in _convert_batch(batch, schema_to_print).to_pylist():
                sys.stdout.write(
                    _dump_json({name: _replace_nonfinite(value) for name, value in row.items()}) + "\n"
                )
        return
    with pacsv.CSVWriter(sys.stdout.buffer, schema_to_print) as writer:
        for batch in batches:
            writer.write_batch(_convert_batch(batch, schema_to_print))


def _choose_printed_type(column_type: pa.DataType) -> pa.DataType:
    """The type in which a column is printed. Numbers and booleans keep their type, and all other types become text."""
    is_number = (
        pa.types.is_integer(column_type)
        or pa.types.is_boolean(column_type)
        or pa.types.is_floating(column_type)
    )
    return column_type if is_number else pa.string()


def _convert_batch(batch: pa.RecordBatch, schema_to_print: pa.Schema) -> pa.RecordBatch:
    """Convert the columns of a batch to the types in which they are printed."""
    columns = [
        _convert_column(column, column_type)
        for column, column_type in zip(batch.columns, schema_to_print.types, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema_to_print)


def _convert_column(column: pa.Array, column_type: pa.DataType) -> pa.Array:
    """Convert a column to the type in which it is printed: nested values to JSON, binary values to hexadecimal text."""
    if column.type.equals(column_type):
        return column
    if pa.types.is_nested(column.type):
        values = (None if value is None else _dump_json(value) for value in _list_values(column))
        return pa.array(values, column_type)
    if _is_binary(column.type):
        return pa.array(_list_values(column), column_type)
    if _is_date_or_timestamp(column.type):
        return pc.if_else(_is_between(column, _ARROW_DAYS), column.cast(column_type), print_values(column))
    return column.cast(column_type)


def _list_values(column: pa.Array) -> list[Any]:
    """The values of a column as JSON has them: binary values as hexadecimal text, and words for infinity and NaN."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        elements = iter(_list_values(column.flatten()))
        lengths = pc.list_value_length(column).to_pylist()
        return [None if length is None else [next(elements) for _ in range(length)] for length in lengths]
    if _is_binary(column.type):
        return [None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()]
    if _is_date_or_timestamp(column.type):
        known_values = pc.if_else(_is_between(column, _PYTHON_DAYS), column, None).to_pylist()
        texts = print_values(column).to_pylist()
        return [
            text if known is None else str(known) for known, text in zip(known_values, texts, strict=True)
        ]
    return [_replace_nonfinite(value) for value in column.to_pylist()]


def _is_binary(column_type: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return any(check(column_type) for check in checks)


def _is_date_or_timestamp(column_type: pa.DataType) -> bool:
    return bool(pa.types.is_date32(column_type) or column_type in _TIMESTAMPS)


def _is_between(values: pa.Array, days: tuple[int, int]) -> pa.Array:
    """Whether dates or timestamps are at or after the first day, and before the second."""
    is_date = pa.types.is_date32(values.type)
    numbers = values.cast(pa.int32()).cast(pa.int64()) if is_date else values.cast(pa.int64())
    first, end = (day if is_date else day * _MICROSECONDS_PER_DAY for day in days)
    return pc.and_(pc.greater_equal(numbers, first), pc.less(numbers, end))


def _replace_nonfinite(value: Any) -> Any:
    """Return the value. NaN and the infinities, which JSON does not have, become the words that PostgreSQL prints."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
