"""Keeps what is known of rows of a replica, because two Delta tables need them.

A replica is the copy of a publisher's table in the lake. If the user has asked for the history of its rows (`history:
scd2`), a second Delta table has all former and present versions of them. A batch of changes is written to the replica
first, and then to the table of versions. What the first write has read and written is kept here for the second one.

In: - the rows that a batch adds to the replica, and their files. Each row has the place of its change, a number that
      orders the changes of a batch (`pgsieve.decoding.changes.extent`).
    - the rows that a batch removes from the replica. Each has the number of its key: the keys of a batch are numbered.
Out: the new rows' keys and files, and the removed rows, as far as they were kept

Some rows are not kept: those that Spark executors write, as only this process can add rows here; and those that do not
fit into the memory. They are read again when the table of versions is written.
"""

from collections.abc import Sequence
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


@dataclass(eq=False)
class NewRows:
    """New rows that one task writes to a replica.

    - `schema`: the columns of their files
    - `keys`: their keys, in the order of the files
    - `files`: the paths of their files
    """

    schema: pa.Schema
    _shared_rows: "SharedRows"
    keys: list[NumberedRows] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def add(self, places: Numbers, rows: pa.RecordBatch) -> None:
        """Keep the keys of rows; `places` has the place of the change that made each row."""
        self._shared_rows.add_new_rows(self, places, rows)


@dataclass
class SharedRows:
    """The rows that one batch adds to one replica (`new_rows`) and removes from it (`removed_rows`).

    `key` has the names of the key's columns. All rows and keys together take at most `max_bytes`. New rows are only of use
    if the keys of all of them are here. So if one does not fit, all are dropped, and `lacks_new_rows` becomes True. Each
    removed row is of use by itself: those that fit are kept.
    """

    max_bytes: int
    key: Sequence[str] = ()
    new_rows: list[NewRows] = field(default_factory=list)
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

    def begin_part(self, schema: pa.Schema) -> NewRows:
        """Begin to add the new rows of one task, which writes files with these columns."""
        self.new_rows.append(NewRows(schema, self))
        return self.new_rows[-1]

    def add_new_rows(self, part: NewRows, places: Numbers, rows: pa.RecordBatch) -> None:
        """Add the keys of new rows; `places` has the place of the change that made each row."""
        keys = rows.select(list(self.key))
        if not self.lacks_new_rows and self._fits(keys):
            part.keys.append((places, keys))
        else:
            self.lacks_new_rows = True
            self.nbytes -= sum(each.nbytes for part in self.new_rows for _, each in part.keys)
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

    def select_new_rows(self, places: Numbers, columns: pa.Schema) -> list[NewRows] | None:
        """Return the new rows, part by part.

        `places` has the wanted places in ascending order, and `columns` the wanted columns. Returns None if the kept rows
        have other places or other columns.
        """
        parts = [part for part in self.new_rows if part.keys]
        # A file of the change history may have earlier changes than the file before it, but the places in a batch ascend.
        kept_places = sorted(
            (numbers for part in parts for numbers, _ in part.keys), key=lambda each: int(each[0])
        )
        if not parts or not np.array_equal(np.concatenate(kept_places), places):
            return None
        return parts if all(part.schema.equals(columns) for part in parts) else None

    def select_removed_rows(self, columns: pa.Schema) -> list[NumberedRows]:
        """Return the removed rows, with only these columns; empty if a column is missing or has another type."""
        if not all(set(columns.names) <= set(rows.schema.names) for _, rows in self.removed_rows):
            return []
        batches = [(key_numbers, rows.select(columns.names)) for key_numbers, rows in self.removed_rows]
        return batches if all(rows.schema.equals(columns) for _, rows in batches) else []
