"""Appends slices to the change log: the messages of a slot between two positions become one Delta commit.

The recorded catalog is the publisher's definitions of tables and publications, by which pgsieve filters changes.

In: positions, and how the slot is read
Out: - a commit to the change log for each slice. It has the LSN at which the slice ends as the position of the change log.
     - for each slice a summary in the table `slices`, from which later steps learn what the slice contains

Raises SourceError; the errors of the decoding if a message cannot be decoded; OvertakenError if another process was
faster; UnprovenError if the recorded catalog may not be valid; and LakeError.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import pyarrow as pa

from pgsieve.assets.steps.records.catalogs import CatalogValidity
from pgsieve.assets.steps.records.change_log import CHANGE_LOG_SCHEMA, ChangeLog
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.slices import Slices, SliceSummary, join_summaries
from pgsieve.assets.steps.slot_consumption.backlog import skip_earlier_transactions
from pgsieve.assets.steps.slot_consumption.messages import make_change_log_rows, read_slice_by_executor
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.resources.failpoints import Failpoint, reach
from pgsieve.resources.lake.delta.errors import LakeError
from pgsieve.resources.lake.delta.parquet_files import write_files
from pgsieve.resources.lake.delta.records import Commit
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.peeks import exclude_relations, fetch_message_batches, has_changes, peek_query
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.slot import translate_slot_errors
from pgsieve.resources.postgres.slot_copy import CopyRefusedError, SlotCopy, copy_slot
from pgsieve.resources.prefetch import prefetch
from pgsieve.resources.spool import FileSpool
from pgsieve.resources.work import DRIVER, add_costs, name_jobs

#: The files get several row groups, so that all cores can decode a slice at the same time.
_FILE_OPTIONS = {"parquet.block.size": str(32 * 1024 * 1024), "maxRecordsPerFile": "1000000"}
#: Integers and times are written as differences to the value before. Since they ascend or repeat, that takes less time
#: and fewer bytes.
_ENCODINGS = {
    field.name: "DELTA_BINARY_PACKED"
    for field in CHANGE_LOG_SCHEMA
    if pa.types.is_integer(field.type) or pa.types.is_timestamp(field.type)
}


@dataclass(frozen=True, slots=True)
class Peek:
    """How to peek at the slot of a stream: to read it without confirming anything.

    A slot stream is a slot with the subscriptions that read it.

    - `options`: the options of the plugin pgoutput
    - `server_version`: the version number of the server
    - `excluded_oids`: the oids of relations whose changes are not fetched from the server
    """

    slot_stream: SlotStream
    conninfo: Conninfo
    options: PgoutputOptions
    server_version: int
    excluded_oids: frozenset[int] = frozenset()

    def query(self, end: int, *, slot: str | None = None, limit: int | None = None) -> str:
        """The query that peeks at the slot up to `end` (see `peek_query`). `slot` may name a copy of the slot instead."""
        query = peek_query(slot or self.slot_stream.slot, end, self.options, self.server_version, limit)
        return exclude_relations(query, self.excluded_oids) if self.excluded_oids else query


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read from a slot by one query: the changes from `begin` on, divided into slices that end at `ends`.

    - `second_ends`: the ends of later slices, which a second session reads at the same time as this one
    - `records_prepared`: True if prepared transactions that wait for COMMIT PREPARED or ROLLBACK PREPARED are recorded,
      too. Such a reading has one slice.
    - `catalog_validity`: if given, each slice must have only changes for which the recorded catalog is valid
    """

    peek: Peek
    begin: int
    ends: Sequence[int]
    second_ends: Sequence[int] = ()
    records_prepared: bool = False
    catalog_validity: CatalogValidity | None = None


@dataclass(frozen=True, slots=True)
class WrittenSlice:
    """A slice whose files are written, and which is not committed yet: its end, its files, and its summary.

    `xids` are the identifiers (xid) of its transactions.
    """

    end: int
    files: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    xids: frozenset[int]


class UnprovenError(Exception):
    """It is not proven that the recorded catalog is valid for all changes of a slice, so the slice is not committed."""


def append_slice(
    lake: Lake,
    slot_stream: SlotStream,
    messages: Iterable[pa.Array],
    end: int,
    former_position: int,
    base_version: int | None = None,
) -> None:
    """Append transactions to the change log, in one commit by this process.

    `messages` are arrays of messages, with the transactions in commit order. Raises the errors of the decoding; LakeError;
    and OvertakenError if the change log does not have the position `former_position` and the version `base_version`.
    """
    commit_slice(
        lake, slot_stream, _write_slice(lake, slot_stream, messages, end), former_position, base_version
    )


