"""The Arrow form of a row's change: its columns, its operations, and the structs of its two sides.

A change is (commit_lsn, ordinal, number, commit_time, operation, unchanged, old, new). `old` and `new` are
structs of the relation's columns; `old` is absent if the publisher sent no old tuple, `new` is absent for
a delete. `unchanged` names the columns of `new` that were not sent because their TOASTed value did not
change. Raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

#: Operations that change one row.
ROW_OPERATIONS = ("insert", "update", "delete")
CHANGE_COLUMNS = ("commit_lsn", "ordinal", "number", "commit_time", "operation", "unchanged", "old", "new")
#: The columns of a change log that decoding reads.
ENCODED_COLUMNS = (*CHANGE_COLUMNS[:4], "data")
SIDES = ("old", "new")
#: The type of `commit_time`.
COMMIT_TIME = pa.timestamp("us", "UTC")


def changes_schema(columns: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """The columns of a table's transformed changes as Arrow, for a replica of these columns."""
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


def without_slice(schema: pa.Schema) -> pa.Schema:
    """The columns of a change before its slice is added."""
    return pa.schema([field for field in schema if field.name in CHANGE_COLUMNS])


def field_of(rows: pa.Array | pa.ChunkedArray, name: str) -> pa.Array | pa.ChunkedArray:
    """A field of structs, by its index: Arrow reads a name that begins with a dot or a bracket as a path."""
    return pc.struct_field(rows, [rows.type.get_field_index(name)])


def repeated(value: pa.Array, count: int) -> pa.Array:
    """An array of one value, repeated `count` times."""
    return value.take(pa.nulls(count, pa.int64()).fill_null(0))
