"""The tasks that read the keys of very many changes, and of the replica's rows.

The keys are divided into parts. For each part there is a task that finds out which rows come and go (`part_deciders`). The
tasks here run first, and send each change and each row in a message to the task of its key. Tasks that get messages are
called receivers. A batch is the changes that one commit applies. A place is a number that orders the changes of a batch.

In: row groups of a change history (the Delta table with all changes of a table), and files of a replica. Out: messages.
Raises OSError, and Arrow's errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.assets.steps.apply.keyless_changes import iterate_digests
from pgsieve.assets.steps.apply.part_messages import (
    TRUNCATES_SENDER,
    number_key_columns,
    pack,
)
from pgsieve.assets.steps.apply.unordered_changes import (
    UnorderedChanges,
    extract_changes,
    list_change_columns,
    split_moves,
)
from pgsieve.decoding.changes.arrays import Mask, Numbers, is_in
from pgsieve.decoding.changes.deleted_rows import DELETED
from pgsieve.decoding.changes.digests import compute_row_digests, find_marks
from pgsieve.decoding.changes.extent import Extent
from pgsieve.decoding.changes.hashes import assign_key_parts, compute_row_marks, hash_keys
from pgsieve.decoding.changes.key_filters import KeyFilter
from pgsieve.decoding.changes.metadata_columns import Metadata, find_metadata_column, mask_living_rows
from pgsieve.resources.lake.delta.deletion_vectors import (
    read_vector,
)
from pgsieve.resources.lake.delta.log import Action
from pgsieve.resources.lake.stores.store import RowGroup, Store, join_path
from pgsieve.resources.parts import Guard, make_message

#: A part of the keys has about this many changes. Larger arrays would not stay in a core's cache.
_PART_CHANGES = 125_000
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class ReplicaFile:
    """A file of the replica: its name in the table's folder, its path in the log, its bytes, and its deletion vector."""

    name: str
    log_path: str
    size_bytes: int
    deletion_vector: Action | None = None


@dataclass(frozen=True)
class BatchParts:
    """What every task needs to know about the batch.

    - `key_schema`: the key's columns
    - `unsent_columns`: the columns that some change did not send
    - `extent`: which changes of the change history the batch has
    - `change_part_count`: the number of parts into which the changes are divided
    - `file_count`: the number of files of the replica
    - `soft_delete_columns`: the metadata columns, if the replica keeps deleted rows
    - `has_moves`: whether an UPDATE may move a row to another key
    - `has_feed`: whether the replica has a change data feed, and the batch may remove rows
    - `row_schema`: the columns of a row if the table has no key; the digest of the whole row is then the key
    - `lost_places`: the places of UPDATEs that move a row to another key, but do not find the row

    The receivers that write are numbered in this order: one for each part of the changes, which writes the new rows of the
    part; one for each file of the replica; and one that passes the results of the parts of the keys on to the driver.
    """

    key_schema: pa.Schema
    unsent_columns: Sequence[str]
    extent: Extent
    change_part_count: int
    file_count: int
    soft_delete_columns: Metadata = ()
    has_moves: bool = False
    has_feed: bool = False
    row_schema: pa.Schema | None = None
    lost_places: Numbers = field(default_factory=lambda: _NO_ROWS)

    @property
    def deleted_column(self) -> str | None:
        """The column that marks deleted rows; None if the replica does not keep them."""
        return find_metadata_column(self.soft_delete_columns, DELETED)

    @property
    def has_unsent_moves(self) -> bool:
        """Whether an UPDATE may move a row to another key and not send all its values."""
        return self.has_moves and bool(self.unsent_columns)

    @property
    def ends_all_rows(self) -> bool:
        """Whether a TRUNCATE ends all rows of a replica that keeps deleted rows."""
        return bool(self.soft_delete_columns) and self.extent.truncated_at is not None

    @property
    def writer_count(self) -> int:
        """The number of receivers that write."""
        return self.change_part_count + self.file_count + 1


