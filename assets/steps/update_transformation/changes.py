"""A subscription's changes of a table in a slice, written as files, or made as a DataFrame for Spark to write.

In: readings of relation versions, and TRUNCATEs. Out: files, which the caller commits, or a DataFrame. Both
run `pgsieve.decoding.changes.transform`, and count with `pgsieve.decoding.changes.tally`. The runner's workers
write files part by part, so each has only one row group in memory at a time. Raises errors of decoding and of row
filters, OSError.
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
from pgsieve.assets.steps.records.columns import changes_ddl
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

#: The order key of a TRUNCATE, and its commit time where the change log has it.
TruncateAt = tuple[int, int, datetime | None]
#: Some messages, and the transformation for them.
_Share = tuple[Transformation, MessageSource]


@dataclass(frozen=True)
class SliceOfTable:
    """The slice of a table's changes that ends at `end`; it makes and counts them. It is sent to executors.

    `schema` is the schema of the changes, `key` the table's key.
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
        """The changes of some messages, then the TRUNCATEs `truncates`; counts them in `counts`."""
        changes_made = (
            changes
            for transformation, encoded in messages
            for changes in transformation.changes(encoded, counts.sent_as)
        )
        for batch in chain(changes_made, truncates):
            changes = add_slice(batch, self.end, self.schema)
            count_changes_and_bytes(changes, self.key, counts.sent)
            yield changes

    def emptied(self, places: Sequence[TruncateAt]) -> list[pa.RecordBatch]:
        """TRUNCATEs as changes."""
        return [truncate_changes(places, self.schema)] if places else []


@dataclass(frozen=True)
class WrittenChanges:
    """Files of changes (rows of `FILE_SCHEMA`), and their counts."""

    files: pa.Table
    counts: ChangeCounts


@dataclass(frozen=True)
class ReadableChanges:
    """Changes whose messages can be read without Spark; `read` has the messages of each relation version.

    Other fields are as in `SentChanges`.
    """

    read: Sequence[tuple[Transformation, ReadableMessages]]
    truncates: Sequence[TruncateAt]
    slice: SliceOfTable

    def write(self, runner: Executors, folder: str, store: Store) -> WrittenChanges:
        """Let the runner write the changes into files of a folder."""
        parts, of_slice, schema = self._parts(runner), self.slice, self.slice.schema
        truncates, last_part = of_slice.emptied(self.truncates), len(parts) - 1

        def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            made = of_slice.changes(_encode(parts[number]), truncates if number == last_part else (), counts)
            yield from write_files(folder, schema, guard(made), store)
            yield _counts_row(counts)

        rows = runner.run(write, len(parts))
        is_file = rows["path"].is_valid()
        return WrittenChanges(rows.filter(is_file), _total_counts(rows.filter(pc.invert(is_file))))

    def attempt(self, runner: Executors) -> ChangeCounts:
        """Transform the changes without writing them, for the errors that this raises; returns their counts."""
        parts, of_slice = self._parts(runner), self.slice

        def make(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = ChangeCounts()
            for _ in guard(of_slice.changes(_encode(parts[number]), (), counts)):
                pass
            yield _counts_row(counts)

        return _total_counts(runner.run(make, len(parts)))

    def _parts(self, runner: Executors) -> list[Sequence[_Share]]:
        """The parts of the work: a single one for few changes; else each has some row groups of one relation version."""
        shares = [
            (transformation, source)
            for transformation, messages in self.read
            for source in messages.sources(runner.number)
        ]
        if all(isinstance(messages, FewMessages) for _, messages in self.read):
            return [shares]
        return [[share] for share in shares]


@dataclass(frozen=True)
class SentChanges:
    """A subscription's changes of a table in a slice, and its TRUNCATEs."""

    readings: Sequence[Reading]
    truncates: Sequence[TruncateAt]
    slice: SliceOfTable

    @property
    def readable(self) -> ReadableChanges | None:
        """The same changes for a runner; None if only Spark can read some of the messages."""
        read = [
            (reading.transformation, messages)
            for reading in self.readings
            if (messages := reading.messages.readable) is not None
        ]
        if len(read) < len(self.readings):
            return None
        return ReadableChanges(read, self.truncates, self.slice)

    def attempt(self, lake: Lake, columns: Sequence[tuple[str, str]], size: int) -> ChangeCounts:
        """Make the changes with the runner for `size` bytes, and keep only their counts; `columns` as in `rows`."""
        if (readable := self.readable) is not None:
            return readable.attempt(lake.policy.runner(size))
        return ChangeCounts.sum(self.rows(lake, columns).notes())

    def rows(self, lake: Lake, columns: Sequence[tuple[str, str]]) -> NotedRows:
        """Let Spark make the changes; the notes are their counts. `columns` are the replica's, with their Spark types."""
        ddl = f"{changes_ddl(columns)}, {NOTE} string"
        of_slice, schema = self.slice, self.slice.schema
        frames = []
        if self.truncates:
            counts = ChangeCounts()
            truncate_changes = of_slice.changes((), of_slice.emptied(self.truncates), counts)
            rows = pa.Table.from_batches(with_note(truncate_changes, schema, counts.to_json))
            frames.append(lake.spark.createDataFrame(rows.to_pylist(), ddl))
        for reading in self.readings:
            messages = reading.messages.frame.select(*ENCODED_COLUMNS)
            frames.append(messages.mapInArrow(_change_maker(of_slice, reading.transformation), ddl))
        return NotedRows(reduce(DataFrame.unionByName, frames))


def stored_tally(rows: DataFrame, key: Sequence[str]) -> Tally:
    """The tally of stored changes that Spark reads."""

    def counted(batches: Iterable[pa.RecordBatch]) -> str:
        tally = empty_tally()
        for batch in batches:
            count_changes(batch, key, tally)
        return json.dumps(tally)

    notes = notes_of(rows.select("operation", "unchanged", *SIDES), counted)
    return sum_tallies(map(json.loads, notes))


def _change_maker(
    of_slice: SliceOfTable, transformation: Transformation
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for Spark that makes batches of a slice's changes of batches of messages."""

    def made(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = ChangeCounts()
        changes = of_slice.changes([(transformation, map(EncodedMessages, batches))], (), counts)
        yield from with_note(changes, of_slice.schema, counts.to_json)

    return made


def _encode(shares: Sequence[_Share]) -> Iterator[tuple[Transformation, Iterable[EncodedMessages]]]:
    return ((transformation, source.encoded()) for transformation, source in shares)


def _counts_row(counts: ChangeCounts) -> pa.RecordBatch:
    """A row without a file, which has the counts of a part's changes, even if none is sent."""
    return pa.RecordBatch.from_pylist([{"size": 0, "tally": counts.to_json()}], FILE_SCHEMA)


def _total_counts(rows: pa.Table) -> ChangeCounts:
    return ChangeCounts.sum(rows["tally"].to_pylist())
