"""Turns the rows of a copy into changes for the change history (the table of all changes of a replica).

In: the rows of a replica that a copy has filled. Out: a change `snapshot`, after which no earlier row is left, and a
change `copy` for each row. All of these changes have the LSN of the copy's snapshot. They precede all changes that
committed at or after this LSN. Raises Arrow's errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from pgsieve.decoding.changes.columns import repeat_value

#: The operations of a copy. Changes of the publisher never have these operations.
SNAPSHOT, COPY = "snapshot", "copy"
#: The ordinals of these operations. Changes of transactions have ordinals from 0 on, so they follow at the same LSN.
_ORDINAL_BY_OPERATION = {SNAPSHOT: -2, COPY: -1}
#: Two SQL conditions over rows of a change history: the row is a change of the publisher; the row begins a copy.
IS_CHANGE, IS_SNAPSHOT = "ordinal >= 0", f"ordinal = {_ORDINAL_BY_OPERATION[SNAPSHOT]}"


@dataclass(frozen=True)
class CopiedRows:
    """Turns the rows of a copy at an LSN into changes. Spark sends objects of this class to executors.

    `schema` is the schema of the change history. `lsn` and `time` are the LSN and the time of the snapshot.
    """

    lsn: int
    time: datetime | None
    schema: pa.Schema

    def make_snapshot_change(self) -> pa.RecordBatch:
        """Return the change `snapshot`, which precedes the changes of the rows."""
        return self._make_changes(SNAPSHOT, pa.nulls(1, self.schema.field("new").type))

    def to_changes(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the replica as changes."""
        fields = list(self.schema.field("new").type)
        children = [
            rows.column(rows.schema.get_field_index(row_field.name)).cast(row_field.type)
            for row_field in fields
        ]
        return self._make_changes(COPY, pa.StructArray.from_arrays(children, fields=fields))

    def _make_changes(self, operation: str, rows: pa.StructArray) -> pa.RecordBatch:
        values = {
            "slice": self.lsn,
            "commit_lsn": self.lsn,
            "ordinal": _ORDINAL_BY_OPERATION[operation],
            "number": _ORDINAL_BY_OPERATION[operation],
            "commit_time": self.time,
            "operation": operation,
        }
        count = len(rows)
        columns = [
            rows
            if field.name == "new"
            else repeat_value(pa.array([values.get(field.name)], field.type), count)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)
