"""The changes of a table in a slice for one subscription, written as files, or made as a DataFrame that Spark writes.

A slice is the changes from one position of the slot to another.

In: readings (messages of relation versions, and how they are transformed), and TRUNCATEs
Out: files, which the caller commits, or a DataFrame

Both forms run `pgsieve.decoding.changes.transform`, and count with `pgsieve.decoding.changes.tally`. The workers of a
runner write files part by part, so each of them has only one row group in memory at a time. Raises the errors of
decoding and of row filters, and OSError.
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

from pgsieve.assets.steps.observations import NOTE, NotedRows, notes_of, with_note
from pgsieve.assets.steps.records.columns import write_changes_ddl
from pgsieve.assets.steps.update_transformation.messages import FewMessages, MessageSource, ReadableMessages
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
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.parts import Guard

#: The order key of a TRUNCATE, and its commit time if the change log has it.
TruncateAt = tuple[int, int, datetime | None]
#: Some messages, and how they are transformed.
_Share = tuple[Transformation, MessageSource]


@dataclass(frozen=True)
class SliceOfTable:
    """Makes and counts the changes of a table in the slice that ends at `end`. It can be sent to executors.

    `schema` is the schema of the changes, and `key` has the columns of the table's key.
    """

    end: int
    key: Sequence[str]
    schema: pa.Schema

    def changes(
        self,
        messages: Iterable[tuple[Transformation, Iterable[EncodedMessages]]],
        truncates: Iterable[pa.RecordBatch],
        counts: ChangeCounts,
    ) -> Iterator[pa.RecordBatch]:
        """Yields the changes that some messages become, and then the TRUNCATEs `truncates`. Counts them in `counts`."""
        message_changes = (
            changes
            for transformation, encoded_messages in messages
            for changes in transformation.changes(encoded_messages, counts.sent_as)
        )
        for batch in chain(message_changes, truncates):
            changes = add_slice(batch, self.end, self.schema)
            count_changes_and_bytes(changes, self.key, counts.sent)
            yield changes

    def emptied(self, truncates: Sequence[TruncateAt]) -> list[pa.RecordBatch]:
        """TRUNCATEs in the form of changes."""
        return [truncate_changes(truncates, self.schema)] if truncates else []


@dataclass(frozen=True)
class WrittenChanges:
    """Files of changes, as rows of `FILE_SCHEMA`, and the counts of the changes."""

    files: pa.Table
    counts: ChangeCounts


@dataclass(frozen=True)
class ReadableChanges:
    """Changes whose messages can be read without Spark.

    `read` has the messages of each relation version, and how they are transformed. The other fields are as in
    `SentChanges`.
    """

    read: Sequence[tuple[Transformation, ReadableMessages]]
    truncates: Sequence[TruncateAt]
    slice: SliceOfTable

    def write(self, runner: Executors, folder: str, store: Store) -> WrittenChanges:
        """Let the runner write the changes into files of a folder."""
        parts, slice_of_table, schema = self._parts(runner), self.slice, self.slice.schema
        truncates, last_part = slice_of_table.emptied(self.truncates), len(parts) - 1

        def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            changes = slice_of_table.changes(
                _encode(parts[number]), truncates if number == last_part else (), counts
            )
            yield from write_files(folder, schema, guard(changes), store)
            yield _counts_row(counts)

        rows = runner.run(write, len(parts))
        is_file = rows["path"].is_valid()
        return WrittenChanges(rows.filter(is_file), _total_counts(rows.filter(pc.invert(is_file))))

    def attempt(self, runner: Executors) -> ChangeCounts:
        """Transform the changes without writing them, to find out whether that raises an error. Returns their counts."""
        parts, slice_of_table = self._parts(runner), self.slice

        def count(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            for _ in guard(slice_of_table.changes(_encode(parts[number]), (), counts)):
                pass
            yield _counts_row(counts)

        return _total_counts(runner.run(count, len(parts)))

    def _parts(self, runner: Executors) -> list[Sequence[_Share]]:
        """Divide the work into parts.

        Few changes are one part. Otherwise each part has some row groups of one relation version.
        """
        shares = [
            (transformation, source)
            for transformation, messages in self.read
            for source in messages.sources(runner.parallelism)
        ]
        if all(isinstance(messages, FewMessages) for _, messages in self.read):
            return [shares]
        return [[share] for share in shares]


@dataclass(frozen=True)
class SentChanges:
    """The changes of a table in a slice that one subscription gets, and its TRUNCATEs."""

    readings: Sequence[Reading]
    truncates: Sequence[TruncateAt]
    slice: SliceOfTable

    @property
    def readable(self) -> ReadableChanges | None:
        """The same changes for a runner. None if only Spark can read some of the messages."""
        transformed_messages = [
            (reading.transformation, messages)
            for reading in self.readings
            if (messages := reading.messages.readable) is not None
        ]
        if len(transformed_messages) < len(self.readings):
            return None
        return ReadableChanges(transformed_messages, self.truncates, self.slice)

    def attempt(self, lake: Lake, columns: Sequence[tuple[str, str]], size: int) -> ChangeCounts:
        """Make the changes with the runner for `size` bytes, and keep only their counts.

        `columns` are as in `rows`.
        """
        if (readable := self.readable) is not None:
            return readable.attempt(lake.policy.choose_runner(size))
        return ChangeCounts.sum(self.rows(lake, columns).notes())

    def rows(self, lake: Lake, columns: Sequence[tuple[str, str]]) -> NotedRows:
        """Let Spark make the changes. The notes are their counts.

        `columns` are the columns of the replica, with their Spark types.
        """
        ddl = f"{write_changes_ddl(columns)}, {NOTE} string"
        slice_of_table, schema = self.slice, self.slice.schema
        frames = []
        if self.truncates:
            counts = ChangeCounts()
            truncate_changes = slice_of_table.changes((), slice_of_table.emptied(self.truncates), counts)
            rows = pa.Table.from_batches(with_note(truncate_changes, schema, counts.to_json))
            frames.append(lake.spark.createDataFrame(rows.to_pylist(), ddl))
        for reading in self.readings:
            messages = reading.messages.frame.select(*ENCODED_COLUMNS)
            frames.append(messages.mapInArrow(_change_maker(slice_of_table, reading.transformation), ddl))
        return NotedRows(reduce(DataFrame.unionByName, frames))


def stored_tally(rows: DataFrame, key: Sequence[str]) -> Tally:
    """The tally of changes that were stored, read by Spark."""

    def count_batches(batches: Iterable[pa.RecordBatch]) -> str:
        tally = empty_tally()
        for batch in batches:
            count_changes(batch, key, tally)
        return json.dumps(tally)

    notes = notes_of(rows.select("operation", "unchanged", *SIDES), count_batches)
    return sum_tallies(map(json.loads, notes))


def _change_maker(
    slice_of_table: SliceOfTable, transformation: Transformation
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Make a function for Spark that converts batches of messages to batches of changes."""

    def make_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = ChangeCounts()
        changes = slice_of_table.changes([(transformation, map(EncodedMessages, batches))], (), counts)
        yield from with_note(changes, slice_of_table.schema, counts.to_json)

    return make_changes


def _encode(shares: Sequence[_Share]) -> Iterator[tuple[Transformation, Iterable[EncodedMessages]]]:
    return ((transformation, source.encoded()) for transformation, source in shares)


def _counts_row(counts: ChangeCounts) -> pa.RecordBatch:
    """A row without a file. It has the counts of the changes in a part, even if none of them is sent."""
    return pa.RecordBatch.from_pylist([{"size": 0, "tally": counts.to_json()}], FILE_SCHEMA)


def _total_counts(rows: pa.Table) -> ChangeCounts:
    return ChangeCounts.sum(rows["tally"].to_pylist())
