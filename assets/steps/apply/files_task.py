"""The task that writes the files of a batch into a replica. A batch is the changes that one commit applies.

In: files of the replica that lose rows, and row groups of the change history (the Delta table with all changes of a table).
Out: new files, and a row for each of them (`FILE_SCHEMA`). The task is sent to executors. Raises OSError, and Arrow's errors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pgsieve.assets.steps.apply.ended_rows import EndedRows
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.assets.steps.history.shared_rows import NewRows, SharedRows
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.file_rows import remove_rows
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path
from pgsieve.resources.parts import Guard


@dataclass(frozen=True)
class FilesTask:
    """Writes the files of a batch, part by part.

    Parts are numbered in this order:
    1. `files_to_rewrite`: a file of the replica per part, written again without its removed rows
    2. `ended_rows`: rows that are written again, marked as deleted
    3. `change_parts`: row groups of the change history; `row_selection` picks the new rows from them

    `schema` has the columns of new rows, `replica_schema` all columns of the replica. When a file has
    `target_file_bytes` bytes, the next one begins. `encodings` are the Parquet encodings of columns (`write_files`).
    `shared_rows`, if it is given, gets the rows that are removed and those that are added.
    """

    store: Store
    path: str
    schema: pa.Schema
    replica_schema: pa.Schema
    target_file_bytes: int
    files_to_rewrite: Sequence[FileMatches]
    ended_rows: Sequence[Sequence[EndedRows]]
    change_parts: Sequence[Sequence[RowGroup]]
    row_selection: RowSelection
    encodings: Mapping[str, str] | None = None
    shared_rows: SharedRows | None = None

    @property
    def part_count(self) -> int:
        """The number of parts."""
        return len(self.files_to_rewrite) + len(self.ended_rows) + len(self.change_parts)

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write one part; yields a row (`FILE_SCHEMA`) per file."""
        if number < len(self.files_to_rewrite):
            match = self.files_to_rewrite[number]
            batches = self.store.read_batches(join_path(self.path, match.name), self.replica_schema)
            rows, schema = (
                remove_rows(batches, match.row_numbers, self._make_row_keeper(match)),
                self.replica_schema,
            )
        elif (ended_part := number - len(self.files_to_rewrite)) < len(self.ended_rows):
            rows, schema = self.read_ended_rows(self.ended_rows[ended_part]), self.replica_schema
        else:
            return self._write_new_rows(self.change_parts[ended_part - len(self.ended_rows)], guard)
        return write_files(self.path, schema, guard(rows), self.store, self.target_file_bytes, self.encodings)

    def _write_new_rows(self, groups: Sequence[RowGroup], guard: Guard) -> Iterator[pa.RecordBatch]:
        schema = self.row_selection.make_file_schema(self.schema)
        new_rows = None if self.shared_rows is None else self.shared_rows.begin_part(schema)
        rows = guard(self.read_new_rows(groups, new_rows))
        for files in write_files(self.path, schema, rows, self.store, self.target_file_bytes, self.encodings):
            if new_rows is not None:
                new_rows.files += [join_path(self.path, name) for name in files["path"].to_pylist()]
            yield files

    def _make_row_keeper(self, match: FileMatches) -> Callable[[slice, pa.RecordBatch], None] | None:
        """Return a function that keeps a file's removed rows in memory for a later step; None if none are to be kept."""
        if (shared := self.shared_rows) is None:
            return None
        return lambda row_range, rows: shared.add_removed_rows(match.key_indices[row_range], rows)

    def read_ended_rows(self, rows: Sequence[EndedRows]) -> Iterator[pa.RecordBatch]:
        """Read rows that are written again, marked as deleted."""
        for file_rows in rows:
            yield from file_rows.read_batches(
                self.store, self.path, self.replica_schema, self.row_selection.stamp
            )

    def read_new_rows(
        self, groups: Sequence[RowGroup], shared_part: NewRows | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the new rows from row groups of the change history. `shared_part` gets what is to be kept of them."""
        row_type, store = pa.struct(self.schema), self.store
        for selection in self.row_selection.divide(store, groups):
            placed_rows = (
                selection.read_placed_rows(read, row_type) for _, read in store.iterate_group_readers(groups)
            )
            with store.prefetch(groups, placed_rows) as batches:
                for places, rows in filter(None, batches):
                    if shared_part is not None:
                        shared_part.add(places, rows)
                    yield rows
