"""Messages of the change log: in memory if they are few, otherwise in row groups of files, or in a DataFrame of Spark.

The change log is a Delta table that has the messages of a replication slot as pgoutput sends them, one per row.

In: slices of a change log (changes from one position of the slot to another), and filters that choose some messages
Out: an object with the interface `Messages`. `open_messages` chooses it, and only the DataFrame needs Spark.

Raises LakeError if a slice cannot be read.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - Spark's own convention

from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA
from pgsieve.assets.steps.records.columns import OrderKey
from pgsieve.decoding.changes.columns import ENCODED_COLUMNS
from pgsieve.decoding.changes.decode import FilterColumns
from pgsieve.decoding.changes.transform import EncodedMessages
from pgsieve.resources.lake.delta.slices import SparkSlices, StoredSlices
from pgsieve.resources.lake.in_process_runners import CALLING_THREAD
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.lake.row_sources import RowSource, SparkRows, SparkSource, StoredSource
from pgsieve.resources.lake.runners import Runner
from pgsieve.resources.lake.stores.batch_cache import BatchCache, get_batch_cache
from pgsieve.resources.lake.stores.store import Reader, RowGroup, Store, divide_groups
from pgsieve.resources.parts import Guard

#: The ordinal of a change is its number in the transaction. This one is smaller than those of all changes.
FIRST_ORDINAL = -1
_TRUNCATE = "T"
_CHANGES = ("I", "U", "D")
#: The columns that a `MessageFilter` needs to select messages.
_FILTER_COLUMNS = ("slice", "commit_lsn", "ordinal", "kind", "relation_id")

_COUNT_SCHEMA = pa.schema({"relation_id": pa.int64(), "count": pa.int64()})
_LSN_SCHEMA = pa.schema([CHANGE_LOG_SCHEMA.field("commit_lsn")])
_TRUNCATE_SCHEMA = pa.schema([CHANGE_LOG_SCHEMA.field(name) for name in ("commit_lsn", "commit_time")])


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


#: The messages that a filter selects, with the number of the filter; or the end mark.
NumberedMessages = tuple[int, Iterable[EncodedMessages]]
#: Stands for the number of a filter at the end of all messages.
END_MARK = -1
_END: NumberedMessages = (END_MARK, ())


class Messages(Protocol):
    """Messages of the change log, wherever they are."""

    #: Whether `read_few` can read the messages of few relations into memory.
    can_read_few: ClassVar[bool]

    def apply_filter(self, message_filter: MessageFilter) -> "Messages":
        """The messages that the filter selects."""

    def open_columns(self, columns: Sequence[str]) -> RowSource[pa.RecordBatch]:
        """Some columns of the messages."""

    def open_encoded(
        self, filters: Sequence[MessageFilter], runner: Runner, *, has_end_mark: bool
    ) -> RowSource[NumberedMessages]:
        """The messages that each filter selects, with the number of the filter. A part has messages of several filters.

        With `has_end_mark`, one of the parts ends with the end mark. `runner` is the runner of the source, if Spark need not
        read the messages.
        """

    def read_few(self, relations: frozenset[int], is_small: Callable[[int], bool]) -> "Messages":
        """Read the changes of some relations into memory.

        Returns the messages themselves if the changes have too many bytes, or if there are none.
        """

    def persist(self) -> AbstractContextManager["Messages"]:
        """Within the block Spark reads the messages only once. Messages that Spark does not read stay as they are."""


@dataclass(frozen=True)
class FewMessages:
    """Messages in the memory of this process, in their order."""

    table: pa.Table
    can_read_few: ClassVar[bool] = False

    def apply_filter(self, message_filter: MessageFilter) -> "FewMessages":
        """The messages that the filter selects."""
        return FewMessages(message_filter.filter_table(self.table))

    def open_columns(self, columns: Sequence[str]) -> RowSource[pa.RecordBatch]:
        """Some columns of the messages."""
        batches = self.table.select(list(columns)).to_batches()
        return StoredSource([lambda guard: guard(batches)], CALLING_THREAD)

    def open_encoded(
        self, filters: Sequence[MessageFilter], runner: Runner, *, has_end_mark: bool
    ) -> RowSource[NumberedMessages]:
        """The messages that each filter selects, as one part."""
        tables = [message_filter.filter_table(self.table) for message_filter in filters]
        return StoredSource([partial(_encode_tables, tables, has_end_mark)], runner)

    def read_few(
        self,
        relations: frozenset[int],  # noqa: ARG002 - as the protocol has it
        is_small: Callable[[int], bool],  # noqa: ARG002
    ) -> "FewMessages":
        """The messages themselves, because they are in memory."""
        return self

    def persist(self) -> AbstractContextManager["FewMessages"]:
        """The messages as they are."""
        return nullcontext(self)


def _encode_tables(
    tables: Sequence[pa.Table], has_end_mark: bool, guard: Guard
) -> Iterator[NumberedMessages]:
    for number, table in enumerate(tables):
        batches = table.select(ENCODED_COLUMNS).combine_chunks().to_batches()
        yield number, map(EncodedMessages, guard(batches))
    if has_end_mark:
        yield _END


@dataclass(frozen=True)
class StoredBatch:
    """Messages of a row group. Batches with equal `key` have equal messages, so several readers may share them."""

    messages: pa.RecordBatch
    key: Hashable


@dataclass(frozen=True)
class StoredSelection:
    """Selects messages of row groups: those that all `filters` select in the slices that end at `slice_ends`.

    It can be sent to executors. So its methods use nothing that only the driver has.
    """

    store: Store
    slice_ends: frozenset[int]
    filters: tuple[MessageFilter, ...] = ()
    batch_cache: BatchCache = field(default_factory=partial(BatchCache, 0), compare=False, repr=False)

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


@dataclass(frozen=True)
class StoredMessages:
    """Messages in row groups of a change log."""

    groups: Sequence[RowGroup]
    selection: StoredSelection
    can_read_few: ClassVar[bool] = True

    def apply_filter(self, message_filter: MessageFilter) -> "StoredMessages":
        """The messages that the filter selects."""
        filters = (*self.selection.filters, message_filter)
        return replace(self, selection=replace(self.selection, filters=filters))

    def open_columns(self, columns: Sequence[str]) -> RowSource[pa.RecordBatch]:
        """Some columns of the messages."""
        return StoredSource([lambda guard: guard(self._read_batches(columns))], CALLING_THREAD)

    def _read_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return (batch.messages for batch in self.selection.batches(self.groups, columns))

    def open_encoded(
        self, filters: Sequence[MessageFilter], runner: Runner, *, has_end_mark: bool
    ) -> RowSource[NumberedMessages]:
        """The messages that each filter selects. Each part has some row groups, and one filter."""
        pieces = [
            _RowGroupMessages(number, self.apply_filter(message_filter).selection, groups)
            for number, message_filter in enumerate(filters)
            for groups in divide_groups(self.groups, runner.parallelism)
        ]
        parts: list[Sequence[_RowGroupMessages]] = [[piece] for piece in pieces] or [()]
        last_part = len(parts) - 1
        return StoredSource(
            [
                partial(_encode_pieces, part, has_end_mark and number == last_part)
                for number, part in enumerate(parts)
            ],
            runner,
        )

    def read_few(self, relations: frozenset[int], is_small: Callable[[int], bool]) -> Messages:
        """Read the changes of some relations into memory, as `Messages` describes."""
        selected_messages, size, rows = (
            self.apply_filter(MessageFilter(relations=relations)),
            0,
            list[pa.RecordBatch](),
        )
        for batch in selected_messages.open_columns(
            list(dict.fromkeys((*_FILTER_COLUMNS, *ENCODED_COLUMNS)))
        ).read():
            rows.append(batch)
            size += pc.sum(pc.binary_length(batch["data"])).as_py() or 0
            if not is_small(size):
                return self
        return FewMessages(pa.Table.from_batches(rows)) if rows else self

    def persist(self) -> AbstractContextManager["StoredMessages"]:
        """The messages as they are."""
        return nullcontext(self)


@dataclass(frozen=True)
class _RowGroupMessages:
    """The messages in some row groups, and the number of the filter that has selected them."""

    number: int
    selection: StoredSelection
    groups: Sequence[RowGroup]

    def encode(self, guard: Guard) -> Iterator[EncodedMessages]:
        """Yields the messages, batch by batch.

        The columns that row filters read are decoded once for each batch. All subscriptions that need them share the
        result.
        """
        stored_batches = self.selection.batches(self.groups, ENCODED_COLUMNS)
        with self.selection.store.prefetch(self.groups, stored_batches) as batches:
            for batch in guard(batches):
                yield EncodedMessages(
                    batch.messages, partial(_share_filter_columns, self.selection.batch_cache, batch.key)
                )


def _share_filter_columns(
    batch_cache: BatchCache,
    batch_key: Hashable,
    filter_columns: FilterColumns,
    decode: Callable[[], pa.RecordBatch],
) -> pa.RecordBatch:
    """Return the columns of a batch of messages that row filters read, from the cache or by calling `decode`."""
    return batch_cache.get((batch_key, filter_columns), decode)


def _encode_pieces(
    pieces: Sequence[_RowGroupMessages], has_end_mark: bool, guard: Guard
) -> Iterator[NumberedMessages]:
    for piece in pieces:
        yield piece.number, piece.encode(guard)
    if has_end_mark:
        yield _END


@dataclass(frozen=True)
class SparkMessages:
    """Messages that only Spark can read."""

    frame: DataFrame
    can_read_few: ClassVar[bool] = False

    def apply_filter(self, message_filter: MessageFilter) -> "SparkMessages":
        """The messages that the filter selects."""
        return SparkMessages(message_filter.filter_frame(self.frame))

    def open_columns(self, columns: Sequence[str]) -> RowSource[pa.RecordBatch]:
        """Some columns of the messages."""
        return SparkSource([SparkRows(self.frame.select(*columns), iter)])

    def open_encoded(
        self,
        filters: Sequence[MessageFilter],
        runner: Runner,  # noqa: ARG002 - as the protocol has it
        *,
        has_end_mark: bool,
    ) -> RowSource[NumberedMessages]:
        """The messages that each filter selects. Each part has a partition of Spark's, and one filter."""
        rows = [
            SparkRows(
                self.apply_filter(message_filter).frame.select(*ENCODED_COLUMNS),
                partial(_encode_batches, number),
            )
            for number, message_filter in enumerate(filters)
        ]
        if has_end_mark:
            rows.append(SparkRows(self.frame.sparkSession.range(0, 1, 1, 1), lambda _: [_END]))
        return SparkSource(rows)

    def read_few(
        self,
        relations: frozenset[int],  # noqa: ARG002 - as the protocol has it
        is_small: Callable[[int], bool],  # noqa: ARG002
    ) -> "SparkMessages":
        """The messages themselves."""
        return self

    @contextmanager
    def persist(self) -> Iterator["SparkMessages"]:
        """Within the block Spark persists the messages, so that it reads their files once."""
        frame = self.frame.persist()
        try:
            yield SparkMessages(frame)
        finally:
            frame.unpersist()


