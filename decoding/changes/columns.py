"""The Arrow columns of a change.

A change is (commit_lsn, ordinal, number, commit_time, operation, unchanged, old, new). `old` and `new` are
structs of the relation's columns. `old` is NULL if the publisher sent no old tuple, `new` is NULL for a
delete. `unchanged` lists the columns of `new` that were not sent because their TOASTed value did not change.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

#: Operations that change one row.
ROW_OPERATIONS = ("insert", "update", "delete")
CHANGE_COLUMNS = ("commit_lsn", "ordinal", "number", "commit_time", "operation", "unchanged", "old", "new")
#: The columns of a change log that `decode` reads.
ENCODED_COLUMNS = (*CHANGE_COLUMNS[:4], "data")
SIDES = ("old", "new")
#: The type of `commit_time`.
COMMIT_TIME = pa.timestamp("us", "UTC")


def changes_schema(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """The schema of a table's transformed changes, for a replica with these columns."""
    row = pa.struct([pa.field(name, kind) for name, kind in columns])
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
    """The schema of changes without their slice."""
    return pa.schema([field for field in schema if field.name in CHANGE_COLUMNS])


def struct_field(rows: pa.Array | pa.ChunkedArray, name: str) -> pa.Array | pa.ChunkedArray:
    """A field of structs, looked up by index: Arrow takes a name with a leading dot or bracket for a path."""
    return pc.struct_field(rows, [rows.type.get_field_index(name)])


def repeat_value(value: pa.Array, count: int) -> pa.Array:
    """Repeat an array of one value `count` times."""
    return value.take(pa.nulls(count, pa.int64()).fill_null(0))
