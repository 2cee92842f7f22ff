"""Shares the rows that an apply has in memory with the versions of the same rows, so that they are not decoded twice.

In: the rows that this process adds to and removes from the files of a replica, batch by batch. Out: the new rows by the
places of their changes, and the removed rows by their keys; None if some are missing, because they were too many, or
executors wrote the files.
"""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.net_change import NONE, Numbers

#: The most bytes of shared rows of all tables of a batch.
SHARED_BYTES = 128 * 1024 * 1024

#: Rows, and a number for each: its place or the number of its key.
_NumberedRows = tuple[Numbers, pa.RecordBatch]


def _none() -> None:
    return None


@dataclass
class SharedRows:
    """The rows that a batch adds to a replica, with their places, and removes, with the numbers of their keys.

    If they need more than `max_bytes`, none are kept.
    """

    max_bytes: int
    new_rows: list[_NumberedRows] = field(default_factory=list)
    removed_rows: list[_NumberedRows] = field(default_factory=list)
    #: How much memory the rows take.
    nbytes: int = 0

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle to None: rows that an executor adds would not reach this process."""
        return _none, ()

    def add_new(self, places: Numbers, rows: pa.RecordBatch) -> None:
        """Add new rows, by the places of their changes."""
        self._add(self.new_rows, places, rows)

    def add_removed(self, keys: Numbers, rows: pa.RecordBatch) -> None:
        """Add removed rows, by the numbers of their keys."""
        self._add(self.removed_rows, keys, rows)

    def _add(self, parts: list[_NumberedRows], numbers: Numbers, rows: pa.RecordBatch) -> None:
        if (nbytes := self.nbytes + rows.nbytes) > self.max_bytes:
            self.max_bytes = self.nbytes = 0
            self.new_rows.clear()
            self.removed_rows.clear()
        else:
            parts.append((numbers, rows))
            self.nbytes = nbytes

    def at_places(self, places: Numbers, columns: pa.Schema) -> list[_NumberedRows] | None:
        """The new rows in the order of their places; None if their places are not exactly `places`, which ascend."""
        parts = sorted(self.new_rows, key=lambda part: int(part[0][0]))
        if not parts or not np.array_equal(np.concatenate([numbers for numbers, _ in parts]), places):
            return None
        return parts if all(rows.schema.equals(columns) for _, rows in parts) else None

    def of_keys(self, count: int, columns: pa.Schema) -> "KeyedRows | None":
        """The removed rows by key; there are `count` keys. None without rows, or if they do not have these columns."""
        if not self.removed_rows:
            return None
        if not all(set(columns.names) <= set(rows.schema.names) for _, rows in self.removed_rows):
            return None
        batches = [rows.select(columns.names) for _, rows in self.removed_rows]
        if not all(rows.schema.equals(columns) for rows in batches):
            return None
        rows = pa.concat_batches(batches)
        row_of = np.full(count, NONE, np.int64)
        row_of[np.concatenate([numbers for numbers, _ in self.removed_rows])] = np.arange(rows.num_rows)
        return KeyedRows(rows, row_of)


@dataclass(frozen=True)
class KeyedRows:
    """Rows by key: `row_of` has the number of each key's row, `NONE` if there is none."""

    rows: pa.RecordBatch
    row_of: Numbers

    def of(self, keys: Numbers) -> pa.RecordBatch | None:
        """The rows of some keys, in this order; None if a key has no row."""
        at = self.row_of[keys]
        if not len(at) or (at == NONE).any():
            return None
        # Often both tables have the rows in the same order.
        if (np.diff(at) == 1).all():
            return self.rows.slice(at[0], len(at))
        return self.rows.take(pa.array(at))