def _encode_batches(number: int, batches: Iterable[pa.RecordBatch]) -> list[NumberedMessages]:
    return [(number, map(EncodedMessages, batches))]


def count_changes(messages: Messages) -> Mapping[int, int]:
    """Count the changes of each relation."""
    counts = Counter[int]()
    rows = messages.open_columns(("kind", "relation_id")).compute(_count_changes, _COUNT_SCHEMA)
    for relation, count in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        counts[relation] += count
    return counts


def _count_changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        changes = batch.filter(pc.is_in(batch["kind"], pa.array(_CHANGES)))
        yield pa.RecordBatch.from_arrays(
            pc.value_counts(changes["relation_id"]).flatten(), schema=_COUNT_SCHEMA
        )


def read_commit_lsns(messages: Messages) -> list[int]:
    """The distinct commit LSNs of the messages, in ascending order."""
    rows = messages.open_columns(["commit_lsn"]).compute(_find_distinct_lsns, _LSN_SCHEMA)
    return sorted(pc.unique(rows["commit_lsn"]).to_pylist())


def _find_distinct_lsns(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_arrays([pc.unique(batch["commit_lsn"])], schema=_LSN_SCHEMA)


def read_truncate_times(messages: Messages) -> Mapping[int, datetime]:
    """Maps the commit LSN of each TRUNCATE to its commit time."""
    columns = ("commit_lsn", "commit_time", "kind")
    rows = messages.open_columns(columns).compute(_select_truncates, _TRUNCATE_SCHEMA)
    return dict(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def _select_truncates(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        truncates = batch.filter(pc.equal(batch["kind"], _TRUNCATE))
        yield truncates.select(_TRUNCATE_SCHEMA.names).cast(_TRUNCATE_SCHEMA)


def open_messages(lake: Lake, path: str, ends: Collection[int], size: int | None) -> Messages:
    """Open the messages of the slices that end at `ends`, in the change log at `path`.

    `size` is their number of bytes; None if it is not known. Raises DamagedTableError if a slice is lost.
    """
    with lake.access.translate_errors(path):
        match lake.find_slices(path, ends, must_exist=True):
            case StoredSlices() as slices if lake.policy.is_small(size):
                return FewMessages(slices.read_rows())
            case StoredSlices() as slices:
                selection = StoredSelection(lake.store, slices.ends, batch_cache=get_batch_cache())
                return StoredMessages(slices.row_groups, selection)
            case SparkSlices() as slices:
                return SparkMessages(slices.read_frame(lake.spark))
