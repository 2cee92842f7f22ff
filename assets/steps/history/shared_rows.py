"""Keeps the rows that an apply has in memory, so that the versions of rows need not decode them again.

In: the rows that this process adds to the files of a replica and removes from them, batch by batch
Out: the new rows by the places of their changes (`pgsieve.decoding.changes.extent`), and the removed rows by their keys

Rows are missing if all rows together need too much memory, or if executors of Spark wrote the files.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.net_change import Numbers

#: The most bytes of shared rows of all tables of a batch.
SHARED_BYTES = 192 * 1024 * 1024

#: Rows, and a number for each: its place or the number of its key.
NumberedRows = tuple[Numbers, pa.RecordBatch]


def _make_none() -> None:
    return None


@dataclass
class SharedRows:
    """The rows that a batch adds to a replica (`new_rows`) and removes from it (`removed_rows`).

    New rows have the places of their changes, and removed rows have the numbers of their keys. All rows together take at
    most `max_bytes`. If there is not enough room for all new rows, none of them is kept. Removed rows are kept as long as
    there is room.
    """

    max_bytes: int
    new_rows: list[NumberedRows] = field(default_factory=list)
    removed_rows: list[NumberedRows] = field(default_factory=list)
    lacks_new_rows: bool = False
    #: How much memory the rows take.
    nbytes: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle to None: rows that an executor adds would not reach this process."""
        return _make_none, ()

    def add_new_rows(self, places: Numbers, rows: pa.RecordBatch) -> None:
        """Add new rows, by the places of their changes."""
        if not self.lacks_new_rows and self._fits(rows):
            self.new_rows.append((places, rows))
        else:
            self.lacks_new_rows = True
            self.nbytes -= sum(each.nbytes for _, each in self.new_rows)
            self.new_rows.clear()

    def add_removed_rows(self, keys: Numbers, rows: pa.RecordBatch) -> None:
        """Add removed rows, by the numbers of their keys."""
        if self._fits(rows):
            self.removed_rows.append((keys, rows))

    def _fits(self, rows: pa.RecordBatch) -> bool:
        """Whether the rows fit into the memory that is left. If they do, their size is added to `nbytes`."""
        nbytes = self.nbytes + rows.nbytes
        if nbytes > self.max_bytes:
            return False
        self.nbytes = nbytes
        return True

    def select_new_rows(self, places: Numbers, columns: pa.Schema) -> list[NumberedRows] | None:
        """The new rows in the order of their places.

        None if these are not exactly the rows at `places`, which ascend, or if a row has other columns than `columns`.
        """
        parts = sorted(self.new_rows, key=lambda part: int(part[0][0]))
        if not parts or not np.array_equal(np.concatenate([numbers for numbers, _ in parts]), places):
            return None
        return parts if all(rows.schema.equals(columns) for _, rows in parts) else None

    def select_removed_rows(self, columns: pa.Schema) -> list[NumberedRows]:
        """The removed rows with only these columns; empty if some rows lack one, or have it with another type."""
        if not all(set(columns.names) <= set(rows.schema.names) for _, rows in self.removed_rows):
            return []
        parts = [(keys, rows.select(columns.names)) for keys, rows in self.removed_rows]
        return parts if all(rows.schema.equals(columns) for _, rows in parts) else []
