"""Messages of the change log: reads them into memory if they are few, else by row groups of files, or by Spark.

The change log is a Delta table that has the messages of a replication slot as pgoutput sends them, one per row.

In: slices of a change log (changes from one position of the slot to another), and filters that choose some messages
Out: an Arrow table in the order of the messages, or row groups of files, or a DataFrame. A Spark session is
     started at the first use of the DataFrame, or by `open_messages` if only Spark can read the messages.

Raises LakeError if a slice cannot be read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.decoding.changes.columns import ENCODED_COLUMNS
from pgsieve.decoding.changes.decode import FilterColumns
from pgsieve.decoding.changes.transform import EncodedMessages
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.stores.batch_cache import BatchCache, get_batch_cache
from pgsieve.resources.lake.stores.store import Reader, RowGroup, Store, divide_groups

#: The ordinal of a change is its number in the transaction. This one is smaller than those of all changes.
FIRST_ORDINAL = -1
_TRUNCATE = "T"
_CHANGES = ("I", "U", "D")
#: The columns that a `MessageFilter` needs to select messages.
_FILTER_COLUMNS = ("slice", "commit_lsn", "ordinal", "kind", "relation_id")


@dataclass(frozen=True)
class MessageFilter:
    """Selects messages by their order keys (commit LSN, ordinal), their transaction and their relation.

    - `after_order`, `before_order`: selects messages between these order keys
    - `excluded_lsn`: the commit LSN of a transaction whose messages are left out
    - `relations`: the oids of relations. Only INSERTs, UPDATEs and DELETEs of these are selected.

    A field that is None selects all messages.
    """

    after_order: OrderKey | None = None
    before_order: OrderKey | None = None
    excluded_lsn: int | None = None
    relations: frozenset[int] | None = None

    def filter_frame(self, messages: DataFrame) -> DataFrame:
        """Select messages of a DataFrame, by Spark."""
        rows, lsn = messages, F.col("commit_lsn")
        # `_filter_batches` selects the messages. The other conditions only let Spark skip files by their statistics.
        if self.relations is not None:
            rows = rows.where(F.col("relation_id").isin(sorted(self.relations)))
        if self.after_order is not None:
            rows = rows.where(lsn >= self.after_order[0])
        if self.before_order is not None:
            rows = rows.where(lsn <= self.before_order[0])
        return rows.mapInArrow(partial(_filter_batches, self), rows.schema)

    def filter_table(self, messages: pa.Table) -> pa.Table:
        """Select messages of a table, in this process."""
        return messages.filter(pa.array(self.make_mask(messages)))

    def make_mask(self, messages: pa.Table | pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Make an array that is True for each message that is selected."""
        lsn, ordinal = (np.asarray(messages[name]) for name in ("commit_lsn", "ordinal"))
        is_chosen = np.ones(messages.num_rows, np.bool_)
        if self.relations is not None:
            is_of_relation = pc.is_in(messages["relation_id"], pa.array(sorted(self.relations), pa.int64()))
            is_chosen &= np.asarray(is_of_relation) & np.asarray(
                pc.is_in(messages["kind"], pa.array(_CHANGES))
            )
        if self.after_order is not None:
            is_chosen &= (lsn > self.after_order[0]) | (lsn == self.after_order[0]) & (
                ordinal > self.after_order[1]
            )
        if self.before_order is not None:
            is_chosen &= (lsn < self.before_order[0]) | (lsn == self.before_order[0]) & (
                ordinal < self.before_order[1]
            )
        if self.excluded_lsn is not None:
            is_chosen &= lsn != self.excluded_lsn
        return is_chosen


