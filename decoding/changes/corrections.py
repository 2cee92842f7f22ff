"""Turns the rows in which a replica differs from the publisher into changes that make the replica equal.

In: rows, and how many more of each the publisher has (`count`). Out: changes, in the columns of a change history. First the
rows that the replica has too often are deleted, and then those that it lacks are inserted. Raises Arrow's errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import Mask
from pgsieve.decoding.changes.columns import repeat_value
from pgsieve.decoding.changes.metadata_columns import Metadata

#: Maps each operation to the slice that has its changes. All DELETEs come before all INSERTs.
SLICE_BY_OPERATION = {"delete": 1, "insert": 2}


@dataclass(frozen=True)
class Corrections:
    """Turns rows into changes. Spark sends objects of this class to executors.

    - `columns`: the names of the columns of the rows, in their order
    - `metadata`: the metadata columns of the replica. All of them are NULL, except those that mark deleted rows.
    - `schema`: the schema of the changes
    - `lsn`, `time`: the LSN and the time at which the publisher has the expected rows
    """

    columns: Sequence[str]
    metadata: Metadata
    schema: pa.Schema
    lsn: int
    time: datetime

    def to_changes(self, rows: pa.RecordBatch, first_number: int) -> pa.RecordBatch:
        """Return the changes for some rows.

        `rows` has the columns c0, c1 and so on, and `count`. The changes are numbered from `first_number` on.
        """
        numbers, counts = np.arange(rows.num_rows), np.asarray(rows.column("count"))
        deleted_rows, inserted_rows = (
            np.repeat(numbers, np.maximum(side_counts, 0)) for side_counts in (-counts, counts)
        )
        changed_rows = rows.take(pa.array(np.concatenate([deleted_rows, inserted_rows])))
        count = changed_rows.num_rows
        is_delete = np.arange(count) < len(deleted_rows)
        values = {
            "slice": pa.array(np.where(is_delete, *SLICE_BY_OPERATION.values())),
            "commit_lsn": repeat_value(pa.array([self.lsn]), count),
            "ordinal": pa.array(np.zeros(count, np.int64)),
            "number": pa.array(first_number + np.arange(count)),
            "commit_time": repeat_value(pa.array([self.time], self.schema.field("commit_time").type), count),
            "operation": pa.array(np.where(is_delete, "delete", "insert"), pa.string()),
            "unchanged": pa.nulls(count, self.schema.field("unchanged").type),
            "old": self._make_rows(changed_rows, ~is_delete, is_deleted=True),
            "new": self._make_rows(changed_rows, is_delete, is_deleted=False),
        }
        return pa.RecordBatch.from_arrays([values[name] for name in self.schema.names], schema=self.schema)

    def _make_rows(self, rows: pa.RecordBatch, is_null: Mask, *, is_deleted: bool) -> pa.StructArray:
        """Make the old or the new rows of changes."""
        fields = list(self.schema.field("new").type)
        index_by_column = {name: index for index, name in enumerate(self.columns)}
        value_by_kind = {
            "deleted": is_deleted,
            "filtered": False,
            "deleted_at": self.time if is_deleted else None,
        }
        value_by_column = {name: value_by_kind.get(kind) for name, kind in self.metadata}
        children = [
            repeat_value(pa.array([value_by_column[field.name]], field.type), rows.num_rows)
            if field.name in value_by_column
            else rows.column(index_by_column[field.name]).cast(field.type)
            for field in fields
        ]
        return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array(is_null))