@dataclass(frozen=True)
class Division:
    """How the work of a batch with `change_count` changes is divided.

    `key_part_count` is the number of parts of the keys, and `file_task_count` that of the tasks that read the replica's files.
    """

    change_count: int
    key_part_count: int
    file_task_count: int

    @classmethod
    def make(cls, change_count: int, file_count: int, parallelism: int) -> "Division":
        """Divide the work for `parallelism` tasks that run at the same time."""
        key_part_count = max(parallelism, -(-change_count // _PART_CHANGES))
        return cls(change_count, key_part_count, min(file_count, 2 * parallelism))


@dataclass(frozen=True)
class KeyReader:
    """Reads the keys of the changes and of the replica's files, and sends each key to the decider of its part.

    The decider is a `KeyDecider`, or for a table without a key a `MultisetDecider`.

    If there is a `key_filter`, only those rows of the replica are sent whose keys may be among those of the changes.
    """

    batch_parts: BatchParts
    store: Store
    path: str
    change_parts: Sequence[Sequence[RowGroup]]
    files: Sequence[ReplicaFile]
    division: Division
    key_filter: KeyFilter | None = None

    @property
    def task_count(self) -> int:
        """The number of tasks that read."""
        return len(self.change_parts) + self.division.file_task_count

    def __call__(self, number: int, guard: Guard) -> Iterator[pa.RecordBatch]:
        """Send the changes of one part, or the rows of some files. These files are dealt out to the tasks in turn."""
        if number < len(self.change_parts):
            yield from guard(self._send_changes(number))
        else:
            for file_index in range(
                number - len(self.change_parts), len(self.files), self.division.file_task_count
            ):
                yield from guard(self._send_rows(file_index))

    def _send_changes(self, number: int) -> Iterator[pa.RecordBatch]:
        for table in self.read_changes(number):
            changes = self.extract_changes(table)
            rows = self._make_change_rows(table, changes)
            if changes.truncates.num_rows:
                for part in range(self.division.key_part_count):
                    yield make_message(part, TRUNCATES_SENDER, pack(changes.truncates))
                    if self.batch_parts.ends_all_rows:
                        # Rows of a part without changes end, too. The empty table makes its decider work.
                        yield make_message(part, number, pack(rows.slice(0, 0)))
            yield from self._make_messages(number, changes.keys, rows)

    def extract_changes(self, table: pa.Table) -> UnorderedChanges:
        """Extract the batch's changes from rows that `read_changes` has read."""
        batch_parts = self.batch_parts
        columns = (batch_parts.key_schema, batch_parts.unsent_columns)
        metadata = batch_parts.soft_delete_columns
        changes = extract_changes(table, *columns, batch_parts.extent, metadata)
        # The two keys of a move may be in different parts.
        return split_moves(changes, batch_parts.lost_places) if batch_parts.has_moves else changes

    def _make_change_rows(self, _: pa.Table, changes: UnorderedChanges) -> pa.Table:
        """Make a row for each change, with the columns that `ReceivedChanges` of `part_messages` expects.

        The first parameter, which only a subclass uses, has the rows of the change history that `changes` come from.
        """
        rows = number_key_columns(changes.keys).append_column("place", pa.array(changes.places))
        rows = rows.append_column("operation", pa.array(changes.operations))
        for column, is_sent in enumerate(changes.sent_masks):
            rows = rows.append_column(f"sent{column}", pa.array(is_sent))
        for column, values in enumerate(changes.end_metadata.columns):
            rows = rows.append_column(f"m{column}", values)
        if self.batch_parts.extent.truncated_at is not None:
            rows = rows.append_column("lsn", pa.array(changes.commit_lsns))
            rows = rows.append_column("ordinal", pa.array(changes.ordinals))
        return rows

    def read_changes(self, number: int) -> Iterator[pa.Table]:
        """Read a part of the changes: the columns that `extract_changes` needs."""
        batch_parts, groups = self.batch_parts, self.change_parts[number]
        if batch_parts.row_schema is not None:
            for batch in iterate_digests(self.store, groups, batch_parts.row_schema):
                yield pa.Table.from_batches([batch])
            return
        names = self._change_columns
        for _, read in self.store.iterate_group_readers(groups):
            yield read(names)

    @property
    def _change_columns(self) -> Sequence[str]:
        """The columns of the change history that are read for a table with a key."""
        batch_parts = self.batch_parts
        return list_change_columns(
            batch_parts.key_schema, batch_parts.unsent_columns, batch_parts.soft_delete_columns
        )

    def _send_rows(self, file_index: int) -> Iterator[pa.RecordBatch]:
        file, begin = self.files[file_index], 0
        deleted_numbers = read_vector(self.store, self.path, file.deletion_vector)
        deleted_column, row_schema = self.batch_parts.deleted_column, self.batch_parts.row_schema
        for batch in self.store.read_batches(join_path(self.path, file.name), self._row_columns):
            row_numbers = np.arange(begin, begin + batch.num_rows)
            rows, begin = batch, begin + batch.num_rows
            is_sent = self._mask_sent_rows(batch) & ~is_in(row_numbers, deleted_numbers)
            if self.key_filter is not None:
                is_sent &= self.key_filter.mask_passing(self._hash_keys_of_rows(rows))
            if not is_sent.all():
                rows, row_numbers = rows.filter(pa.array(is_sent)), row_numbers[is_sent]
            keys = (
                pa.Table.from_batches([rows]).select(self.batch_parts.key_schema.names)
                if row_schema is None
                else compute_row_digests(rows)
            )
            sent_rows = number_key_columns(keys).append_column("row", pa.array(row_numbers))
            sent_rows = sent_rows.append_column("is_living", mask_living_rows(rows, deleted_column))
            yield from self._make_messages(len(self.change_parts) + file_index, keys, sent_rows)

    def hash_keys(self, keys: pa.Table) -> npt.NDArray[np.uint64]:
        """Hash the keys of changes for the `key_filter`."""
        return hash_keys(keys) if self.batch_parts.row_schema is None else find_marks(keys).astype(np.uint64)

    def _hash_keys_of_rows(self, rows: pa.RecordBatch) -> npt.NDArray[np.uint64]:
        """Hash the keys of the replica's rows as `hash_keys` does.

        Without a key, a digest begins with a short hash of the row, its mark. The mark alone takes less time.
        """
        if self.batch_parts.row_schema is not None:
            return compute_row_marks(rows).astype(np.uint64)
        return hash_keys(pa.Table.from_batches([rows]).select(self.batch_parts.key_schema.names))

    @property
    def _row_columns(self) -> pa.Schema:
        """The columns that are read from files of the replica."""
        batch_parts = self.batch_parts
        schema = batch_parts.key_schema if batch_parts.row_schema is None else batch_parts.row_schema
        deleted_column = batch_parts.deleted_column
        return schema if deleted_column is None else schema.append(pa.field(deleted_column, pa.bool_()))

    def _mask_sent_rows(self, rows: pa.RecordBatch) -> Mask:
        """Return the mask of the rows of a file that are sent. Rows that a deletion vector marks are never sent."""
        return np.ones(rows.num_rows, np.bool_)

    def _make_messages(self, sender: int, keys: pa.Table, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield a message for each part of the keys, which has the rows of this part."""
        # NumPy sorts numbers of two bytes by a radix sort, which is faster.
        parts_of_rows = assign_key_parts(keys, self.division.key_part_count).astype(np.uint16)
        order = np.argsort(parts_of_rows, kind="stable")
        rows = rows.take(pa.array(order)).combine_chunks()
        ends = np.cumsum(np.bincount(parts_of_rows, minlength=self.division.key_part_count)).tolist()
        for receiver, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if begin < end:
                yield make_message(receiver, sender, pack(rows.slice(begin, end - begin)))
