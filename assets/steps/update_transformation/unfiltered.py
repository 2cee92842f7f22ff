"""UPDATE transformation of many changes that no row filter has to see: row groups of the change log -> files of changes.

In: the stored messages of relation versions, and who executes. Out: files, which the caller commits. Each part decodes some
row groups, so that nobody holds more than one of them at a time. Raises what decoding does, OSError.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.update_transformation.decoded_batches import (
    ENCODED_COLUMNS,
    count_changes,
    decoded_batches,
)
from pgsieve.assets.steps.update_transformation.messages import StoredMessages
from pgsieve.decoding.protocol.tuples import RelationColumns
from pgsieve.resources.lake.delta.parquet_files import Tally, write_files
from pgsieve.resources.lake.executors import Executors, Guard
from pgsieve.resources.lake.stores.store import RowGroup, Store, parted


@dataclass(frozen=True)
class UnfilteredChanges:
    """The changes of a table in some relation versions, as they are; `schema` is that of its changes, `key` its key."""

    versions: Sequence[tuple[StoredMessages, RelationColumns]]
    key: Sequence[str]
    schema: pa.Schema

    def files(self, executors: Executors, slice_end: int, folder: str, store: Store) -> pa.Table:
        """Have them written into files of a folder as changes of a slice; one row (`WRITTEN`) a file.

        A file's tally counts its changes by operation, its `key_changes`, and by name the columns that some change
        left out as unchanged (`unchanged`).
        """
        parts, key, schema, decoded = self._parts(), self.key, self.schema, self._decoded

        def rows(part: _Part) -> Iterator[pa.RecordBatch]:
            for batch in decoded(part):
                ends = pa.array(np.full(batch.num_rows, slice_end, np.int64))
                yield pa.RecordBatch.from_arrays([ends, *batch.columns], schema=schema)

        def count(batch: pa.RecordBatch, tally: Tally) -> None:
            count_changes(batch, key, tally)

        def write(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            return write_files(folder, schema, guard(rows(parts[number])), count, store)

        return executors.written(write, len(parts))

    def decode(self, executors: Executors) -> None:
        """Have them decoded, and keep nothing: for what that raises."""
        parts, decoded = self._parts(), self._decoded

        def decode(number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
            for _ in guard(decoded(parts[number])):
                pass
            yield from ()

        executors.written(decode, len(parts))

    def _parts(self) -> list["_Part"]:
        return [
            (messages, columns, groups)
            for messages, columns in self.versions
            for groups in parted(messages.groups)
        ]

    def _decoded(self, part: "_Part") -> Iterator[pa.RecordBatch]:
        messages, columns, groups = part
        names = frozenset(self.schema.field("new").type.names)
        return decoded_batches(messages.batches(groups, ENCODED_COLUMNS), columns, names, self.key)


_Part = tuple[StoredMessages, RelationColumns, Sequence[RowGroup]]
