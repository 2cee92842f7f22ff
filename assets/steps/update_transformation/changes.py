"""Makes the changes that one subscription gets of one table: as files, or as a DataFrame that Spark writes.

The changes come from one slice: what the slot delivered between two of its positions. In a slice, a Relation message
describes the columns of the messages that follow it. Each such description is a relation version.

In: readings and TRUNCATEs. A reading has the messages of one relation version. It says how to filter them, and how to
convert them to the columns of the replica.
Out: files, which the caller commits, or a DataFrame

The changes are made by `pgsieve.decoding.changes.transform`, and counted by `pgsieve.decoding.changes.tally`. The messages are
in Parquet files. A runner, which runs functions part by part, writes files. Each part reads some row groups of
messages, one at a time. Raises the errors of decoding and of row filters, and OSError.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from pgsieve.assets.steps.observations import NOTE, NotedRows, collect_notes, with_note
from pgsieve.assets.steps.records.columns import format_changes_ddl
from pgsieve.assets.steps.update_transformation.messages import (
    FewMessages,
    MessageSource,
    MessagesWithoutSpark,
)
from pgsieve.assets.steps.update_transformation.relation_versions import Reading
from pgsieve.decoding.changes.columns import ENCODED_COLUMNS, SIDES
from pgsieve.decoding.changes.tally import (
    ChangeCounts,
    Tally,
    count_changes,
    count_changes_and_bytes,
    empty_tally,
    sum_tallies,
)
from pgsieve.decoding.changes.transform import EncodedMessages, Transformation, add_slice, truncate_changes
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.parts import Guard

#: The place of a TRUNCATE among the changes: the LSN of its commit, and its number in the transaction. Then its commit
#: time, if it is known.
TruncateOrder = tuple[int, int, datetime | None]
#: The columns of a change history that are needed to count changes.
COUNTED_COLUMNS = ("operation", "unchanged", *SIDES)
#: How some messages are transformed, and the messages.
_MessagesToTransform = tuple[Transformation, MessageSource]


@dataclass(frozen=True)
class TableSlice:
    """Makes and counts the changes of a table in the slice that ends at `end`. It can be sent to executors.

    `schema` is the schema of the changes, and `key` has the columns of the table's key.
    """

    end: int
    key: Sequence[str]
    schema: pa.Schema

    def make_changes(
        self,
        messages: Iterable[tuple[Transformation, Iterable[EncodedMessages]]],
        truncates: Iterable[pa.RecordBatch],
        counts: ChangeCounts,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the changes that the messages become, and after them `truncates`. Adds their numbers to `counts`."""
        message_changes = (
            changes
            for transformation, encoded_messages in messages
            for changes in transformation.transform(encoded_messages, counts.sent_as)
        )
        for batch in chain(message_changes, truncates):
            changes = add_slice(batch, self.end, self.schema)
            count_changes_and_bytes(changes, self.key, counts.sent)
            yield changes

    def make_truncate_changes(self, truncates: Sequence[TruncateOrder]) -> list[pa.RecordBatch]:
        """Make a change of each TRUNCATE."""
        return [truncate_changes(truncates, self.schema)] if truncates else []


@dataclass(frozen=True)
class WrittenChanges:
    """Files of changes, as rows of `FILE_SCHEMA`, and the counts of the changes."""

    files: pa.Table
    counts: ChangeCounts


