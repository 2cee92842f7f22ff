"""Shares the rows that an apply has in memory with the versions of the same rows, so that they are not decoded twice.

In: the rows that this process adds to and removes from the files of a replica, batch by batch. Out: the new rows by the
places of their changes, and the removed rows by their keys; None if some are missing, because they were too many, or
executors wrote the files.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.net_change import Numbers

#: The most bytes of shared rows of all tables of a batch.
SHARED_BYTES = 192 * 1024 * 1024

#: Rows, and a number for each: its place or the number of its key.
NumberedRows = tuple[Numbers, pa.RecordBatch]


def _none() -> None:
    return None


@dataclass
class SharedRows:
    """The rows that a batch adds to a replica, with their places, and removes, with the numbers of their keys.

    With more than `max_bytes`, no new rows are kept if they do not fit, and as many removed rows as fit.
    """

    max_bytes: int
    new_rows: list[NumberedRows] = field(default_factory=list)
    removed_rows: list[NumberedRows] = field(default_factory=list)
    lacks_new_rows: bool = False
    #: How much memory the rows take.
    nbytes: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle to None: rows that an executor adds would not reach this process."""
        return _none, ()

    def add_new(self, places: Numbers, rows: pa.RecordBatch) -> None:
        """Add new rows, by the places of their changes."""
        if not self.lacks_new_rows and self._fits(rows):
            self.new_rows.append((places, rows))
        else:
            self.lacks_new_rows = True
            self.nbytes -= sum(each.nbytes for _, each in self.new_rows)
            self.new_rows.clear()

    def add_removed(self, keys: Numbers, rows: pa.RecordBatch) -> None:
        """Add removed rows, by the numbers of their keys."""
        if self._fits(rows):
            self.removed_rows.append((keys, rows))

    def _fits(self, rows: pa.RecordBatch) -> bool:
        """Whether the rows fit; if they do, their memory counts."""
        nbytes = self.nbytes + rows.nbytes
        if nbytes > self.max_bytes:
            return False
        self.nbytes = nbytes
        return True

    def at_places(self, places: Numbers, columns: pa.Schema) -> list[NumberedRows] | None:
        """The new rows in the order of their places; None if their places are not exactly `places`, which ascend."""
        parts = sorted(self.new_rows, key=lambda part: int(part[0][0]))
        if not parts or not np.array_equal(np.concatenate([numbers for numbers, _ in parts]), places):
            return None
        return parts if all(rows.schema.equals(columns) for _, rows in parts) else None

    def removed_with(self, columns: pa.Schema) -> list[NumberedRows]:
        """The removed rows with these columns; empty if some do not have them."""
        if not all(set(columns.names) <= set(rows.schema.names) for _, rows in self.removed_rows):
            return []
        parts = [(keys, rows.select(columns.names)) for keys, rows in self.removed_rows]
        return parts if all(rows.schema.equals(columns) for _, rows in parts) else []
