"""The Arrow columns of a change.

A change is (commit_lsn, ordinal, number, commit_time, operation, unchanged, old, new).

- `commit_lsn` and `ordinal` order the changes of a slot. `number` alone gives the row changes of a slice (the changes
  between two positions of the slot) the same order.
- `old` and `new` are structs of the relation's columns. `old` is NULL if the publisher sent no old tuple. `new` is NULL
  for a delete.
- `unchanged` lists the columns of `new` that were not sent because their TOASTed value did not change.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

#: The operations that change one row.
ROW_OPERATIONS = ("insert", "update", "delete")
CHANGE_COLUMNS = ("commit_lsn", "ordinal", "number", "commit_time", "operation", "unchanged", "old", "new")
#: The columns of a change log (the table of a slot's messages) that `decode` reads.
ENCODED_COLUMNS = (*CHANGE_COLUMNS[:4], "data")
#: The two columns for the row before a change and the row after it.
SIDES = ("old", "new")
#: The type of `commit_time`.
COMMIT_TIME = pa.timestamp("us", "UTC")


def changes_schema(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """Return the schema of the changes of a table, for a replica with these columns (name, Arrow type)."""
    row = pa.struct([pa.field(name, arrow_type) for name, arrow_type in columns])
    return pa.schema(
        [
            ("slice", pa.int64()),
            ("commit_lsn", pa.int64()),
            ("ordinal", pa.int64()),
            ("number", pa.int64()),
            ("commit_time", COMMIT_TIME),
            ("operation", pa.string()),
            ("unchanged", pa.list_(pa.string())),
            ("old", row),
            ("new", row),
        ]
    )


def schema_without_slice(schema: pa.Schema) -> pa.Schema:
    """Return a schema of changes without the column `slice`."""
    return pa.schema([field for field in schema if field.name in CHANGE_COLUMNS])


def struct_field(rows: pa.Array | pa.ChunkedArray, name: str) -> pa.Array | pa.ChunkedArray:
    """Return a field of structs.

    The field is looked up by its index. Arrow would take a name that begins with a dot or a bracket for a path.
    """
    return pc.struct_field(rows, [rows.type.get_field_index(name)])


def repeat_value(value: pa.Array, count: int) -> pa.Array:
    """Repeat an array of one value `count` times."""
    return value.take(pa.nulls(count, pa.int64()).fill_null(0))
