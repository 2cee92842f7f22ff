"""A subscription's changes of a table in a slice, written as files, or made as a DataFrame for Spark to write.

In: readings of relation versions, and TRUNCATEs. Out: files, which the caller commits, or a DataFrame. Both
use `pgsieve.decoding.changes.transform`. The runner's workers write the files part by part, so each has only one
row group in memory at a time. Raises errors of decoding and of row filters, OSError.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from itertools import product

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.records.columns import changes_ddl
from pgsieve.assets.steps.update_transformation.messages import FewMessages, MessageSource, ReadableMessages
from pgsieve.assets.steps.update_transformation.relation_versions import Reading
from pgsieve.decoding.changes.columns import ENCODED_COLUMNS, ROW_OPERATIONS, SIDES
from pgsieve.decoding.changes.sent_as import SentAs, SentCounts, counts_from_rows, counts_to_rows, sum_counts
from pgsieve.decoding.changes.tally import Tally, count_changes_and_bytes, key_changes
from pgsieve.decoding.changes.transform import EncodedMessages, Transformation, add_slice, truncate_changes
from pgsieve.resources.lake.delta.parquet_files import FILE_SCHEMA, write_files
from pgsieve.resources.lake.executors import Executors
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.store import Store
from pgsieve.resources.parts import Guard

#: Columns that Spark counts and does not write: whether a change moves its row to another key, and the received operation.
MOVES, CAME_AS = "moves", "came_as"
#: The order key of a TRUNCATE (commit LSN, ordinal), and its commit time, None if the change log does not have it.
TruncateAt = tuple[int, int, datetime | None]
#: Some messages, and the transformation for them.
_Share = tuple[Transformation, MessageSource]


@dataclass(frozen=True)
class WrittenChanges:
    """Files of changes (rows of `FILE_SCHEMA`), and the numbers of received changes by the operations that they are sent as."""

    files: pa.Table
    sent_as: SentCounts


@dataclass(frozen=True)
class ReadableChanges:
    """Changes whose messages can be read without Spark; `read` has the messages of each relation version.

    Other fields are as in `SentChanges`.
    """

    read: Sequence[tuple[Transformation, ReadableMessages]]
    truncates: Sequence[TruncateAt]
    end: int
    key: Sequence[str]
    schema: pa.Schema

    def write(self, runner: Executors, folder: str, store: Store) -> WrittenChanges:
        """Let the runner write the changes into files of a folder.

        A file's tally counts its changes by operation, their `bytes`, its `key_changes`, and by name the columns that
        some change left out as unchanged (`unchanged`).
        """
        parts, end, key, schema = self._parts(runner), self.end, self.key, self.schema
        emptied = [truncate_changes(self.truncates, schema)] if self.truncates else []
        last = len(parts) - 1

        def count(batch: pa.RecordBatch, tally: Tally) -> None:
            count_changes_and_bytes(batch, key, tally)

        def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = Counter[SentAs]()

            def rows() -> Iterator[pa.RecordBatch]:
                for batch in _changes(parts[number], counts):
                    yield add_slice(batch, end, schema)
                for batch in emptied if number == last else ():
                    yield add_slice(batch, end, schema)

            yield from write_files(folder, schema, guard(rows()), count, store)
            yield _counts_row(counts)

        rows = runner.run(write, len(parts))
        is_file = rows["path"].is_valid()
        return WrittenChanges(rows.filter(is_file), _total_counts(rows.filter(pc.invert(is_file))))

    def attempt(self, runner: Executors) -> SentCounts:
        """Transform the changes without writing them, for the errors that this raises; returns their counts."""
        parts = self._parts(runner)

        def make(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            counts = Counter[SentAs]()
            for _ in guard(_changes(parts[number], counts)):
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
    """A subscription's changes of a table in the slice that ends at `end`, and its TRUNCATEs.

    `schema` is the schema of the changes, `key` has the names of the replica's key columns.
    """

    readings: Sequence[Reading]
    truncates: Sequence[TruncateAt]
    end: int
    key: Sequence[str]
    schema: pa.Schema

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
        return ReadableChanges(read, self.truncates, self.end, self.key, self.schema)

    def attempt(self, lake: Lake, columns: Sequence[tuple[str, str]], size: int) -> SentCounts:
        """Transform the changes without writing them; returns their counts.

        The runner is chosen for `size` bytes. `columns` is as in `frame`.
        """
        if (readable := self.readable) is not None:
            return readable.attempt(lake.policy.runner(size))
        made = self.frame(lake, columns)
        made.rows.write.format("noop").mode("overwrite").save()
        return made.sent_as()

    def frame(self, lake: Lake, columns: Sequence[tuple[str, str]]) -> "ChangesFrame":
        """The changes as a DataFrame; `columns` are the replica's columns with their Spark types."""
        ddl = f"{changes_ddl(columns)}, {MOVES} boolean, {CAME_AS} string"
        session, observed = lake.spark, list[_ObservedReading]()
        places = [
            (self.end, lsn, ordinal, None, time, "truncate", None, None, None, False, None)
            for lsn, ordinal, time in self.truncates
        ]
        frames = [session.createDataFrame(places, ddl)] if places else []
        for reading in self.readings:
            observed.append(_ObservedReading(reading.transformation))
            messages = observed[-1].of_messages(reading.messages.frame)
            made = messages.select(*ENCODED_COLUMNS).mapInArrow(
                _change_maker(reading.transformation, self.end), ddl
            )
            frames.append(observed[-1].of_changes(made))
        return ChangesFrame(reduce(DataFrame.unionByName, frames), observed)


