"""Metadata columns: what a replica says of each of its rows beside the table's columns, as ordinary columns of its changes.

In: which metadata (`METADATA`), and changes of one relation version. Out: values for their new rows. Raises nothing.

A row that was copied has the snapshot's LSN and time and no commit; the first change of it replaces all. When it was applied is
known to the apply only, which puts it in (`Stamp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TypeVar

import pyarrow as pa

from pgsieve.decoding.values.types import ColumnType, column_type

_BIGINT, _TEXT, _TIMESTAMPTZ = 20, 25, 1184
#: The metadata that there is, and PostgreSQL's types of it.
METADATA: Mapping[str, int] = MappingProxyType(
    {
        "commit_lsn": _BIGINT,
        "commit_time": _TIMESTAMPTZ,
        "ordinal": _BIGINT,
        "operation": _TEXT,
        "source_table": _TEXT,
        "applied_at": _TIMESTAMPTZ,
        "copy_lsn": _BIGINT,
        "copy_time": _TIMESTAMPTZ,
    }
)
APPLIED_AT = "applied_at"
#: What changes have under the same name.
_OF_CHANGES = frozenset({"commit_lsn", "commit_time", "ordinal", "operation"})


def metadata_type(kind: str) -> ColumnType:
    """The type of a metadata column."""
    return column_type(METADATA[kind], -1)


@dataclass(frozen=True)
class MetadataColumns:
    """The metadata columns of a replica, by their names, and the table or partition of the changes (None: unknown)."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None

    def values(self, name: str, changes: Mapping[str, pa.Array], count: int) -> pa.Array:
        """The values of a column for the new rows of so many changes, which have the columns `changes`."""
        kind = self.kinds[name]
        arrow = metadata_type(kind).arrow
        if kind in _OF_CHANGES:
            return changes[kind].cast(arrow)
        if kind == "source_table" and self.source is not None:
            return pa.repeat(pa.scalar(self.source, arrow), count)
        return pa.nulls(count, arrow)


def copied_as(kind: str, lsn: int, time: str) -> str:
    """The SQL expression of a metadata column in the copy at the snapshot of an LSN and a time (text as PostgreSQL writes it)."""
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
        case _:
            return "null::" + (
                "pg_catalog.timestamptz" if METADATA[kind] == _TIMESTAMPTZ else "pg_catalog.int8"
            )


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


@dataclass(frozen=True)
class Stamp:
    """Puts the time at which rows are applied into the column of that name; None: there is no such column."""

    column: str | None
    time: datetime = field(default_factory=lambda: datetime.now(UTC))

    def of(self, rows: Rows) -> Rows:
        """The rows with the time."""
        if self.column is None:
            return rows
        place = rows.schema.get_field_index(self.column)
        kind = rows.schema.field(place)
        return rows.set_column(place, kind, pa.repeat(pa.scalar(self.time, kind.type), rows.num_rows))