@dataclass(frozen=True)
class ReadableChanges:
    """Changes whose messages can be read without Spark.

    `transformations_and_messages` says how the messages of each relation version are transformed, and has the messages.
    `truncates` has the TRUNCATEs of the table.
    """

    transformations_and_messages: Sequence[tuple[Transformation, MessagesWithoutSpark]]
    truncates: Sequence[TruncateOrder]
    table_slice: TableSlice

    def write_files(self, runner: Runner, folder: str, store: Store) -> WrittenChanges:
        """Let the runner write the changes into files of a folder."""
        parts, table_slice, schema = self._divide_work(runner), self.table_slice, self.table_slice.schema
        truncates, last_part = table_slice.make_truncate_changes(self.truncates), len(parts) - 1

        def write_part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            changes = table_slice.make_changes(
                _iterate_encoded_messages(parts[number]), truncates if number == last_part else (), counts
            )
            yield from write_files(folder, schema, guard(changes), store)
            yield _make_counts_row(counts)

        rows = runner.run(write_part, len(parts))
        is_file = rows["path"].is_valid()
        return WrittenChanges(rows.filter(is_file), _sum_counts(rows.filter(pc.invert(is_file))))

    def count_without_writing(self, runner: Runner) -> ChangeCounts:
        """Make the changes without writing them, to find out whether that raises an error. Returns their counts.

        TRUNCATEs are left out.
        """
        parts, table_slice = self._divide_work(runner), self.table_slice

        def count_part(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            for _ in guard(table_slice.make_changes(_iterate_encoded_messages(parts[number]), (), counts)):
                pass
            yield _make_counts_row(counts)

        return _sum_counts(runner.run(count_part, len(parts)))

    def _divide_work(self, runner: Runner) -> list[Sequence[_MessagesToTransform]]:
        """Divide the work into parts.

        Few changes are one part. Otherwise each part has some row groups of one relation version.
        """
        pieces = [
            (transformation, source)
            for transformation, messages in self.transformations_and_messages
            for source in messages.sources(runner.parallelism)
        ]
        if all(isinstance(messages, FewMessages) for _, messages in self.transformations_and_messages):
            return [pieces]
        return [[piece] for piece in pieces]


@dataclass(frozen=True)
class SentChanges:
    """The changes and TRUNCATEs of a table in a slice, as one subscription gets them."""

    readings: Sequence[Reading]
    truncates: Sequence[TruncateOrder]
    table_slice: TableSlice

    @property
    def readable_changes(self) -> ReadableChanges | None:
        """The same changes in the form that a runner takes. None if only Spark can read some of the messages."""
        transformations_and_messages = [
            (reading.transformation, messages)
            for reading in self.readings
            if (messages := reading.messages.without_spark) is not None
        ]
        if len(transformations_and_messages) < len(self.readings):
            return None
        return ReadableChanges(transformations_and_messages, self.truncates, self.table_slice)

    def count_without_writing(
        self, lake: Lake, columns: Sequence[tuple[str, str]], size_bytes: int
    ) -> ChangeCounts:
        """Make the changes, and keep only their counts. The runner is chosen by `size_bytes`, the size of the messages.

        `columns` are as in `make_rows`.
        """
        if (readable := self.readable_changes) is not None:
            return readable.count_without_writing(lake.policy.choose_runner(size_bytes))
        return ChangeCounts.sum(self.make_rows(lake, columns).notes())

    def make_rows(self, lake: Lake, columns: Sequence[tuple[str, str]]) -> NotedRows:
        """Let Spark make the changes.

        Each Spark task adds its counts of the changes as a note, a text in a row of its own (`with_note`).

        `columns` are the columns of the replica, with their Spark types.
        """
        ddl = f"{format_changes_ddl(columns)}, {NOTE} string"
        table_slice, schema = self.table_slice, self.table_slice.schema
        frames = []
        if self.truncates:
            counts = ChangeCounts()
            changes = table_slice.make_changes((), table_slice.make_truncate_changes(self.truncates), counts)
            rows = pa.Table.from_batches(with_note(changes, schema, counts.to_json))
            frames.append(lake.spark.createDataFrame(rows.to_pylist(), ddl))
        for reading in self.readings:
            messages = reading.messages.frame.select(*ENCODED_COLUMNS)
            frames.append(
                messages.mapInArrow(_make_change_function(table_slice, reading.transformation), ddl)
            )
        return NotedRows(reduce(DataFrame.unionByName, frames))


def count_stored_changes(rows: RowSource[pa.RecordBatch], key: Sequence[str]) -> Tally:
    """Count changes that were stored. `rows` have the columns `COUNTED_COLUMNS`."""

    def count_batches(batches: Iterable[pa.RecordBatch]) -> str:
        tally = empty_tally()
        for batch in batches:
            count_changes(batch, key, tally)
        return json.dumps(tally)

    return sum_tallies(map(json.loads, collect_notes(rows, count_batches)))


def _make_change_function(
    table_slice: TableSlice, transformation: Transformation
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make a function for Spark that converts batches of messages to batches of changes."""

    def make_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = ChangeCounts()
        changes = table_slice.make_changes([(transformation, map(EncodedMessages, batches))], (), counts)
        yield from with_note(changes, table_slice.schema, counts.to_json)

    return make_changes


def _iterate_encoded_messages(
    pieces: Sequence[_MessagesToTransform],
) -> Iterator[tuple[Transformation, Iterable[EncodedMessages]]]:
    return ((transformation, source.encoded()) for transformation, source in pieces)


def _make_counts_row(counts: ChangeCounts) -> pa.RecordBatch:
    """Make the row with the counts of a part. In a result with a row for each file, this is the row without a file."""
    return pa.RecordBatch.from_pylist([{"size": 0, "tally": counts.to_json()}], FILE_SCHEMA)


def _sum_counts(rows: pa.Table) -> ChangeCounts:
    return ChangeCounts.sum(rows["tally"].to_pylist())
