"""Prints the rows of a replica on stdout, from Arrow batches: as CSV, or as one JSON object a line.

Only `pgsieve read` imports this module: it imports pyarrow, which would slow down `--help`.
"""

import json
import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.csv as pacsv


def print_rows(batches: Iterator[pa.RecordBatch], schema: pa.Schema, *, as_json: bool) -> None:
    """Print rows on stdout: as CSV with a header line, or one JSON object a line."""
    flat = pa.schema(
        [(name, _text_or_number_type(kind)) for name, kind in zip(schema.names, schema.types, strict=True)]
    )
    if as_json:
        for batch in batches:
            for row in _flatten(batch, flat).to_pylist():
                sys.stdout.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        return
    with pacsv.CSVWriter(sys.stdout.buffer, flat) as writer:
        for batch in batches:
            writer.write_batch(_flatten(batch, flat))


def _text_or_number_type(kind: pa.DataType) -> pa.DataType:
    """The type for printing: numbers and booleans as they are, all others as text."""
    plain = pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind)
    return kind if plain else pa.string()


def _flatten(batch: pa.RecordBatch, flat: pa.Schema) -> pa.RecordBatch:
    columns = [_convert(column, kind) for column, kind in zip(batch.columns, flat.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=flat)


def _convert(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type.equals(kind):
        return column
    if pa.types.is_nested(column.type):
        values = (
            None if v is None else json.dumps(v, ensure_ascii=False, default=str) for v in column.to_pylist()
        )
        return pa.array(values, kind)
    if (
        pa.types.is_binary(column.type)
        or pa.types.is_large_binary(column.type)
        or pa.types.is_binary_view(column.type)
    ):
        return pa.array([None if v is None else f"\\x{v.hex()}" for v in column.to_pylist()], kind)
    return column.cast(kind)
