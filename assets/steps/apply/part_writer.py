"""The tasks that write a table's files if very many changes are applied, divided by their keys.

They are the last stage of `part_deciders`. Each is a receiver: it gets the messages with its number. Tasks of the stage
before, the deciders, have sent the messages, which say which rows to write and which to remove. Ended rows are deleted
rows that the replica keeps. The place of a change is a number that orders the changes of a batch, the changes that one
commit applies.

In: the messages of a receiver. Out: rows that describe new files, and results as JSON texts (counts, changed files). Raises
OSError, and Arrow's errors.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.apply.change_feed import ChangeFeed, FilesTaskWithFeed, NewRowTypes
from pgsieve.assets.steps.apply.completion import MissingValues
from pgsieve.assets.steps.apply.ended_rows import EndedRows, make_completions
from pgsieve.assets.steps.apply.files_task import FilesTask
from pgsieve.assets.steps.apply.key_reader import BatchParts, ReplicaFile
from pgsieve.assets.steps.apply.part_deciders import RESULT_SCHEMA, make_result
from pgsieve.assets.steps.apply.part_messages import ENDED_ROWS, IS_UPDATE, ROWS, unpack_rows
from pgsieve.assets.steps.apply.row_selection import RowSelection
from pgsieve.decoding.changes.arrays import NONE, Numbers
from pgsieve.decoding.changes.net_rows import NetRows
from pgsieve.resources.lake.delta.deletion_vectors import read_vector, write_vector
from pgsieve.resources.lake.delta.key_lookup import FileMatches
from pgsieve.resources.lake.stores.store import RowGroup
from pgsieve.resources.parts import Guard, Message

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class PartWriter:
    """Writes what the deciders have sent to a receiver. `BatchParts` says which receivers there are.

    The receiver of a part of the changes writes the new rows. The receiver of a file writes the file again without the
    removed rows, or writes a deletion vector if `can_mark_rows` is True; removed rows that the replica keeps as deleted
    rows go into new files. The last receiver passes on the results of the deciders.
    `files_task` says how to write files; a receiver adds the rows to write.
    """

    batch_parts: BatchParts
    files_task: FilesTask
    change_parts: Sequence[Sequence[RowGroup]]
    files: Sequence[ReplicaFile]
    can_mark_rows: bool

    def __call__(self, receiver: int, messages: Sequence[Message], guard: Guard) -> Iterator[pa.RecordBatch]:
        """Write what a receiver was sent."""
        if receiver == self.batch_parts.writer_count - 1:
            for _, content in messages:
                yield make_result(json.loads(content.to_pybytes()))
            return
        if receiver < len(self.change_parts):
            yield from self._write_new_rows(receiver, messages, guard)
        else:
            yield from self._change_file(receiver - len(self.change_parts), messages, guard)

    def _write_new_rows(
        self, change_part: int, messages: Sequence[Message], guard: Guard
    ) -> Iterator[pa.RecordBatch]:
        """Write the new rows of a part of the changes.

        If the stages before could not find out where all values are, there may be no new rows, but metadata of ended rows.
        Then the results are not used.
        """
        if not any(kind == ROWS for kind, _ in messages):
            return
        sources = unpack_rows(messages, ROWS, "place")
        ended_places, metadata = self._unpack_ended_rows(messages, "place")
        selection = replace(
            self.files_task.row_selection,
            places=np.asarray(sources["place"]),
            missing_values=self._find_missing_values(sources),
            completions=make_completions(ended_places, metadata, self.files_task.schema),
        )
        feed = None
        if self.batch_parts.has_feed:
            update_places = np.asarray(sources.filter(sources[IS_UPDATE])["place"])
            feed = ChangeFeed((), {}, NewRowTypes(update_places))
        yield from self._write_selection(change_part, selection, guard, feed)

    def _write_selection(
        self, change_part: int, selection: RowSelection, guard: Guard, feed: ChangeFeed | None = None
    ) -> Iterator[pa.RecordBatch]:
        groups = self.change_parts[change_part]
        files_task = replace(self.files_task, change_parts=[groups], row_selection=selection)
        yield from _write_files(files_task, feed, guard)

    def _change_file(
        self, file_index: int, messages: Sequence[Message], guard: Guard
    ) -> Iterator[pa.RecordBatch]:
        """Remove rows from a file, and write the ended ones among them again."""
        file, removed_rows = self.files[file_index], unpack_rows(messages, ROWS, "row")
        files_task, numbers = self.files_task, np.asarray(removed_rows["row"])
        ended_numbers, metadata = self._unpack_ended_rows(messages, "row")
        if len(ended_numbers):
            rows = EndedRows(file.name, ended_numbers, np.arange(len(ended_numbers)), metadata)
            files_task = replace(files_task, ended_rows=[[rows]])
        match, feed = (
            FileMatches(file.name, file.log_path, file.size_bytes, numbers, _NO_ROWS, _NO_ROWS),
            None,
        )
        if not self.can_mark_rows:
            files_task = replace(files_task, files_to_rewrite=[match])
        if self.batch_parts.has_feed:
            feed = ChangeFeed(
                [match], {match.name: np.asarray(removed_rows[IS_UPDATE])}, NewRowTypes(_NO_ROWS)
            )
        yield from _write_files(files_task, feed, guard)
        yield self._finish_file(file_index, numbers)

    def _finish_file(self, file_index: int, removed_numbers: Numbers) -> pa.RecordBatch:
        """Report that a file was replaced. If rows can be marked, write a new deletion vector instead, and report that."""
        if not self.can_mark_rows:
            return make_result({"file": file_index})
        file, store, path = self.files[file_index], self.files_task.store, self.files_task.path
        marked_numbers = read_vector(store, path, file.deletion_vector)
        vector = write_vector(store, path, np.sort(np.concatenate([marked_numbers, removed_numbers])))
        return make_result({"file": file_index, "vector": vector})

    def _unpack_ended_rows(self, messages: Sequence[Message], number_column: str) -> tuple[Numbers, pa.Table]:
        """Unpack the numbers of the ended rows, in ascending order, and their metadata; both empty if no row has ended."""
        names = [name for name, _ in self.batch_parts.soft_delete_columns]
        if not any(kind == ENDED_ROWS for kind, _ in messages):
            return _NO_ROWS, pa.table({})
        rows = unpack_rows(messages, ENDED_ROWS, number_column)
        return np.asarray(rows[number_column]), rows.drop_columns(number_column).rename_columns(names)

    def _find_missing_values(self, sources: pa.Table) -> MissingValues | None:
        """Return the `MissingValues` of new rows. `sources` says where the values are that their changes did not send."""
        if not self.batch_parts.unsent_columns:
            return None
        places, files, base_rows = (np.asarray(sources[name]) for name in ("place", "file", "row"))
        sent_places = {
            name: np.asarray(sources[f"sent{number}"])
            for number, name in enumerate(self.batch_parts.unsent_columns)
        }
        task, matches = self.files_task, list[FileMatches]()
        for file_index in np.unique(files[files != NONE]).tolist():
            file, indices = self.files[file_index], np.flatnonzero(files == file_index)
            indices = indices[np.argsort(base_rows[indices])]
            matches.append(
                FileMatches(file.name, file.log_path, file.size_bytes, base_rows[indices], indices, _NO_ROWS)
            )
        # `matches` has the replica's rows under the indices of the new rows, as if these were their keys.
        rows = NetRows(
            places,
            sent_places,
            np.where(files == NONE, NONE, np.arange(len(places))),
            np.full(len(places), NONE),
        )
        groups, slice_ends = (
            [group for part in self.change_parts for group in part],
            self.batch_parts.extent.slices,
        )
        return MissingValues(task.store, task.path, groups, slice_ends, matches, task.schema, rows).reduce()


def _write_files(files_task: FilesTask, feed: ChangeFeed | None, guard: Guard) -> Iterator[pa.RecordBatch]:
    """Write all parts of a task, and what belongs into the replica's change data feed, if it has one."""
    task = files_task if feed is None else FilesTaskWithFeed(files_task, feed)
    for number in range(task.part_count):
        yield from describe_files(task(number, guard))


def describe_files(files: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows that describe new files (`FILE_SCHEMA`) as rows of `RESULT_SCHEMA`."""
    for rows in files:
        no_results = pa.nulls(rows.num_rows, pa.string())
        yield pa.RecordBatch.from_arrays([*rows.columns, no_results], schema=RESULT_SCHEMA)
