"""Decodes pgoutput's messages into changes.

In: Arrow batches of messages that all have one relation version (one description of the relation's columns). Out: Arrow
batches of changes, with the columns `CHANGE_COLUMNS`. Raises ValueNotRepresentableError for a value that the type of its
column in the replica cannot represent. The error has the key of the row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.columns import CHANGE_COLUMNS, ROW_OPERATIONS, repeat_value
from pgsieve.decoding.errors import ValueNotRepresentableError
from pgsieve.decoding.protocol.tuples import RelationColumns, decode_changes
from pgsieve.decoding.values.replica_output import list_texts

_LETTERS = pa.array(["I", "U", "D"])
_OPERATIONS = pa.array(ROW_OPERATIONS)


@dataclass(frozen=True)
class AddedColumn:
    """A column that was added after a relation version, and its value in the rows of this version.

    `value` is an array with this one value, and `spark_type` is the column's Spark type.
    """

    name: str
    spark_type: str
    value: pa.Array


@dataclass(frozen=True)
class FilterColumns:
    """The columns that row filters read, in the default types of `values.types`.

    The user may have chosen other types for the replica. Objects of this class are the keys of a cache of decoded
    messages, so they must be hashable. But `columns` and `added` can contain values that are not hashable. So these two
    fields are compared, but not hashed. An error names the row by its values of the columns `key`.
    """

    names: frozenset[str]
    columns: RelationColumns = field(hash=False)
    added: Sequence[AddedColumn] = field(default=(), hash=False)
    key: Sequence[str] = field(default=(), compare=False)


def decode_batch(
    batch: pa.RecordBatch,
    columns: RelationColumns,
    names: Collection[str],
    key: Sequence[str],
    added: Sequence[AddedColumn] = (),
) -> pa.RecordBatch:
    """Decode Insert, Update and Delete messages into changes with the columns `names` and `added`.

    A value that was not sent in `new` is taken from `old`, if `old` has it. An error names the row by its values
    of the columns `key`.
    """
    data = batch.column("data")
    try:
        changes = decode_changes(data, columns, old_columns=names, new_columns=names, fill_unsent=True)
    except ValueNotRepresentableError as error:
        raise error.with_key(_decode_key(data.slice(error.value_index, 1), columns, key)) from None
    return pa.RecordBatch.from_arrays(
        [
            *(batch.column(name) for name in CHANGE_COLUMNS[:4]),
            _OPERATIONS.take(pc.index_in(changes.operation, _LETTERS)),
            changes.unchanged,
            _append_columns(changes.old, added, pc.equal(changes.old_kind, "O")),
            _append_columns(changes.new, added, changes.new.is_valid()),
        ],
        names=CHANGE_COLUMNS,
    )


def _append_columns(
    rows: pa.StructArray, added_columns: Sequence[AddedColumn], is_complete: pa.Array
) -> pa.StructArray:
    """Append the added columns. They are NULL in rows that are not complete: in old tuples with only the key."""
    if not added_columns:
        return rows
    values = [
        pc.if_else(is_complete, repeat_value(column.value, len(rows)), pa.scalar(None, column.value.type))
        for column in added_columns
    ]
    fields = [*rows.type, *(pa.field(column.name, column.value.type) for column in added_columns)]
    children = [pc.struct_field(rows, [index]) for index in range(rows.type.num_fields)]
    return pa.StructArray.from_arrays([*children, *values], fields=fields, mask=rows.is_null())


def _decode_key(message: pa.Array, columns: RelationColumns, key: Sequence[str]) -> Mapping[str, str]:
    """Return the texts of the key of one change, by column; empty if the key cannot be converted."""
    with suppress(ValueNotRepresentableError):
        change = decode_changes(message, columns, old_columns=key, new_columns=key)
        rows = change.old if change.old.null_count == 0 else change.new
        if rows.null_count == 0:
            return {
                field.name: list_texts(pc.struct_field(rows, [index]))[0]
                for index, field in enumerate(rows.type)
            }
    return {}
