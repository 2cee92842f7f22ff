"""Makes the changes that one subscription gets of one table: as files, or as a DataFrame that Spark writes.

The changes come from one slice: what the slot delivered between two of its positions. In a slice, a Relation message
describes the columns of the messages that follow it. Each such description is a relation version.

In: messages, readings and TRUNCATEs. A reading selects the messages of one relation version. It says how to filter them, and
how to convert them to the columns of the replica.
Out: files, which the caller commits, or a DataFrame

The changes are made by `pgsieve.decoding.changes.transform`, and counted by `pgsieve.decoding.changes.tally`, part by part.
Raises the errors of decoding and of row filters, and OSError.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.observations import NOTE, NotedRows, collect_notes, with_note
from pgsieve.assets.steps.records.columns import format_changes_ddl
from pgsieve.assets.steps.update_transformation.messages import END_MARK, Messages, NumberedMessages
from pgsieve.assets.steps.update_transformation.relation_versions import Reading
from pgsieve.decoding.changes.columns import SIDES
from pgsieve.decoding.changes.tally import (
    ChangeCounts,
    Tally,
    count_changes,
    count_changes_and_bytes,
    empty_tally,
    sum_tallies,
)
from pgsieve.decoding.changes.transform import Transformation, add_slice, truncate_changes
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import Store

#: The place of a TRUNCATE among the changes: the LSN of its commit, and its number in the transaction. Then its commit
#: time, if it is known.
TruncateOrder = tuple[int, int, datetime | None]
#: The columns of a change history that are needed to count changes.
COUNTED_COLUMNS = ("operation", "unchanged", *SIDES)


@dataclass(frozen=True)
class TableSlice:
    """A table's changes in the slice that ends at `end`. It can be sent to executors.

    `schema` is the schema of the changes, and `key` has the columns of the table's key.
    """

    end: int
    key: Sequence[str]
    schema: pa.Schema


@dataclass(frozen=True)
class _ChangeFunction:
    """Makes and counts changes of a table. It can be sent to executors.

    `transformations` says how the messages with each number become changes. The end mark becomes the TRUNCATEs.
    """

    table_slice: TableSlice
    transformations: Sequence[Transformation]
    truncates: Sequence[TruncateOrder]

    def __call__(
        self, messages: Iterable[NumberedMessages], counts: ChangeCounts
    ) -> Iterator[pa.RecordBatch]:
        """Yields the changes of a part, and adds their numbers to `counts`."""
        end, key, schema = self.table_slice.end, self.table_slice.key, self.table_slice.schema
        for number, encoded_messages in messages:
            batches = (
                [truncate_changes(self.truncates, schema)]
                if number == END_MARK
                else self.transformations[number].transform(encoded_messages, counts.sent_as)
            )
            for batch in batches:
                changes = add_slice(batch, end, schema)
                count_changes_and_bytes(changes, key, counts.sent)
                yield changes


@dataclass(frozen=True)
class WrittenChanges:
    """Files of changes, as rows of `FILE_SCHEMA`, and the counts of the changes."""

    files: pa.Table
    counts: ChangeCounts


@dataclass(frozen=True)
class SentChanges:
    """The changes and TRUNCATEs of a table in a slice, as one subscription gets them.

    `messages` may have messages of other tables, too.
    """

    messages: Messages
    readings: Sequence[Reading]
    truncates: Sequence[TruncateOrder]
    table_slice: TableSlice

    def write_files(self, runner: Runner, folder: str, store: Store) -> WrittenChanges:
        """Let the runner write the changes into files of a folder. Spark writes them if only Spark can read the messages."""
        make_changes, schema = self._change_function, self.table_slice.schema

        def write_part(messages: Iterable[NumberedMessages]) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            yield from write_files(folder, schema, make_changes(messages, counts), store)
            yield _make_counts_row(counts)

        rows = self._open_messages(runner, has_end_mark=bool(self.truncates)).compute(write_part, FILE_SCHEMA)
        is_file = rows["path"].is_valid()
        return WrittenChanges(rows.filter(is_file), _sum_counts(rows.filter(pc.invert(is_file))))

    def count_without_writing(self, runner: Runner) -> ChangeCounts:
        """Make the changes without writing them, to find out whether that raises an error. Returns their counts.

        TRUNCATEs are left out.
        """
        make_changes = self._change_function

        def count_part(messages: Iterable[NumberedMessages]) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            for _ in make_changes(messages, counts):
                pass
            yield _make_counts_row(counts)

        return _sum_counts(self._open_messages(runner, has_end_mark=False).compute(count_part, FILE_SCHEMA))

    def make_rows(self, lake: Lake, columns: Sequence[tuple[str, str]], runner: Runner) -> NotedRows:
        """Let Spark make the changes, as a DataFrame that Spark writes.

        Each Spark task adds its counts of the changes as a note, a text in a row of its own (`with_note`).

        `columns` are the columns of the replica, with their Spark types.
        """
        make_changes, schema = self._change_function, self.table_slice.schema

        def make_part(messages: Iterable[NumberedMessages]) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            yield from with_note(make_changes(messages, counts), schema, counts.to_json)

        source = self._open_messages(runner, has_end_mark=bool(self.truncates))
        ddl = f"{format_changes_ddl(columns)}, {NOTE} string"
        return NotedRows(source.make_frame(lake.spark, make_part, ddl))

    def _open_messages(self, runner: Runner, *, has_end_mark: bool) -> RowSource[NumberedMessages]:
        filters = [reading.message_filter for reading in self.readings]
        return self.messages.open_encoded(filters, runner, has_end_mark=has_end_mark)

    @property
    def _change_function(self) -> "_ChangeFunction":
        transformations = [reading.transformation for reading in self.readings]
        return _ChangeFunction(self.table_slice, transformations, self.truncates)


def count_stored_changes(rows: RowSource[pa.RecordBatch], key: Sequence[str]) -> Tally:
    """Count changes that were stored. `rows` have the columns `COUNTED_COLUMNS`."""

    def count_batches(batches: Iterable[pa.RecordBatch]) -> str:
        tally = empty_tally()
        for batch in batches:
            count_changes(batch, key, tally)
        return json.dumps(tally)

    return sum_tallies(map(json.loads, collect_notes(rows, count_batches)))


def _make_counts_row(counts: ChangeCounts) -> pa.RecordBatch:
    """Make the row with the counts of a part. In a result with a row for each file, this is the row without a file."""
    return pa.RecordBatch.from_pylist([{"size": 0, "tally": counts.to_json()}], FILE_SCHEMA)


def _sum_counts(rows: pa.Table) -> ChangeCounts:
    return ChangeCounts.sum(rows["tally"].to_pylist())
