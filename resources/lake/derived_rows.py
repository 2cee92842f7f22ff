"""Derives rows of a Delta table from rows that are stored in the same table or in another one.

The way is: files -> batches -> files. A runner has only one batch in memory at a time.

In: a table that delta-rs can reach, and a function of batches.
Out: files, which a committer adds to a table.

Raises OSError, and errors of delta-rs and of the function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

#: A function that returns batches. It is called on executors.
Batches = Callable[[], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class FileRows:
    """The rows of a file without its deleted rows, after a function has changed each batch.

    - `schema`: the columns to read
    - `deleted`: the numbers of the deleted rows
    - `change`: the function that changes a batch
    """

    store: Store
    file: str
    schema: pa.Schema
    deleted: Numbers
    change: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Read the rows, and change them."""
        return map(self.change, rows_without(self.store.batches(self.file, self.schema), self.deleted))


def table_rows(
    local: LocalRecords,
    path: str,
    schema: pa.Schema,
    change: Callable[[pa.RecordBatch], pa.RecordBatch],
) -> list[FileRows]:
    """For each file of a table its rows, changed by a function of batches."""
    return [
        FileRows(local.store, join_path(path, file.name), schema, file.deleted, change)
        for file in every_file(local.table_at(path))
    ]


def rows_without(
    batches: Iterable[pa.RecordBatch],
    rows: Numbers,
    on_removed: Callable[[slice, pa.RecordBatch], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file without the rows whose numbers are in `rows`. These numbers ascend.

    If a batch has rows to remove, `on_removed` is called with two arguments: the slice of `rows` that has their
    numbers, and a batch of these rows.
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
    """Read the rows of a file that have these numbers. The numbers ascend. Yields batches, each with its slice of `rows`.

    Row groups that contain none of these rows are not read.
    """
    if not len(rows):
        return
    groups = store.row_groups(file)
    ends = np.cumsum([group.rows for group in groups])
    group_of_row = np.searchsorted(ends, rows, "right")
    group_numbers = np.unique(group_of_row)
    sizes = np.diff(ends, prepend=0)[group_numbers]
    # Only these row groups are read. So subtract from each row number the rows of the groups before it that are skipped.
    skipped = (ends[group_numbers] - sizes) - (np.cumsum(sizes) - sizes)
    rows, begin = rows - skipped[np.searchsorted(group_numbers, group_of_row)], 0
    for batch in store.batches(file, schema, group_numbers.tolist()):
        first, last = np.searchsorted(rows, (begin, begin + batch.num_rows))
        if first < last:
            yield slice(first, last), batch.take(pa.array(rows[first:last] - begin))
        begin += batch.num_rows


@dataclass(frozen=True)
class WrittenRows:
    """Writes batches into files of about `size` bytes in a folder, part by part, on executors.

    `encodings` as in `write_files`.
    """

    store: Store
    folder: str
    schema: pa.Schema
    size: int
    parts: Sequence[Sequence[Batches]]
    encodings: Mapping[str, str] | None = None

    def write_by(self, runner: Executors) -> pa.Table:
        """Let a runner write all parts. Return a row (`FILE_SCHEMA`) for each file."""
        return runner.run(self, len(self.parts))

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write the files of one part."""
        rows = chain.from_iterable(make() for make in self.parts[number])
        return write_files(self.folder, self.schema, guard(rows), self.store, self.size, self.encodings)
