"""Receives messages from a connection in streaming replication.

A thread reads messages before the consumer asks for them, and answers the server's requests even while the
consumer is busy. Once `buffer_bytes` of messages wait for the consumer, the thread stops reading, so that the
server waits, too.

In: a connection on which START_REPLICATION succeeded.
Out: `ReceivedMessages` items with Arrow batches of unaltered messages.

Raises ProtocolError, and the psycopg.Error that ended the connection (PostgreSQL documentation, Streaming
Replication Protocol, START_REPLICATION; src/backend/replication/walreceiver.c and logical/worker.c).
"""

import math
import queue
import select
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn

from pgsieve.decoding.binary.octets import Octets
from pgsieve.decoding.protocol.envelope import (
    XLOG_DATA_HEADER_BYTES,
    PrimaryKeepalive,
    StandbyStatusUpdate,
    decode_envelope,
    encode_envelope,
    xlog_data_columns,
)

#: The columns of messages: the LSN and the message. The LSN is the field `data_start` of XLogData. It is 0 for a message
#: that only introduces the next message, such as Relation.
MESSAGE_SCHEMA = pa.schema([pa.field("lsn", pa.int64()), pa.field("data", pa.binary())])

#: `items` yields an item at least this often, even if no message has arrived. So a consumer can do its regular work
#: each time it gets an item.
TICK_SECONDS = 1.0

#: The consumer gets batches of about `_BATCH_BYTES`. If the consumer is waiting, it gets a smaller batch once
#: `_LINGER_SECONDS` have passed since the last batch.
_BATCH_BYTES = 1 << 20
_LINGER_SECONDS = 0.02
#: The server sends each message on its own. Waiting this long for more messages before each read saves both sides
#: most wake-ups.
_COALESCE_SECONDS = 0.0005
#: If a read returned at least this many bytes, more messages have already arrived, so the next read begins without
#: the wait.
_MIN_READ_BYTES = 8192
#: How long the server may take to end a stream. After this time the connection is closed even if the server has
#: not answered.
_END_TIMEOUT_SECONDS = 1.0

#: The kinds of messages that end a transaction (Commit, Prepare and others). The LSN of such a message is the end of its
#: WAL record. Other messages have LSNs that are not ends of records.
_TRANSACTION_END_TAGS = np.array([*b"CPKrcp"], np.uint64)
_POSTGRES_EPOCH_MICROS = 946_684_800_000_000  # 2000-01-01 UTC in Unix time


@dataclass(frozen=True, slots=True)
class ReceivedMessages:
    """Messages (columns lsn, data) in order, and the position of the server after them.

    All transactions that the server has sent, and that commit before `position_lsn`, are in this item or in an earlier
    item.
    """

    messages: pa.RecordBatch
    position_lsn: int