def _filter_batches(
    message_filter: MessageFilter, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.filter(pa.array(message_filter.make_mask(batch)))


@dataclass(frozen=True)
class StoredBatch:
    """Messages of a row group. Batches with equal `key` have equal messages, so several readers may share them."""

    messages: pa.RecordBatch
    key: Hashable


@dataclass(frozen=True)
class StoredMessages:
    """Messages in row groups of a change log, which can be sent to executors.

    They are the messages that all `filters` select in the slices that end at `slice_ends`.
    """

    store: Store
    groups: Sequence[RowGroup]
    slice_ends: frozenset[int]
    filters: tuple[MessageFilter, ...] = ()
    batch_cache: BatchCache = field(default_factory=partial(BatchCache, 0), compare=False, repr=False)

    def sources(self, parallelism: int) -> "list[MessageSource]":
        """Divide the messages into parts of limited size, of which `parallelism` are transformed at the same time."""
        return [_RowGroupMessages(self, groups) for groups in divide_groups(self.groups, parallelism)]

    def batches(self, groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[StoredBatch]:
        """Yields some columns of the messages in some row groups, in order.

        If no message of a group is selected, only the columns `_FILTER_COLUMNS` of this group are read.
        """
        for group, read in self.store.iterate_group_readers(groups):
            group_key, names = (group.file, group.number), tuple(columns)
            mask = self.batch_cache.get(
                (group_key, self.slice_ends, self.filters), partial(self._read_mask, read, group_key)
            ).column(0)
            if not mask.true_count:
                continue
            # Equal masks select equal messages, even if the filters differ.
            key = (group_key, names, mask.buffers()[1].to_pybytes())
            yield StoredBatch(self.batch_cache.get(key, partial(_read_rows, read, names, mask)), key)

    def _read_mask(self, read: Reader, group_key: Hashable) -> pa.RecordBatch:
        """Return a batch whose only column is True for each selected message of a row group."""
        batch = self.batch_cache.get(
            (group_key, _FILTER_COLUMNS), partial(_read_batch, read, _FILTER_COLUMNS)
        )
        mask = np.logical_or.reduce([np.asarray(batch["slice"]) == end for end in self.slice_ends])
        for message_filter in self.filters:
            mask &= message_filter.make_mask(batch)
        return pa.RecordBatch.from_arrays([pa.array(mask)], ["chosen"])


def _read_rows(read: Reader, columns: Sequence[str], mask: pa.BooleanArray) -> pa.RecordBatch:
    rows = _read_batch(read, columns)
    return rows if mask.true_count == len(mask) else rows.filter(mask)


def _read_batch(read: Reader, columns: Sequence[str]) -> pa.RecordBatch:
    """Read some columns of a row group as one batch."""
    rows = read(columns)
    return pa.RecordBatch.from_arrays(
        [column.combine_chunks() for column in rows.columns], schema=rows.schema
    )


class MessageSource(Protocol):
    """A part of the messages, which one worker transforms. It can be sent to executors."""

    def encoded(self) -> Iterator[EncodedMessages]:
        """Yields the messages, batch by batch."""


@dataclass(frozen=True)
class FewMessages:
    """Messages in the memory of this process."""

    table: pa.Table

    def sources(self, _: int) -> "list[MessageSource]":
        """All messages as one part."""
        return [self]

    def encoded(self) -> Iterator[EncodedMessages]:
        """Yields the messages, batch by batch."""
        yield from map(EncodedMessages, self.table.select(ENCODED_COLUMNS).combine_chunks().to_batches())


@dataclass(frozen=True)
class _RowGroupMessages:
    """The messages in some row groups."""

    messages: StoredMessages
    groups: Sequence[RowGroup]

    def encoded(self) -> Iterator[EncodedMessages]:
        """Yields the messages, batch by batch.

        The columns that row filters read are decoded once for each batch. All subscriptions that need them share the
        result.
        """
        stored_batches = self.messages.batches(self.groups, ENCODED_COLUMNS)
        with self.messages.store.prefetch(self.groups, stored_batches) as batches:
            for batch in batches:
                yield EncodedMessages(
                    batch.messages, partial(_share_filter_columns, self.messages.batch_cache, batch.key)
                )


def _share_filter_columns(
    batch_cache: BatchCache,
    batch_key: Hashable,
    filter_columns: FilterColumns,
    decode: Callable[[], pa.RecordBatch],
) -> pa.RecordBatch:
    """Return the columns of a batch of messages that row filters read, from the cache or by calling `decode`."""
    return batch_cache.get((batch_key, filter_columns), decode)


#: Messages that can be read without Spark.
MessagesWithoutSpark = FewMessages | StoredMessages


class Messages:
    """Messages of the change log, in each form in which they can be read.

    - `table`: the messages if they are few; otherwise None
    - `stored`: the messages if they are many, and executors can read their files; otherwise None
    - `frame`: the messages for Spark. The DataFrame is made only when it is used.
    """

    def __init__(
        self,
        frame: Callable[[], DataFrame],
        table: pa.Table | None = None,
        stored: StoredMessages | None = None,
    ) -> None:
        self._frame, self.table, self.stored = cache(frame), table, stored

    @property
    def frame(self) -> DataFrame:
        """The messages for Spark."""
        return self._frame()

    @property
    def without_spark(self) -> MessagesWithoutSpark | None:
        """The messages in memory or in stored files. None if only Spark can read them."""
        return self.stored if self.table is None else FewMessages(self.table)

    def apply_filter(self, message_filter: MessageFilter) -> "Messages":
        """The messages that the filter selects."""
        table = None if self.table is None else message_filter.filter_table(self.table)
        stored = self.stored and replace(self.stored, filters=(*self.stored.filters, message_filter))
        return Messages(lambda: message_filter.filter_frame(self.frame), table, stored)

    def count_changes(self) -> Mapping[int, int]:
        """Count the changes of each relation. The result is empty if the messages are few, or if only Spark can read them."""
        counts = Counter[int]()
        if self.table is None and self.stored is not None:
            for batch in self.stored.batches(self.stored.groups, ("kind", "relation_id")):
                changes = batch.messages.filter(pc.is_in(batch.messages["kind"], pa.array(_CHANGES)))
                relations, relation_counts = pc.value_counts(changes["relation_id"]).flatten()
                counts.update(dict(zip(relations.to_pylist(), relation_counts.to_pylist(), strict=True)))
        return counts

    def read_few(self, relations: frozenset[int], is_small: Callable[[int], bool]) -> "Messages | None":
        """Read the changes of some relations into memory.

        Returns None if they have too many bytes, if there are none, or if they are not in stored files.
        """
        if self.stored is None:
            return None
        message_filter, size, rows = MessageFilter(relations=relations), 0, list[pa.RecordBatch]()
        stored = replace(self.stored, filters=(*self.stored.filters, message_filter))
        for batch in stored.batches(
            stored.groups, tuple(dict.fromkeys((*_FILTER_COLUMNS, *ENCODED_COLUMNS)))
        ):
            rows.append(batch.messages)
            size += pc.sum(pc.binary_length(batch.messages["data"])).as_py() or 0
            if not is_small(size):
                return None
        return (
            Messages(lambda: message_filter.filter_frame(self.frame), pa.Table.from_batches(rows))
            if rows
            else None
        )

    def read_commit_lsns(self) -> list[int]:
        """The distinct commit LSNs of the messages, in ascending order."""
        if self.table is None and self.stored is not None:
            batches = self.stored.batches(self.stored.groups, ["commit_lsn"])
            return sorted(
                {lsn for batch in batches for lsn in pc.unique(batch.messages.column(0)).to_pylist()}
            )
        lsns = self.frame.select("commit_lsn").distinct().toArrow() if self.table is None else self.table
        return sorted(pc.unique(lsns["commit_lsn"]).to_pylist())

    def read_truncate_times(self) -> Mapping[int, datetime]:
        """Maps the commit LSN of each TRUNCATE to its commit time."""
        columns = ("commit_lsn", "commit_time", "kind")
        if self.table is not None:
            batches: Iterator[pa.RecordBatch] = iter(self.table.select(columns).to_batches())
        elif self.stored is not None:
            batches = (batch.messages for batch in self.stored.batches(self.stored.groups, columns))
        else:
            batches = iter(
                self.frame.select(*columns).where(F.col("kind") == _TRUNCATE).toArrow().to_batches()
            )
        truncates = (batch.filter(pc.equal(batch["kind"], _TRUNCATE)) for batch in batches)
        return {
            lsn: time
            for batch in truncates
            for lsn, time in zip(*(batch[name].to_pylist() for name in columns[:2]), strict=True)
        }

    @contextmanager
    def persist_frame(self) -> Iterator["Messages"]:
        """Within the block, Spark persists the messages, so that it reads their files once. Without Spark the block does nothing."""
        persisted_frames: list[DataFrame] = []

        def frame() -> DataFrame:
            persisted_frames.append(self.frame.persist())
            return persisted_frames[0]

        try:
            yield Messages(frame, self.table, self.stored)
        finally:
            for persisted_frame in persisted_frames:
                persisted_frame.unpersist()


def open_messages(lake: Lake, path: str, ends: Collection[int], size: int | None) -> Messages:
    """Open the messages of the slices that end at `ends`, in the change log at `path`.

    `size` is their number of bytes; None if it is not known. Raises DamagedTableError if a slice is lost.
    """
    table = lake.read_slice_rows(path, ends, size, must_exist=True)

    def frame() -> DataFrame:
        return lake.read_slices(path, ends, must_exist=True)

    if table is not None:
        return Messages(frame, table)
    # The slices are looked up now, so that a lost slice is reported by this call.
    if (stored := lake.find_stored_slices(path, ends, must_exist=True)) is not None:
        return Messages(
            frame,
            stored=StoredMessages(
                lake.store, stored.row_groups, frozenset(ends), batch_cache=get_batch_cache()
            ),
        )
    messages = frame()
    return Messages(lambda: messages)
