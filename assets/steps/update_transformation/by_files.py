"""UPDATE transformation by files: row groups of the change log -> files of what a subscription gets of a table.

In: the stored messages of relation versions, and who executes. Out: files, which the caller commits. Each part decodes some
row groups, so that nobody holds more than one of them at a time. `in_process` says what a subscription gets of a change.
Raises what decoding and row filters do, OSError.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.assets.steps.records.columns import ROW_OPERATIONS
from pgsieve.assets.steps.update_transformation.decoded_batches import (
    ENCODED_COLUMNS,
    AddedColumn,
    FilterColumns,
    count_changes,
    decoded_batches,
)
from pgsieve.assets.steps.update_transformation.in_process import (
    NOTHING,
    Codes,
    Filters,
    as_sent,
    operations_of,
    sent_as,
)
from pgsieve.assets.steps.update_transformation.messages import StoredBatch, StoredMessages
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.resources.lake.delta.parquet_files import WRITTEN, Tally, write_files
from pgsieve.resources.lake.executors import Executors, Guard
from pgsieve.resources.lake.stores.store import RowGroup, Store, parted


@dataclass(frozen=True)
class StoredVersion:
    """The stored messages of a relation version, what is decoded of them, and what the subscription gets of that.

    `read` are the columns that the filters read; None without filters.
    """

    messages: StoredMessages
    columns: RelationColumns
    names: frozenset[str]
    operations: frozenset[str]
    filters: Filters
    added: Sequence[AddedColumn] = ()
    read: FilterColumns | None = None


@dataclass(frozen=True)
class TransformedFiles:
    """Files of changes (rows of `WRITTEN`), and how many changes of each operation came."""

    files: pa.Table
    received: Mapping[str, int]


@dataclass(frozen=True)
class StoredChanges:
    """The changes of a table in some relation versions, and TRUNCATEs, which are changes of `schema` but for the slice.

    `schema` is that of its changes, `key` its key.
    """

    versions: Sequence[StoredVersion]
    key: Sequence[str]
    schema: pa.Schema
    truncates: pa.Table | None = None

    def transformed(
        self, executors: Executors, slice_end: int, folder: str, store: Store
    ) -> TransformedFiles:
        """Have what the subscription gets written into files of a folder as changes of a slice.

        A file's tally counts its changes by operation, its `key_changes`, and by name the columns that some change
        left out as unchanged (`unchanged`).
        """
        parts, key, schema, changes_of = self._parts(executors), self.key, self.schema, self._changes
        truncates = self.truncates.to_batches() if self.truncates is not None else []

        def in_slice(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                ends = pa.array(np.full(batch.num_rows, slice_end, np.int64))
                yield pa.RecordBatch.from_arrays([ends, *batch.columns], schema=schema)

        def count(batch: pa.RecordBatch, tally: Tally) -> None:
            count_changes(batch, key, tally)

        def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            received = Counter[str]()
            changes = changes_of(parts[number], received) if number < len(parts) else iter(truncates)
            yield from write_files(folder, schema, guard(in_slice(changes)), count, store)
            # No file: what came, of which maybe nothing is sent.
            yield pa.RecordBatch.from_pylist([{"size": 0, "tally": json.dumps(received)}], WRITTEN)

        rows = executors.written(write, len(parts) + bool(truncates))
        is_file = rows["path"].is_valid()
        received = Counter[str]()
        for tally in rows.filter(pc.invert(is_file))["tally"].to_pylist():
            received.update(json.loads(tally))
        return TransformedFiles(rows.filter(is_file), {o: received[o] for o in ROW_OPERATIONS})

    def transform(self, executors: Executors) -> None:
        """Have them transformed, and keep nothing: for what that raises."""
        parts, changes_of = self._parts(executors), self._changes

        def transform(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            for _ in guard(changes_of(parts[number], Counter())):
                pass
            yield from ()

        executors.written(transform, len(parts))

    def _parts(self, executors: Executors) -> list["_Part"]:
        return [(v, groups) for v in self.versions for groups in parted(v.messages.groups, executors.number)]

    def _changes(self, part: "_Part", received: Counter[str]) -> Iterator[pa.RecordBatch]:
        """What the subscription gets of a part. Of what a filter lets not pass only the columns are decoded that it reads."""
        version, groups = part
        with version.messages.store.ahead(
            groups, version.messages.batches(groups, ENCODED_COLUMNS)
        ) as batches:
            for batch in batches:
                yield from self._changes_of(batch, version, received)

    def _changes_of(
        self, batch: StoredBatch, version: "StoredVersion", received: Counter[str]
    ) -> Iterator[pa.RecordBatch]:
        key, chosen, becomes = self.key, batch.messages, None
        if version.read is not None:
            becomes = _counted(_filtered(version, version.read, batch, key), version, received)
            is_sent = becomes != NOTHING
            chosen, becomes = chosen.filter(pa.array(is_sent)), becomes[is_sent]
        for changes in decoded_batches([chosen], version.columns, version.names, key, version.added):
            if becomes is None:
                becomes = _counted(changes, version, received)
            yield as_sent(changes, becomes, self.schema)


def _filtered(
    version: StoredVersion, read: FilterColumns, batch: StoredBatch, key: Sequence[str]
) -> pa.RecordBatch:
    """The changes with the columns that filters read, which other subscriptions may read, too."""

    def decoded() -> pa.RecordBatch:
        (changes,) = decoded_batches([batch.messages], read.columns, read.names, key, read.added)
        return changes

    return version.messages.shared.get((batch.key, read), decoded)


def _counted(changes: pa.RecordBatch, version: StoredVersion, received: Counter[str]) -> Codes:
    """What changes are sent as (`sent_as`); counted as received."""
    operation = operations_of(changes)
    for name, count in zip(
        ROW_OPERATIONS, np.bincount(operation, minlength=len(ROW_OPERATIONS)).tolist(), strict=True
    ):
        received[name] += count
    return sent_as(changes, operation, version.filters, version.operations)


_Part = tuple[StoredVersion, Sequence[RowGroup]]
