"""Metadata columns: columns of a replica with data about each row, such as the LSN of its commit.

In: the kinds of metadata that the user chose (`TYPE_OID_BY_KIND`), and changes of one relation version (one description
of the relation's columns). Out: values of the metadata columns for the new rows of changes, and for deleted rows that
the replica retains. Raises nothing.

A copied row has the LSN and the time of its snapshot (`copy_lsn`, `copy_time`), but neither the LSN nor the time of a
commit. The first change of the row sets the LSN and the time of the change's commit, and clears those of the snapshot. The
time at which a row is applied is not known here. The step that applies changes adds it (`Stamp`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.changes.deleted_rows import DELETED
from pgsieve.decoding.values.types import ColumnType, column_type

_BOOLEAN, _BIGINT, _TEXT, _TIMESTAMPTZ = 16, 20, 25, 1184
#: Maps each kind of metadata to the oid of its PostgreSQL type.
TYPE_OID_BY_KIND: Mapping[str, int] = MappingProxyType(
    {
        "commit_lsn": _BIGINT,
        "commit_time": _TIMESTAMPTZ,
        "ordinal": _BIGINT,
        "operation": _TEXT,
        "source_table": _TEXT,
        "applied_at": _TIMESTAMPTZ,
        "copy_lsn": _BIGINT,
        "copy_time": _TIMESTAMPTZ,
        "deleted": _BOOLEAN,
        "filtered": _BOOLEAN,
        "deleted_at": _TIMESTAMPTZ,
    }
)
APPLIED_AT = "applied_at"
#: Metadata columns: pairs of name and kind.
Metadata = Sequence[tuple[str, str]]
#: Values of these kinds come from a column of the changes. It has the same name as the kind.
_CHANGE_KINDS = frozenset({"commit_lsn", "commit_time", "ordinal", "operation"})
#: `deleted` marks deleted rows; `filtered` marks those of them that an UPDATE has moved out of the row filter.
FLAG_KINDS = frozenset({"deleted", "filtered"})
_OLD_ROW_VALUES: Mapping[str, object] = MappingProxyType({"deleted": True, "operation": "delete"})


def metadata_type(kind: str) -> ColumnType:
    """Return the type of the metadata column of this kind."""
    return column_type(TYPE_OID_BY_KIND[kind], -1)


def find_metadata_column(metadata: Metadata, kind: str) -> str | None:
    """Return the name of the column with this kind of metadata, or None if there is none."""
    return next((name for name, column_kind in metadata if column_kind == kind), None)


@dataclass(frozen=True)
class MetadataColumns:
    """The metadata columns of a replica.

    `kinds` maps the name of each column to its kind. `source` is the table or partition of the changes, if known.
    """

    kinds: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None

    def make_values(self, name: str, changes: Mapping[str, pa.Array], count: int) -> pa.Array:
        """Return the values of a metadata column for the new rows of `count` changes.

        `changes` has the columns of the changes, by name.
        """
        kind = self.kinds[name]
        arrow_type = metadata_type(kind).arrow_type
        if kind in _CHANGE_KINDS:
            return changes[kind].cast(arrow_type)
        if kind == "source_table" and self.source is not None:
            return pa.repeat(pa.scalar(self.source, arrow_type), count)
        if kind in FLAG_KINDS:
            return pa.repeat(pa.scalar(False, arrow_type), count)
        return pa.nulls(count, arrow_type)

    def make_old_row_values(
        self, name: str, changes: Mapping[str, pa.Array], original_operations: pa.Array
    ) -> pa.Array:
        """Return the values of a metadata column for the old rows of changes.

        They are NULL unless the replica retains deleted rows. `original_operations` are the operations as the publisher
        sent them, before row filters.
        """
        kind = self.kinds[name]
        match kind:
            case _ if DELETED not in self.kinds.values():
                return pa.nulls(len(original_operations), metadata_type(kind).arrow_type)
            case "deleted" | "operation":
                return pa.repeat(
                    pa.scalar(_OLD_ROW_VALUES[kind], metadata_type(kind).arrow_type), len(original_operations)
                )
            case "deleted_at":
                return changes["commit_time"].cast(metadata_type(kind).arrow_type)
            case "filtered":
                return pc.and_(
                    pc.equal(changes["operation"], "delete"), pc.equal(original_operations, "update")
                )
            case _:
                return self.make_values(name, changes, len(original_operations))


def metadata_schema(metadata: Metadata) -> pa.Schema:
    """Return the Arrow schema of metadata columns."""
    return pa.schema([(name, metadata_type(kind).arrow_type) for name, kind in metadata])


def make_truncate_metadata(truncates: pa.Table, metadata: Metadata) -> pa.Table:
    """Return the metadata for rows that TRUNCATEs delete, with one row per TRUNCATE.

    `truncates` has the columns `commit_lsn`, `ordinal` and `commit_time`.
    """
    values = {
        "deleted_at": truncates["commit_time"],
        "operation": pa.repeat("truncate", truncates.num_rows),
        "deleted": pa.repeat(True, truncates.num_rows),
        "filtered": pa.repeat(False, truncates.num_rows),
        **{name: truncates[name] for name in truncates.column_names},
    }
    schema = metadata_schema(metadata)
    columns = [
        values[kind].cast(schema.field(name).type)
        if kind in values
        else pa.nulls(truncates.num_rows, schema.field(name).type)
        for name, kind in metadata
    ]
    return pa.table(columns, schema)


def make_copy_expression(kind: str, lsn: int, time: str) -> str:
    """Return the SQL expression that a copy selects for a metadata column.

    `lsn` and `time` (a text) are the LSN and the time of the copy's snapshot.
    """
    match kind:
        case "operation":
            return "'copy'::pg_catalog.text"
        case "source_table":
            return "tableoid::pg_catalog.regclass::pg_catalog.text"
        case "copy_lsn":
            return f"{lsn:d}::pg_catalog.int8"
        case "copy_time":
            return f"'{time}'::pg_catalog.timestamptz"
        case "applied_at":
            return "pg_catalog.clock_timestamp()"
        case "deleted" | "filtered":
            return "false"
        case _:
            return "null::" + (
                "pg_catalog.timestamptz" if TYPE_OID_BY_KIND[kind] == _TIMESTAMPTZ else "pg_catalog.int8"
            )


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def keep_living_rows(rows: Rows, schema: pa.Schema, deleted_column: str | None) -> Rows:
    """Return the rows of a replica that are not deleted, in the columns and types of a schema.

    The column named `deleted_column` marks deleted rows. `deleted_column` is None if there is no such column.
    """
    # The cast must come before the filter. DataFusion reads texts as string views, and Arrow cannot filter these.
    typed_rows = rows.select(schema.names).cast(schema)
    return typed_rows if deleted_column is None else typed_rows.filter(mask_living_rows(rows, deleted_column))


def mask_living_rows(
    rows: pa.Table | pa.RecordBatch, deleted_column: str | None
) -> pa.BooleanArray | pa.ChunkedArray:
    """Return the mask of the rows that the column named `deleted_column` does not mark.

    If `deleted_column` is None, the replica has no such column, and the mask is true for all rows.
    """
    if deleted_column is None:
        return pa.repeat(pa.scalar(True), rows.num_rows)
    return pc.invert(pc.fill_null(rows[deleted_column], False))


@dataclass(frozen=True)
class Stamp:
    """Sets the metadata column `applied_at`, the time at which rows are applied, if the replica has this column."""

    column: str | None
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def set_time(self, rows: Rows) -> Rows:
        """Return the rows with the time set."""
        if self.column is None:
            return rows
        index = rows.schema.get_field_index(self.column)
        column_field = rows.schema.field(index)
        return rows.set_column(
            index, column_field, pa.repeat(pa.scalar(self.time, column_field.type), rows.num_rows)
        )