@dataclass(frozen=True)
class ChangesFrame:
    """Changes as a DataFrame with the columns `MOVES` and `CAME_AS`; their counts are known after an action on the rows."""

    rows: DataFrame
    observed: Sequence["_ObservedReading"]

    def sent_as(self) -> SentCounts:
        """The numbers of received changes by the operations that they are sent as."""
        return sum_counts(*(each.counts() for each in self.observed))


class _ObservedReading:
    """Counts the messages of a reading, and the changes that are sent for them, while Spark processes them."""

    def __init__(self, transformation: Transformation) -> None:
        self._origin = transformation.origin
        # The kind of an observation depends on the session, which exists by now.
        self._came, self._sent = Observation(), Observation()

    def of_messages(self, messages: DataFrame) -> DataFrame:
        """The messages, which are counted when Spark processes them."""
        counts = [F.count_if(F.col("kind") == o[0].upper()).alias(o) for o in ROW_OPERATIONS]
        return messages.observe(self._came, *counts)

    def of_changes(self, changes: DataFrame) -> DataFrame:
        """The changes, which are counted when Spark processes them."""
        counts = [
            F.count_if((F.col(CAME_AS) == came) & (F.col("operation") == sent)).alias(f"{came} {sent}")
            for came, sent in product(ROW_OPERATIONS, repeat=2)
        ]
        return changes.observe(self._sent, *counts)

    def counts(self) -> SentCounts:
        """The counts; a message without a change counts as not sent."""
        came, sent, counts = self._came.get, self._sent.get, Counter[SentAs]()
        for operation in ROW_OPERATIONS:
            not_sent = came.get(operation) or 0
            for kind in ROW_OPERATIONS:
                if count := sent.get(f"{operation} {kind}") or 0:
                    counts[self._origin.sent_as(operation, kind)] = count
                    not_sent -= count
            if not_sent > 0:
                counts[self._origin.sent_as(operation, None)] = not_sent
        return counts


def written_changes(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Changes that are already written, in the columns that `spark_tally` counts."""

    def counted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.select(["operation", "unchanged"]).append_column(MOVES, key_changes(batch, key))

    return rows.select("operation", "unchanged", *SIDES).mapInArrow(
        counted, f"operation string, unchanged array<string>, {MOVES} boolean"
    )


def spark_tally() -> list[Column]:
    """Spark's aggregates that make the tally of changes."""
    return [
        *(F.count_if(F.col("operation") == operation).alias(operation) for operation in ROW_OPERATIONS),
        F.count_if(F.col(MOVES)).alias("key_changes"),
        # As a text, since Spark 4.0 observes an array as a Java object.
        F.to_json(F.array_distinct(F.flatten(F.collect_set("unchanged")))).alias("unchanged"),
    ]


def _change_maker(
    transformation: Transformation, end: int
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for Spark that makes batches of a slice's changes of batches of messages."""
    key, schema = transformation.key, transformation.schema

    def made(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for changes, came_as in transformation.changes_with_operations(
            map(EncodedMessages, batches), Counter()
        ):
            moves = key_changes(changes, key)
            yield add_slice(changes, end, schema).append_column(MOVES, moves).append_column(CAME_AS, came_as)

    return made


def _changes(shares: Sequence[_Share], counts: Counter[SentAs]) -> Iterator[pa.RecordBatch]:
    for transformation, source in shares:
        yield from transformation.changes(source.encoded(), counts)


def _counts_row(counts: SentCounts) -> pa.RecordBatch:
    """A row without a file, which has the counts of a part's changes, even if none is sent."""
    return pa.RecordBatch.from_pylist([{"size": 0, "tally": json.dumps(counts_to_rows(counts))}], FILE_SCHEMA)


def _total_counts(rows: pa.Table) -> SentCounts:
    return sum_counts(*(counts_from_rows(json.loads(tally)) for tally in rows["tally"].to_pylist()))
