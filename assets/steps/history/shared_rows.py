"""Keeps rows of a replica in memory, because two Delta tables need them.

A replica is the copy of a publisher's table in the lake. If the user has asked for the history of its rows (`history:
scd2`), a second Delta table has all former and present versions of them. A batch of changes is written to the replica
first, and then to the table of versions. The rows that the first write has read are kept here for the second one.

In: - the rows that a batch adds to the replica. Each has the place of its change, a number that orders the changes of a
      batch (`pgsieve.decoding.changes.extent`).
    - the rows that a batch removes from the replica. Each has the number of its key: the keys of a batch are numbered.
Out: the same rows, as far as they were kept

Some rows are not kept: those that Spark executors write, as only this process can add rows here; and those that do not
fit into the memory. They are read again when the table of versions is written.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import Numbers

#: The memory in bytes for the rows that are kept while a batch is written. All tables of the batch together use it.
SHARED_BYTES = 192 * 1024 * 1024

#: Rows, and an array with a number for each of them: the place of its change, or the number of its key.
NumberedRows = tuple[Numbers, pa.RecordBatch]


def _make_none() -> None:
    return None


@dataclass
class SharedRows:
    """The rows that one batch adds to one replica (`new_rows`) and removes from it (`removed_rows`).

    All rows together take at most `max_bytes`. New rows are only of use if all of them are here. So if one does not fit,
    all new rows are dropped, and `lacks_new_rows` becomes True. Each removed row is of use by itself: those that fit are
    kept.
    """

    max_bytes: int
    new_rows: list[NumberedRows] = field(default_factory=list)
    removed_rows: list[NumberedRows] = field(default_factory=list)
    lacks_new_rows: bool = False
    #: How much memory the rows take.
    nbytes: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Become None when this object is pickled: Spark pickles a task to send it to an executor.

        The executor would add rows to a copy of this object, and they would not reach this process. With None, the task
        adds no rows.
        """
        return _make_none, ()

    def add_new_rows(self, places: Numbers, rows: pa.RecordBatch) -> None:
        """Add new rows; `places` has the place of the change that made each row."""
        if not self.lacks_new_rows and self._fits(rows):
            self.new_rows.append((places, rows))
        else:
            self.lacks_new_rows = True
            self.nbytes -= sum(each.nbytes for _, each in self.new_rows)
            self.new_rows.clear()

    def add_removed_rows(self, key_numbers: Numbers, rows: pa.RecordBatch) -> None:
        """Add removed rows; `key_numbers` has the number of each row's key."""
        if self._fits(rows):
            self.removed_rows.append((key_numbers, rows))

    def _fits(self, rows: pa.RecordBatch) -> bool:
        """Whether the rows fit into the memory that is left. If they do, their size is added to `nbytes`."""
        nbytes = self.nbytes + rows.nbytes
        if nbytes > self.max_bytes:
            return False
        self.nbytes = nbytes
        return True

    def select_new_rows(self, places: Numbers, columns: pa.Schema) -> list[NumberedRows] | None:
        """Return the new rows, in the order of the places of their changes.

        `places` has the wanted places in ascending order, and `columns` the wanted columns. Returns None if the kept rows
        have other places or other columns.
        """
        batches = sorted(self.new_rows, key=lambda batch: int(batch[0][0]))
        if not batches or not np.array_equal(np.concatenate([numbers for numbers, _ in batches]), places):
            return None
        return batches if all(rows.schema.equals(columns) for _, rows in batches) else None

    def select_removed_rows(self, columns: pa.Schema) -> list[NumberedRows]:
        """Return the removed rows, with only these columns; empty if a column is missing or has another type."""
        if not all(set(columns.names) <= set(rows.schema.names) for _, rows in self.removed_rows):
            return []
        batches = [(key_numbers, rows.select(columns.names)) for key_numbers, rows in self.removed_rows]
        return batches if all(rows.schema.equals(columns) for _, rows in batches) else []
