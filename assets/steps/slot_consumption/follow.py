"""Reads a slot continuously by the streaming replication protocol, and appends slices to the stream's change log.

A slot stream is a slot with the subscriptions that read it, and a slice is the changes from one position of the slot to
another.

The change log is the lake's table of the slot's messages. It gets the same contents as from a run: whole transactions
in commit order. A slice is one Delta commit, and the position of the commit is the end of the slice. The slot is
confirmed after the commit. Messages wait in spools, which use the disk if there are many messages. So a transaction of
any size needs little memory. PostgreSQL documentation, 54.4 Streaming Replication Protocol and 54.5 Logical Streaming
Replication Protocol.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from pgsieve.assets.steps.log import Log
from pgsieve.assets.steps.records.catalogs import Catalogs
from pgsieve.assets.steps.records.change_log import ChangeLog
from pgsieve.assets.steps.records.prepared_transactions import PreparedTransactions
from pgsieve.assets.steps.records.slot_stream import SlotStreamRecord
from pgsieve.assets.steps.slot_consumption.appending import append_slice
from pgsieve.assets.steps.slot_consumption.drain import drain_slot, log_missing_publications
from pgsieve.assets.steps.slot_consumption.reading import IDLE_BYTES, DrainResult
from pgsieve.assets.steps.slot_consumption.ready import ensure_publications, prepare_slot
from pgsieve.assets.steps.slot_consumption.sequences import refresh_sequences
from pgsieve.assets.steps.slot_consumption.slot import read_present_slot
from pgsieve.assets.steps.slot_consumption.two_phase import is_two_phase
from pgsieve.assets.steps.subscription import SlotStream
from pgsieve.decoding.binary.octets import Octets
from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.lsn import format_lsn
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.headers import find_begun_xids_and_changed_relations
from pgsieve.decoding.protocol.messages import Commit, Prepare, Truncate, decode
from pgsieve.decoding.protocol.transactions import TransactionAssembler
from pgsieve.resources.lake.lake import Lake
from pgsieve.resources.postgres.errors import SourceError, SourceUnreachableError, TransientError
from pgsieve.resources.postgres.peeks import is_decoding_error
from pgsieve.resources.postgres.receiver import ReceivedMessages
from pgsieve.resources.postgres.slot import SlotAheadError, wait_until_free
from pgsieve.resources.postgres.stream import ReplicationStream, StreamStart
from pgsieve.resources.spool import FileSpool

#: A slice is due when it has this many bytes of messages, or when this many seconds have passed since the previous
#: slice.
SLICE_BYTES = 64 * 1024 * 1024
SLICE_SECONDS = 1.0
#: If there is nothing to append, the position is recorded and confirmed at this interval. When a server shuts down, it
#: waits until everything is confirmed (WalSndDone in src/backend/replication/walsender.c).
IDLE_SECONDS = 10.0

#: The process that follows a slot checks at this interval whether another process waits for the lock of the slot.
_LOCK_CHECK_SECONDS = 1.0

_MESSAGES = pa.schema([("data", pa.binary())])


class FollowedSlotStream:
    """A stream whose slot this process reads until it is stopped.

    It is used as `for _ in stream.read_slice_ends(): stream.append_due_slice()`. Nothing is read while a slice is
    appended. The stream ends by itself in three cases:

    - after an alteration at the publisher, because the slot has to be made ready again
    - if the server cannot send a change
    - if another process waits for the lock of the slot, or has read the slot

    Raises SourceError and SlotError if the slot cannot be read, and LakeError if the lake cannot be written.
    """

    def __init__(self, slot_stream: SlotStream, lake: Lake, log: Log) -> None:
        version = slot_stream.source.check_ready()
        lake.access.check_writable()
        if lake.is_reached_by_spark_only:
            raise PgsieveError(
                f'source "{slot_stream.source.name}": a lake that only Spark reaches cannot be written continuously',
                hint="run `pgsieve run` on a schedule, or use a lake in a folder or object store that delta-rs reaches",
                sqlstate="0A000",
            )
        with ExitStack() as stack:
            #: The lock of the slot. As long as it is held, no other process reads the slot or makes it ready.
            self._lock = stack.enter_context(slot_stream.hold_lock())
            with slot_stream.source.connect() as connection:
                slot_stream, catalog, publications = prepare_slot(connection, slot_stream, lake)
                log_missing_publications(slot_stream, catalog, log)
                publications = ensure_publications(connection, slot_stream, lake, catalog, publications)
                refresh_sequences(connection, slot_stream, lake)
                state = read_present_slot(connection, slot_stream)
            self._slot_stream, self._lake, self._log = slot_stream, lake, log
            self._captured_leaf_sets = slot_stream.captured_leaf_sets(catalog)
            self._has_two_phase = is_two_phase(slot_stream, state)
            options = replace(slot_stream.options, publications=tuple(publications))
            log_position = ChangeLog(lake, slot_stream).read_position()
            #: All transactions that commit before this LSN have arrived.
            self.position = self._durable_lsn = state.confirmed_lsn if log_position is None else log_position
            self._stream = ReplicationStream(
                slot_stream.source,
                slot_stream.slot,
                options,
                self._durable_lsn,
                log_message=log,
                timeline=SlotStreamRecord(lake, slot_stream).read_timeline(),
            )
            self._is_parallel = options.make_arguments(version).get("streaming") == "parallel"
            self._session = _Session(self._is_parallel)
            self._prepared_transactions: tuple[Prepare, ...] = ()
            self._confirmed_at = time.monotonic()
            #: True if `drain_slot` has to read on: after an alteration, or if the server cannot send a change.
            self._needs_drain = False
            self._is_ended = False
            #: How many bytes of messages have arrived.
            self.received_bytes = 0
            self._has_begun = False
            #: When this process last checked whether another process waits for the lock.
            self._checked_at = time.monotonic()
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._resources:
            self._session.close()
            self._stream.__exit__(kind, error, traceback)
            if error is None:
                self._wait_until_free()

    def stop(self) -> None:
        """Let `read_slice_ends` end soon, after a slice of the transactions that have committed. Any thread may call this."""
        self._stream.stop()

    @property
    def answered_at(self) -> float | None:
        """When the server last sent a message, or refused a connection (time.monotonic). None before the first time."""
        return self._stream.answered_at

    @property
    def waiting_since(self) -> float | None:
        """When the first commit arrived that is in no slice yet (time.monotonic); None if there is none."""
        return self._session.waiting_transactions.first_commit_time

    def read_slice_ends(self) -> Iterator[int]:
        """Yields the end of each slice when it is due. The caller appends the slice before it asks for the next one."""
        try:
            yield from self._read_items()
        except SlotAheadError:
            # While the connection was down, this process may have lost the lock, and another process has read the slot.
            if (ChangeLog(self._lake, self._slot_stream).read_position() or 0) <= self._durable_lsn:
                raise
            self._log(f"another process has read the slot {self._slot_stream.slot} meanwhile")
        except SourceError as error:
            if not self._has_begun or not is_decoding_error(error):
                raise
            # It may be that the server cannot send one transaction. A drain (`drain_slot`) reads past it, or raises the
            # server's error.
            self._log(error.message)
            self._needs_drain = True
            yield self.position

    def _read_items(self) -> Iterator[int]:
        for item in self._stream.items():
            match item:
                case StreamStart():
                    self._begin_session(item)
                case ReceivedMessages():
                    self.received_bytes += item.messages.nbytes
                    for messages in self._session.assembler.assemble(item.messages.column("data")):
                        self._session.waiting_transactions.add(messages)
                    self.position = item.position_lsn
                    waiting_transactions = self._session.waiting_transactions
                    if waiting_transactions.is_due() or (
                        not waiting_transactions.end_lsn and self._must_confirm_position()
                    ):
                        yield from self._end_slice()
                        if self._is_ended:
                            return
                    if self._is_lock_awaited():
                        self.stop()
        # Even if nothing has committed, something may have been altered at the publisher. `_end_slice` finds that out.
        if self._session.waiting_transactions.end_lsn or self.position > self._durable_lsn:
            yield from self._end_slice()

    def _end_slice(self) -> Iterator[int]:
        """Yields the end of the slice that is due. If nothing has committed and no drain is due, confirms the position instead."""
        try:
            with self._slot_stream.source.connect() as connection:
                catalog_validity = Catalogs(self._lake, self._slot_stream).find_validity(
                    connection, self._durable_lsn
                )
                waiting_transactions = self._session.waiting_transactions
                self._needs_drain = (
                    catalog_validity is None
                    or not catalog_validity.covers(
                        waiting_transactions.xids, waiting_transactions.relation_ids
                    )
                    or (bool(self._captured_leaf_sets) and waiting_transactions.has_truncate)
                )
                if not self._needs_drain:
                    refresh_sequences(connection, self._slot_stream, self._lake)
        except (SourceUnreachableError, TransientError) as error:
            # A server that is shutting down accepts no new connections, and waits until this stream has ended.
            self._log(f"{type(error).__name__}; connecting again from {format_lsn(self._durable_lsn)}")
            self._stream.request_restart()
            return
        if self._needs_drain or self._session.waiting_transactions.end_lsn:
            yield self._session.waiting_transactions.end_lsn or self.position
        else:
            ChangeLog(self._lake, self._slot_stream).record_position(self.position, self._durable_lsn)
            self._confirm(self.position)

    def append_due_slice(self) -> DrainResult:
        """Append the slice that is due, and confirm it.

        After an alteration at the publisher, or if the server cannot send a change, the stream ends, and a drain reads
        the slot up to the present (`drain_slot`).
        """
        if self._needs_drain:
            return self._drain_slot()
        begin, end = self._durable_lsn, self._session.waiting_transactions.end_lsn
        self._session.relation_descriptions.begin_slice()
        messages = chain.from_iterable(
            map(
                self._session.relation_descriptions.insert_missing_descriptions,
                self._session.waiting_transactions.read_complete_messages(),
            )
        )
        append_slice(self._lake, self._slot_stream, messages, end, begin)
        self._session.waiting_transactions.drop_complete_messages()
        self._confirm(end)
        self._log(f"change log of {self._slot_stream.name} holds everything before {format_lsn(end)}")
        return DrainResult(begin, end, slices=1, lag=self.position - end)

    def _drain_slot(self) -> DrainResult:
        """End the stream, and read the slot by a drain."""
        self._is_ended = True
        self.stop()
        self._stream.disconnect()
        self._wait_until_free()
        result = drain_slot(self._slot_stream, self._lake, (), self._log)
        self.position = self._durable_lsn = result.to_lsn
        return result

    def _wait_until_free(self) -> None:
        with self._slot_stream.source.connect() as connection:
            wait_until_free(connection, self._slot_stream.slot)

    def _begin_session(self, start: StreamStart) -> None:
        """Begin again on a new connection. The server sends again everything that was not appended."""
        self._has_begun = True
        SlotStreamRecord(self._lake, self._slot_stream).record_timeline(start.timeline)
        self._session.close()
        self._session = _Session(self._is_parallel)
        if self._has_two_phase:
            self._prepared_transactions = PreparedTransactions(self._lake, self._slot_stream).restore(
                self._session.assembler
            )
        self.position = start.lsn

    def _is_lock_awaited(self) -> bool:
        """True if another process waits for the lock of the slot. This is checked every second."""
        if time.monotonic() - self._checked_at < _LOCK_CHECK_SECONDS:
            return False
        self._checked_at = time.monotonic()
        return self._lock.is_awaited()

    def _must_confirm_position(self) -> bool:
        """True if the position has to be confirmed although nothing has committed.

        Without that, the slot would retain much WAL, and a server could not shut down.
        """
        seconds = time.monotonic() - self._confirmed_at
        return self.position - self._durable_lsn >= (1 if seconds >= IDLE_SECONDS else IDLE_BYTES)

    def _confirm(self, lsn: int) -> None:
        """Sync the change log to disk, and confirm to the server that it has everything before `lsn`."""
        if self._has_two_phase:
            assembler = self._session.assembler
            self._prepared_transactions = PreparedTransactions(self._lake, self._slot_stream).save(
                assembler, lsn, self._prepared_transactions
            )
        self._lake.access.make_durable()
        self._durable_lsn, self._confirmed_at = lsn, time.monotonic()
        self._stream.confirm(lsn)


class _Session:
    """The state of one connection: the messages that are in no slice yet."""

    def __init__(self, is_parallel: bool) -> None:
        self._spools = FileSpool(), FileSpool()
        self.assembler = TransactionAssembler(self._spools[0], parallel=is_parallel)
        self.waiting_transactions = WaitingTransactions(self._spools[1])
        #: The Relation messages that have arrived. Each slice has to repeat those of its relations.
        self.relation_descriptions = RelationDescriptions()

    def close(self) -> None:
        for spool in self._spools:
            spool.close()


class WaitingTransactions:
    """Transactions that are in no slice yet. The Commit message of the last one may not have arrived yet."""

    def __init__(self, spool: FileSpool) -> None:
        self._spool = spool
        self._spool_number = self._byte_count = self._message_count = self._complete_count = 0
        self._first_commit_time = 0.0
        self._last_drop_time = -math.inf
        #: The LSN at which the last commit record ends; 0 if none has arrived.
        self.end_lsn = 0
        self.has_truncate = False
        #: The identifiers of the transactions.
        self.xids: set[int] = set()
        #: The oids of the relations with changes.
        self.relation_ids: set[int] = set()

    def add(self, messages: pa.Array) -> None:
        """Add messages that have arrived."""
        tags = Octets(messages).first_bytes()
        self.has_truncate |= bool(np.any(tags == Truncate.tag))
        new_xids, new_relation_ids = find_begun_xids_and_changed_relations(messages)
        self.xids |= new_xids
        self.relation_ids |= new_relation_ids
        commit_indices = np.flatnonzero(tags == Commit.tag)
        self._spool.append(self._spool_number, pa.RecordBatch.from_arrays([messages], schema=_MESSAGES))
        if len(commit_indices):
            last_commit = decode(messages[int(commit_indices[-1])].as_py())
            assert isinstance(last_commit, Commit)
            self._first_commit_time = self._first_commit_time if self.end_lsn else time.monotonic()
            self._complete_count, self.end_lsn = (
                self._message_count + int(commit_indices[-1]) + 1,
                last_commit.end_lsn,
            )
        self._message_count += len(messages)
        self._byte_count += messages.nbytes

    @property
    def first_commit_time(self) -> float | None:
        """When the first commit arrived (time.monotonic); None if none has arrived."""
        return self._first_commit_time if self.end_lsn else None

    def is_due(self) -> bool:
        """True if the transactions that have committed should be appended now."""
        return bool(self.end_lsn) and (
            self._byte_count >= SLICE_BYTES or time.monotonic() - self._last_drop_time >= SLICE_SECONDS
        )

    def read_complete_messages(self) -> Iterator[pa.Array]:
        """Yields the messages of transactions that have committed, up to the last Commit message."""
        remaining_count = self._complete_count
        for batch in self._spool.read(self._spool_number):
            if not remaining_count:
                return
            yield batch.column("data").slice(0, remaining_count)
            remaining_count -= min(remaining_count, len(batch))

    def drop_complete_messages(self) -> None:
        """Drop the transactions that have committed, since they are durable now.

        Messages after the last Commit message stay.
        """
        self._last_drop_time = time.monotonic()
        spool_number, passed_count = self._spool_number, 0
        incomplete_count = self._message_count - self._complete_count
        complete_count, self._spool_number = self._complete_count, self._spool_number + 1
        self._message_count = self._complete_count = self._byte_count = self.end_lsn = 0
        self.has_truncate, self.xids, self.relation_ids = False, set(), set()
        for batch in self._spool.read(spool_number) if incomplete_count else ():
            remainder = batch.slice(max(0, min(complete_count - passed_count, len(batch))))
            passed_count += len(batch)
            if len(remainder):
                self.add(remainder.column("data"))
        self._spool.drop(spool_number)
