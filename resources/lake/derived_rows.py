"""Derives rows of a Delta table from rows that are stored in the same table or in another one.

Stored files are read as batches, a function derives new batches, and these are written into new files. A runner
(Spark or threads) has only one batch in memory at a time.

In: a table that delta-rs can reach, and a function of batches.
Out: files, to be committed to a table.

Raises OSError, and errors of delta-rs and of the function.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.key_lookup import list_table_files
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import Store, join_path
from pgsieve.resources.parts import Guard

#: A function that returns batches. It is called on executors.
BatchSource = Callable[[], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class FileRows:
    """The rows of a file without its deleted rows, after a function has changed each batch.

    - `schema`: the columns to read
    - `deleted_row_numbers`: the numbers of the deleted rows
    - `change_batch`: the function that changes a batch
    """

    store: Store
    file_path: str
    schema: pa.Schema
    deleted_row_numbers: Numbers
    change_batch: Callable[[pa.RecordBatch], pa.RecordBatch]

    def __call__(self) -> Iterator[pa.RecordBatch]:
        """Read the rows, and change them."""
        return map(
            self.change_batch,
            remove_rows(self.store.read_batches(self.file_path, self.schema), self.deleted_row_numbers),
        )


def list_file_rows(
    delta_rs: DeltaRsRecords,
    path: str,
    schema: pa.Schema,
    change_batch: Callable[[pa.RecordBatch], pa.RecordBatch],
    version: int | None = None,
) -> list[FileRows]:
    """The rows of each file of a table, changed by a function of batches. Without `version`, of its newest version."""
    table = delta_rs.open_table(path) if version is None else delta_rs.open_version(path, version)
    return [
        FileRows(delta_rs.store, join_path(path, file.name), schema, file.deleted_row_numbers, change_batch)
        for file in list_table_files(table)
    ]


def remove_rows(
    batches: Iterable[pa.RecordBatch],
    row_numbers: Numbers,
    on_removed: Callable[[slice, pa.RecordBatch], None] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file without the rows whose numbers are in `row_numbers`. These numbers ascend.

    For each batch with rows to remove, `on_removed` gets two arguments: the slice of `row_numbers` with the numbers of
    these rows, and a batch of the rows.
    """
    first_row_number = 0
    for batch in batches:
        end_row_number = first_row_number + batch.num_rows
        begin_index, end_index = np.searchsorted(row_numbers, (first_row_number, end_row_number))
        if on_removed is not None and begin_index < end_index:
            on_removed(
                slice(begin_index, end_index),
                batch
                if end_index - begin_index == batch.num_rows
                else batch.take(pa.array(row_numbers[begin_index:end_index] - first_row_number)),
            )
        is_kept = np.ones(batch.num_rows, np.bool_)
        is_kept[row_numbers[begin_index:end_index] - first_row_number] = False
        first_row_number = end_row_number
        if is_kept.any():
            yield batch if is_kept.all() else batch.filter(pa.array(is_kept))


def read_rows(
    store: Store, file_path: str, schema: pa.Schema, row_numbers: Numbers
) -> Iterator[tuple[slice, pa.RecordBatch]]:
    """Read the rows of a file that have these numbers, which ascend. Row groups that contain none of them are not read.

    Yields pairs: a slice of `row_numbers`, and the batch of the rows with these numbers.
    """
    if not len(row_numbers):
        return
    groups = store.list_row_groups(file_path)
    group_ends = np.cumsum([group.row_count for group in groups])
    group_by_row = np.searchsorted(group_ends, row_numbers, "right")
    group_numbers = np.unique(group_by_row)
    row_counts = np.diff(group_ends, prepend=0)[group_numbers]
    # Other row groups are skipped. So subtract from each row number the rows of the groups that are skipped before it.
    skipped_counts = (group_ends[group_numbers] - row_counts) - (np.cumsum(row_counts) - row_counts)
    row_numbers, first_row_number = (
        row_numbers - skipped_counts[np.searchsorted(group_numbers, group_by_row)],
        0,
    )
    for batch in store.read_batches(file_path, schema, group_numbers.tolist()):
        begin_index, end_index = np.searchsorted(
            row_numbers, (first_row_number, first_row_number + batch.num_rows)
        )
        if begin_index < end_index:
            yield (
                slice(begin_index, end_index),
                batch.take(pa.array(row_numbers[begin_index:end_index] - first_row_number)),
            )
        first_row_number += batch.num_rows


@dataclass(frozen=True)
class RowWriter:
    """Writes batches into files of about `file_bytes` bytes in a folder, on executors.

    Each element of `parts` is for one task of the runner. It has the functions that yield the batches to write.
    `encodings` has the same meaning as in `write_files`.
    """

    store: Store
    folder: str
    schema: pa.Schema
    file_bytes: int
    parts: Sequence[Sequence[BatchSource]]
    encodings: Mapping[str, str] | None = None

    def write_on(self, runner: Runner) -> pa.Table:
        """Let the tasks of a runner write all files. Return a row (`FILE_SCHEMA`) for each file."""
        return runner.run(self, len(self.parts))

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write the files of the task with this number. The guard ends the task if its result is no longer needed."""
        rows = chain.from_iterable(read_batches() for read_batches in self.parts[number])
        return write_files(self.folder, self.schema, guard(rows), self.store, self.file_bytes, self.encodings)
