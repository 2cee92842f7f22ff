"""Reads the rows of a Delta table file by file, without deleted rows, or only the rows with some numbers.

In: a table that delta-rs can reach. A function may change each batch.
Out: batches; only one is in memory at a time.

Raises OSError, and errors of delta-rs and of the function.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.decoding.changes.arrays import Numbers
from pgsieve.resources.lake.delta.delta_rs import DeltaRsRecords
from pgsieve.resources.lake.delta.key_lookup import list_table_files
from pgsieve.resources.lake.stores.store import Store, join_path


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
