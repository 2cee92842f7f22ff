"""Prints the rows of a replica on stdout, as CSV or as JSON.

In: batches of rows (Arrow)
Out: CSV with a header line, or one JSON object for each row. Integers, booleans, and in JSON floating-point numbers,
     are written as the format has them. An array becomes a text that contains JSON. Any other value becomes the text
     that PostgreSQL prints.

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


def print_rows(batches: Iterator[pa.RecordBatch], schema: pa.Schema, *, as_json: bool) -> None:
    """Print rows on stdout: as CSV with a header line, or as one JSON object for each row."""
    if as_json:
        for batch in batches:
            columns = [_list_cells(column) for column in batch.columns]
            for row in zip(*columns, strict=True):
                sys.stdout.write(_dump_json(dict(zip(schema.names, row, strict=True))) + "\n")
        return
    schema_to_print = pa.schema(
        [
            (name, _choose_printed_type(column_type))
            for name, column_type in zip(schema.names, schema.types, strict=True)
        ]
    )
    with pacsv.CSVWriter(sys.stdout.buffer, schema_to_print) as writer:
        for batch in batches:
            columns = [_convert_column(column) for column in batch.columns]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema_to_print))


def _choose_printed_type(column_type: pa.DataType) -> pa.DataType:
    """The type in which CSV has a column. Integers and booleans keep their type, and all other types become text."""
    is_kept = pa.types.is_integer(column_type) or pa.types.is_boolean(column_type)
    return column_type if is_kept else pa.string()


def _convert_column(column: pa.Array) -> pa.Array:
    """Convert a column to the type in which CSV has it: nested values to JSON, all others to PostgreSQL's text."""
    if column.type.equals(_choose_printed_type(column.type)):
        return column
    if pa.types.is_nested(column.type):
        return pa.array(_list_cells(column), pa.string())
    return _print_texts(column)


def _print_texts(column: pa.Array) -> pa.Array:
    """The values as PostgreSQL prints them."""
    checks = (pa.types.is_large_binary, pa.types.is_binary_view)
    needs_cast = any(check(column.type) for check in checks)
    return print_values(column.cast(pa.binary()) if needs_cast else column)


def _list_cells(column: pa.Array) -> list[Any]:
    """The values of a column as JSON has them. A nested value is a text, which is JSON itself."""
    values = _list_values(column)
    if not pa.types.is_nested(column.type):
        return values
    return [None if value is None else _dump_json(value) for value in values]


def _list_values(column: pa.Array) -> list[Any]:
    """The values of a column as Python's numbers, booleans and lists. Values of other types are PostgreSQL's texts."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        elements = iter(_list_values(column.flatten()))
        lengths = pc.list_value_length(column).to_pylist()
        return [None if length is None else [next(elements) for _ in range(length)] for length in lengths]
    if pa.types.is_float32(column.type):
        # Python would print the nearest double, which has more digits.
        return [
            None if text is None else _replace_nonfinite(float(text))
            for text in _print_texts(column).to_pylist()
        ]
    if pa.types.is_floating(column.type):
        return [_replace_nonfinite(value) for value in column.to_pylist()]
    if pa.types.is_nested(column.type) or _choose_printed_type(column.type).equals(column.type):
        values: list[Any] = column.to_pylist()
        return values
    texts: list[Any] = _print_texts(column).to_pylist()
    return texts


def _replace_nonfinite(value: float | None) -> float | str | None:
    """Return the number. NaN and the infinities, which JSON does not have, become the words that PostgreSQL prints."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _dump_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