def _write_slice(lake: Lake, slot_stream: SlotStream, messages: Iterable[pa.Array], end: int) -> WrittenSlice:
    """Write the files of a slice. Raises the errors of the decoding, and LakeError."""
    summary, path = SliceSummary(lake.policy.prepare_runner), ChangeLog(lake, slot_stream).path
    try:
        # The files are written without delta-rs, which would need more memory for the same rows.
        with (
            lake.access.translate_errors(path),
            prefetch(summary.collect(make_change_log_rows(messages, end))) as rows,
        ):
            batches = write_files(path, CHANGE_LOG_SCHEMA, rows, store=lake.store, encodings=_ENCODINGS)
            files = [file for batch in batches for file in batch.to_pylist()]
    except LakeError:
        if summary.failure:
            raise summary.failure from None
        raise
    summary.refuse_undescribed_relations()
    return WrittenSlice(end, files, summary.to_row(), frozenset(summary.xids))


def commit_slice(
    lake: Lake,
    slot_stream: SlotStream,
    written_slice: WrittenSlice,
    former_position: int,
    base_version: int | None,
) -> None:
    """Commit a slice that was written. Raises OvertakenError as `append_slice` does, and LakeError."""
    path = ChangeLog(lake, slot_stream).path
    reach(Failpoint.SLICE_WRITTEN)
    lake.commit_files(
        path,
        CHANGE_LOG_SCHEMA,
        written_slice.files,
        Commit(written_slice.end, expected_version=base_version, expected_position=former_position),
    )
    add_costs(DRIVER, 1, sum(file["size"] for file in written_slice.files))
    reach(Failpoint.SLICE_COMMITTED)
    Slices(lake, slot_stream).append(written_slice.end, written_slice.summary)


def append_slices(
    lake: Lake, reading: Reading, former_position: int, base_version: int | None = None
) -> Iterator[tuple[int, bool]]:
    """Append the slices of a reading, each in one commit. Yields the end of each slice, and whether it has rows.

    If the server cannot advance a copy of the slot, the slices that end at `second_ends` are left out. In a lake that
    only Spark reaches, a reading has one slice. Raises OvertakenError if the change log does not have the position
    `former_position` and the version `base_version`. Raises UnprovenError before the first slice with changes that the
    reading's `catalog_validity` does not cover.
    """
    if lake.is_reached_by_spark_only:
        (end,) = reading.ends
        yield end, _append_by_executor(lake, reading.peek, reading.begin, end, former_position, base_version)
        return
    slot_stream, validity = reading.peek.slot_stream, reading.catalog_validity
    with translate_slot_errors(slot_stream.source.name, slot_stream.slot, "read"), ExitStack() as stack:
        assembler = TransactionAssembler(stack.enter_context(FileSpool()))
        prepared_transactions = (
            PreparedTransactions(lake, slot_stream).restore(assembler) if reading.records_prepared else ()
        )
        for end, written_slice in _write_reading(lake, reading, assembler, stack):
            if written_slice is not None:
                if validity and not validity.covers(written_slice.xids, written_slice.summary["relations"]):
                    raise UnprovenError
                commit_slice(lake, slot_stream, written_slice, former_position, base_version)
                if reading.records_prepared:
                    PreparedTransactions(lake, slot_stream).save(assembler, end, prepared_transactions)
            yield end, written_slice is not None
            former_position = end


def _write_reading(
    lake: Lake, reading: Reading, assembler: TransactionAssembler, stack: ExitStack
) -> Iterator[tuple[int, WrittenSlice | None]]:
    """Read and write the slices of a reading. Yields the end of each slice, and the slice; None if it is empty.

    `stack` closes the sessions.
    """
    peek, ends = reading.peek, [*reading.ends]
    # The role may be allowed only one more session. So open this one first: slices can be read without the second one.
    session = stack.enter_context(stack.enter_context(peek.conninfo.connect_adbc()).cursor())
    copy = (
        stack.enter_context(copy_slot(peek.conninfo, peek.slot_stream.slot)) if reading.second_ends else None
    )
    if copy is None:
        ends += reading.second_ends
    messages = fetch_message_batches(session, peek.query(ends[-1]))
    # A transaction that was prepared in the slice, and is not committed yet, adds no row to the slice, but it has to be
    # recorded. So if prepared transactions are recorded, even an empty slice is written.
    slices = _write_slices(
        lake, peek.slot_stream, messages, reading.begin, ends, assembler, write_empty=reading.records_prepared
    )
    if copy is None:
        return slices
    second_slices = _write_from_copy(lake, peek, copy, ends[-1], reading.second_ends)
    return chain(
        slices, stack.enter_context(prefetch(second_slices, len(reading.second_ends), copy.cancel_query))
    )


