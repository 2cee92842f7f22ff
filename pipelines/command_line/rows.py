"""Prints the rows of a replica on stdout, as CSV or as JSON.

In: batches of rows (Arrow)
Out: CSV with a header line, or one JSON object for each row

Only `pgsieve read` imports this module. The module imports pyarrow, and that would slow down `pgsieve --help`.
"""

import json
import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.csv as pacsv


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
                sys.stdout.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
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
        values = (
            None if value is None else json.dumps(value, ensure_ascii=False, default=str)
            for value in column.to_pylist()
        )
        return pa.array(values, column_type)
    if (
        pa.types.is_binary(column.type)
        or pa.types.is_large_binary(column.type)
        or pa.types.is_binary_view(column.type)
    ):
        return pa.array(
            [None if value is None else f"\\x{value.hex()}" for value in column.to_pylist()], column_type
        )
    return column.cast(column_type)