class Wakeup:
    """Lets one thread end the wait of another thread.

    It is a pair of sockets, so a thread can wait for it and for a connection at the same time by poll(). Any
    thread, and a signal handler, may call `ring`. After `close`, `ring` does nothing.
    """

    def __init__(self) -> None:
        self._waiting_socket, self._ringing_socket = socket.socketpair()
        self._waiting_socket.setblocking(False)
        self._ringing_socket.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor to poll."""
        return self._waiting_socket.fileno()

    def ring(self) -> None:
        """End the current wait; or, if no thread is waiting, the next wait."""
        try:
            self._ringing_socket.send(b"\0")
        except (
            OSError
        ):  # The socket is full, so earlier rings will end the wait; or it is closed, so no thread waits.
            return

    def clear(self) -> None:
        """Forget all earlier rings, so that they do not end the next wait."""
        try:
            self._waiting_socket.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._waiting_socket.close()
        self._ringing_socket.close()


class Receiver:
    """Receives messages from `start_lsn` on until its connection is closed or lost.

    It also reports to the server the position that the consumer has confirmed.

    The object starts the receiving thread. The consumer is the thread that calls `items`.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        start_lsn: int,
        wakeup: Wakeup,
        *,
        buffer_bytes: int,
        status_seconds: float,
        silence_seconds: float,
    ) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._next_message = partial(self._pgconn.get_copy_data, 1)
        self._wakeup = wakeup
        self._buffer_bytes = buffer_bytes
        self._status_seconds = status_seconds
        self._silence_seconds = silence_seconds
        # Both threads read these attributes, but each attribute is written by only one thread.
        self._is_ended = False
        self._confirmed_lsn = start_lsn
        self._consumed_bytes = 0
        self._queued_bytes = 0
        self._item_queue: queue.SimpleQueue[ReceivedMessages | Exception | None] = queue.SimpleQueue()
        # Only the receiving thread uses these attributes.
        self._octets, self._lengths = bytearray(), array("i")
        self._position_lsn = self._queued_lsn = self._reported_lsn = start_lsn
        self._report_time = self._queue_time = -math.inf
        self._last_message_time = time.monotonic()
        self._is_answer_requested = False
        self._thread = threading.Thread(target=self._run_thread, name="pgsieve-receiver", daemon=True)
        self._thread.start()

    def confirm(self, lsn: int) -> None:
        """From now on report to the server that everything before `lsn` is flushed, so that the slot can release it."""
        self._confirmed_lsn = lsn
        self._wakeup.ring()

    @property
    def last_message_at(self) -> float:
        """The time (time.monotonic) of the server's last message.

        While the thread does not read, because the buffer is full, it is the present time.
        """
        return self._last_message_time

    def end(self) -> None:
        """Make the receiving thread and `items` end soon."""
        self._is_ended = True
        self._wakeup.ring()

    def close(self) -> None:
        """End the stream after a last report, and close the connection, which releases the slot."""
        self.end()
        self._thread.join()
        self._connection.close()

    def items(self) -> Iterator[ReceivedMessages]:
        """The items in the order in which they arrive, until the end of the stream.

        Raises the error that ended the connection.

        If no item arrives for `TICK_SECONDS`, an item without messages is yielded.
        """
        empty_item = ReceivedMessages(pa.RecordBatch.from_pylist([], MESSAGE_SCHEMA), self._confirmed_lsn)
        while True:
            try:
                item = self._item_queue.get(timeout=TICK_SECONDS)
            except queue.Empty:
                yield empty_item
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            size = item.messages.nbytes
            self._consumed_bytes += size
            if self._queued_bytes - self._consumed_bytes + size >= self._buffer_bytes:
                self._wakeup.ring()
            empty_item = ReceivedMessages(empty_item.messages, item.position_lsn)
            yield item

    def _run_thread(self) -> None:
        try:
            try:
                self._receive()
            finally:
                self._queue_batch()
            self._end_stream()
            self._item_queue.put(None)
        except Exception as error:  # noqa: BLE001 (raised again in the consumer's thread)
            self._item_queue.put(error)

    def _receive(self) -> None:
        # While the buffer is full, the thread waits only for the consumer, not for the server.
        server_or_consumer, consumer_only = select.poll(), select.poll()
        server_or_consumer.register(self._pgconn.socket, select.POLLIN)
        for poller in (server_or_consumer, consumer_only):
            poller.register(self._wakeup, select.POLLIN)
        bytes_read = 0
        while not self._is_ended:
            is_full = self._queued_bytes - self._consumed_bytes >= self._buffer_bytes
            (consumer_only if is_full else server_or_consumer).poll(self._find_pause_seconds() * 1000)
            self._wakeup.clear()
            if is_full:
                self._last_message_time = time.monotonic()
            else:
                if bytes_read < _MIN_READ_BYTES:
                    time.sleep(_COALESCE_SECONDS)
                bytes_read = self._read_messages()
            wakeup_time = time.monotonic()
            if len(self._octets) >= _BATCH_BYTES or (
                wakeup_time >= self._queue_time + _LINGER_SECONDS and self._item_queue.empty()
            ):
                self._queue_batch()
            if (
                self._is_answer_requested
                or self._confirmed_lsn > self._reported_lsn
                or wakeup_time >= self._report_time + self._status_seconds
            ):
                self._report(wakeup_time)

    def _find_pause_seconds(self) -> float:
        """How long to wait for the server or the consumer: until the next batch or the next report is due."""
        if self._octets or self._position_lsn > self._queued_lsn:
            return _LINGER_SECONDS
        return max(0.0, self._report_time + self._status_seconds - time.monotonic())

    def _read_messages(self) -> int:
        """Read all messages that have arrived, and return the number of their bytes."""
        self._pgconn.consume_input()
        messages: list[memoryview] = []
        length = 0
        no_message: tuple[int, memoryview | bytes] = (0, b"")
        for length, message in iter(self._next_message, no_message):
            if length > XLOG_DATA_HEADER_BYTES:
                messages.append(message)
            elif length > 0:
                self._handle_control(message)
            else:
                break
        # Join the messages now. If thousands of small buffers were kept until the next batch, that would take longer than
        # all else here.
        octets = b"".join(messages)
        if messages:
            self._octets += octets
            self._lengths.extend(map(len, messages))
            self._last_message_time = time.monotonic()
        if length < 0:
            raise self._make_end_error()
        return len(octets)

    def _handle_control(self, message: memoryview) -> None:
        """Handle a message that is too short to contain data. Only keepalives have an effect."""
        self._last_message_time = time.monotonic()
        envelope = decode_envelope(message)
        if isinstance(envelope, PrimaryKeepalive):
            self._position_lsn = max(self._position_lsn, envelope.wal_end)
            self._is_answer_requested |= envelope.reply_requested

    def _queue_batch(self) -> None:
        """Give the messages that were read to the consumer as one batch, without their XLogData headers."""
        if not self._octets and self._position_lsn <= self._queued_lsn:
            return
        lsns, data = xlog_data_columns(self._octets, np.asarray(self._lengths, np.int32))
        self._octets, self._lengths = bytearray(), array("i")
        messages = Octets(data)
        end_lsns = lsns[np.isin(messages.read_integers(messages.starts) >> 56, _TRANSACTION_END_TAGS)]
        self._position_lsn = int(end_lsns.max(initial=self._position_lsn))
        batch = pa.RecordBatch.from_arrays([pa.array(lsns), data], schema=MESSAGE_SCHEMA)
        self._queued_bytes += batch.nbytes
        self._queued_lsn, self._queue_time = self._position_lsn, time.monotonic()
        self._item_queue.put(ReceivedMessages(batch, self._position_lsn))

    def _report(self, report_time: float) -> None:
        """Report the position to the server. If no message has arrived since the last report, request an answer.

        Raises OperationalError if the server has been silent for `silence_seconds`.
        """
        if report_time >= self._last_message_time + self._silence_seconds:
            raise psycopg.OperationalError(f"the server has been silent for {self._silence_seconds:g} s")
        confirmed_lsn = self._confirmed_lsn
        is_silent = self._last_message_time < self._report_time
        written_lsn = max(self._queued_lsn, confirmed_lsn)
        self._pgconn.put_copy_data(
            encode_status_update(written_lsn, confirmed_lsn, reply_requested=is_silent)
        )
        self._pgconn.flush()
        self._reported_lsn, self._report_time, self._is_answer_requested = confirmed_lsn, report_time, False

    def _make_end_error(self) -> psycopg.Error:
        """The error to raise after the server has ended the stream.

        It is the server's own error. If the server sent none, as when it shuts down, the error only says that the
        stream has ended.
        """
        result = self._pgconn.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            return psycopg.errors.error_from_result(result, self._connection.info.encoding)
        return psycopg.OperationalError("the server ended the stream")

    def _end_stream(self) -> None:
        """Send a last report, end the stream, and wait until the server has released the slot."""
        self._report(time.monotonic())
        end_copy(self._pgconn)


def encode_status_update(written_lsn: int, flushed_lsn: int, *, reply_requested: bool = False) -> bytes:
    """A status update for the server, with the present time. It reports the flushed position as the applied position, too."""
    return encode_envelope(
        StandbyStatusUpdate(
            written_lsn=written_lsn,
            flushed_lsn=flushed_lsn,
            applied_lsn=flushed_lsn,
            client_time=time.time_ns() // 1000 - _POSTGRES_EPOCH_MICROS,
            reply_requested=reply_requested,
        )
    )


def end_copy(pgconn: PGconn) -> None:
    """End a stream. Wait until the server has handled all earlier messages, and has ended the stream, too."""
    pgconn.put_copy_end()
    pgconn.flush()
    deadline = time.monotonic() + _END_TIMEOUT_SECONDS
    poller = select.poll()
    poller.register(pgconn.socket, select.POLLIN)
    is_copying = True
    while time.monotonic() < deadline:
        while is_copying and (length := pgconn.get_copy_data(1)[0]):
            is_copying = length > 0
        if not is_copying and not pgconn.is_busy():
            return
        poller.poll(_END_TIMEOUT_SECONDS * 1000)
        pgconn.consume_input()