def _write_slices(
    lake: Lake,
    slot_stream: SlotStream,
    batches: Iterable[pa.RecordBatch],
    begin: int,
    ends: Sequence[int],
    assembler: TransactionAssembler,
    *,
    write_empty: bool,
) -> Iterator[tuple[int, WrittenSlice | None]]:
    """Write the slices of one session's messages. Yields the end of each slice, and the slice.

    If nothing commits in a slice, None is yielded instead of the slice. With `write_empty`, the slice is written anyway,
    unless the session has no messages at all.
    """
    message_arrays = (batch.column("data") for batch in batches)
    first_array = next((messages for messages in message_arrays if len(messages)), None)
    if first_array is None:
        yield from ((end, None) for end in ends)
        return
    committed_arrays = chain.from_iterable(map(assembler.assemble, chain([first_array], message_arrays)))
    relations = RelationDescriptions()
    transactions = skip_earlier_transactions(begin, committed_arrays, relations)
    for end in ends:
        relations.begin_slice()
        messages_before = transactions.take_before(None if end == ends[-1] else end)
        messages = chain.from_iterable(map(relations.insert_missing_descriptions, messages_before))
        first_arrays = list(islice(messages, 1))
        yield (
            end,
            _write_slice(lake, slot_stream, chain(first_arrays, messages), end)
            if write_empty or first_arrays
            else None,
        )


def _write_from_copy(
    lake: Lake, peek: Peek, copy: SlotCopy, begin: int, ends: Sequence[int]
) -> Iterator[tuple[int, WrittenSlice | None]]:
    """Write the slices that a copy of the slot sends, from `begin` on.

    Yields nothing if the server cannot advance the copy to `begin`.
    """
    with FileSpool() as spool, suppress(CopyRefusedError):
        batches = copy.read_batches(begin, lambda name: peek.query(ends[-1], slot=name))
        yield from _write_slices(
            lake, peek.slot_stream, batches, begin, ends, TransactionAssembler(spool), write_empty=False
        )


def _append_by_executor(
    lake: Lake, peek: Peek, begin: int, end: int, former_position: int, base_version: int | None
) -> bool:
    """Let an executor append the slot's messages from `begin` to `end` as one slice. Returns false if there are none."""
    slot_stream = peek.slot_stream
    with slot_stream.source.connect() as connection:
        if not has_changes(connection, slot_stream.source.name, slot_stream.slot, peek.query(end, limit=1)):
            return False
    with name_jobs(slot_stream.name, f"slot {slot_stream.slot}, slice {format_lsn(end)}"):
        _append_by_spark(lake, peek, begin, end, former_position, base_version)
    return True


def _append_by_spark(
    lake: Lake, peek: Peek, begin: int, end: int, former_position: int, base_version: int | None
) -> None:
    """Let Spark append a slice to the change log. The slice must have changes."""
    slot_stream = peek.slot_stream
    noted_rows = read_slice_by_executor(lake.spark, peek.conninfo, peek.query(end), begin, end)
    path, commit = (
        ChangeLog(lake, slot_stream).path,
        Commit(end, expected_version=base_version, expected_position=former_position),
    )
    summary = noted_rows.write(lambda rows: lake.write(rows, path, commit, options=_FILE_OPTIONS))
    # If Spark does not return the summary, it is made when the slice is read.
    if summary is not None:
        Slices(lake, slot_stream).append(end, join_summaries(summary))


def make_peek_options(slot_stream: SlotStream, publications: Sequence[str]) -> PgoutputOptions:
    """The options of pgoutput for a peek. Streaming is off, because a peek returns nothing before all is decoded."""
    return replace(slot_stream.options, publications=tuple(publications), streaming="off")
