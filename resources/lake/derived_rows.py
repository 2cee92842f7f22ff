"""Derives rows of a Delta table from stored rows of the same or another table: files -> batches -> files.

In: a table that delta-rs reaches, and a function of batches. Out: files that a committer adds to a table. A
runner has one batch in memory at a time. Raises OSError, and errors of delta-rs and the function.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.net_change import Numbers
from pgsieve.resources.lake.delta.delta_rs import LocalRecords
from pgsieve.resources.lake.delta.key_lookup import every_file
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.stores.store import Store, join_path
from pgsieve.resources.parts import Guard

#: Makes batches, on executors.
Batches = Callable[[], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class FileRows:
    """The rows of a file, except deleted ones, with the columns of `schema`, changed by a function of batches."""

    store: Store
    file: str
    schema: pa.Schema
    deleted: Numbers
    change: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Read the rows."""
        return map(self.change, rows_without(self.store.batches(self.file, self.schema), self.deleted))


def table_rows(
    local: LocalRecords,
    path: str,
    schema: pa.Schema,
    change: Callable[[pa.RecordBatch], pa.RecordBatch],
) -> list[FileRows]:
    """The rows of each file of a table, changed by a function of batches."""
    return [
        FileRows(local.store, join_path(path, file.name), schema, file.deleted, change)
        for file in every_file(local.table_at(path))
    ]


def rows_without(
    batches: Iterable[pa.RecordBatch],
    rows: Numbers,
    on_removed: Callable[[slice, pa.RecordBatch], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file without the rows whose numbers are in `rows`, which ascend.

    `on_removed` is called with removed rows of each batch: their slice of `rows`, and a batch of them.
    """
    begin = 0
    for batch in batches:
        end = begin + batch.num_rows
        first, last = np.searchsorted(rows, (begin, end))
        if on_removed is not None and first < last:
            on_removed(slice(first, last), batch.take(pa.array(rows[first:last] - begin)))
        remains = np.ones(batch.num_rows, np.bool_)
        remains[rows[first:last] - begin] = False
        begin = end
        if remains.any():
            yield batch if remains.all() else batch.filter(pa.array(remains))


def rows_at(
    store: Store, file: str, schema: pa.Schema, rows: Numbers
) -> Iterator[tuple[slice, pa.RecordBatch]]:
    """Read the rows of a file with these ascending numbers: batches, each with its slice of `rows`.

    Row groups without any of the rows are not read.
    """
    if not len(rows):
        return
    groups = store.row_groups(file)
    ends = np.cumsum([group.rows for group in groups])
    group_of_row = np.searchsorted(ends, rows, "right")
    chosen = np.unique(group_of_row)
    sizes = np.diff(ends, prepend=0)[chosen]
    # Only the chosen groups are read, so the rows are renumbered within these.
    skipped = (ends[chosen] - sizes) - (np.cumsum(sizes) - sizes)
    rows, begin = rows - skipped[np.searchsorted(chosen, group_of_row)], 0
    for batch in store.batches(file, schema, chosen.tolist()):
        first, last = np.searchsorted(rows, (begin, begin + batch.num_rows))
        if first < last:
            yield slice(first, last), batch.take(pa.array(rows[first:last] - begin))
        begin += batch.num_rows


@dataclass(frozen=True)
class WrittenRows:
    """Writes batches into files of about `size` bytes in a folder, part by part, on executors."""

    store: Store
    folder: str
    schema: pa.Schema
    size: int
    parts: Sequence[Sequence[Batches]]

    def write_by(self, runner: Executors) -> pa.Table:
        """Let a runner write all parts; return a row (`FILE_SCHEMA`) per file."""
        return runner.run(self, len(self.parts))

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write one part."""
        rows = chain.from_iterable(make() for make in self.parts[number])
        return write_files(self.folder, self.schema, guard(rows), store=self.store, size=self.size)
