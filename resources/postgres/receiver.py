"""Receives from one connection in streaming replication: a thread prefetches messages, and answers the server.

In: a connection on which START_REPLICATION succeeded. Out: `Received` items, Arrow batches of unaltered
messages. The thread reports positions even while the consumer is busy. Once `buffer_bytes` wait for the
consumer, the thread stops reading, so that the server waits, too. Raises the psycopg.Error that ended the
connection, and ProtocolError. PostgreSQL documentation, Streaming Replication Protocol, START_REPLICATION;
src/backend/replication/walreceiver.c and logical/worker.c.
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

#: A message, and its LSN: the start of the data in XLogData, or 0 if the message introduces the next one.
MESSAGES = pa.schema([pa.field("lsn", pa.int64()), pa.field("data", pa.binary())])

#: `items` yields at least this often, even without messages, so that a consumer can use items as a clock.
TICK_SECONDS = 1.0

#: The consumer gets batches of `_BATCH_BYTES`. A consumer that waits gets a smaller batch `_LINGER_SECONDS` after
#: the last batch.
_BATCH_BYTES = 1 << 20
_LINGER_SECONDS = 0.02
#: The server sends each message separately. A short wait for more messages saves both sides most wake-ups.
_COALESCE_SECONDS = 0.0005
#: After a read of more bytes than this, the next messages have already arrived.
_FEW_BYTES = 8192
#: How long the server may take to end a stream. Then the connection is closed all the same.
_END_TIMEOUT_SECONDS = 1.0

#: Messages that end a transaction (Commit, Prepare, ...). Only the LSN of such a message is the end of a WAL record.
_TRANSACTION_ENDS = np.array([*b"CPKrcp"], np.uint64)
_POSTGRES_EPOCH_MICROS = 946_684_800_000_000  # 2000-01-01 UTC in Unix time


@dataclass(frozen=True, slots=True)
class Received:
    """Messages (lsn, data) in order, and the server's position after them.

    All sent transactions that commit before `position` are in this item or an earlier one.
    """

    messages: pa.RecordBatch
    position: int


class Wakeup:
    """Ends another thread's wait: a socket pair, which a thread can poll together with a connection.

    Any thread, and a signal handler, may call `ring`; after `close` it does nothing.
    """

    def __init__(self) -> None:
        self._waits, self._rings = socket.socketpair()
        self._waits.setblocking(False)
        self._rings.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor to poll."""
        return self._waits.fileno()

    def ring(self) -> None:
        """End the current wait or, if there is none, the next one."""
        try:
            self._rings.send(b"\0")
        except OSError:  # The socket is full, so it has rung already; or it is closed, so no thread waits.
            return

    def clear(self) -> None:
        """Cancel all earlier rings."""
        try:
            self._waits.recv(4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both ends."""
        self._waits.close()
        self._rings.close()


class Receiver:
    """Receives messages from `start_lsn` on until its connection is closed or lost, and reports the confirmed position."""

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
        # Both threads read these attributes. Each of them is written by one thread only.
        self._ended = False
        self._confirmed = start_lsn
        self._taken_bytes = 0
        self._handed_bytes = 0
        self._arrived: queue.SimpleQueue[Received | Exception | None] = queue.SimpleQueue()
        # Used only by the receiving thread.
        self._octets, self._lengths = bytearray(), array("i")
        self._position = self._handed_position = self._reported = start_lsn
        self._reported_at = self._handed_at = -math.inf
        self._last_message_at = time.monotonic()
        self._answer_wanted = False
        self._thread = threading.Thread(target=self._run, name="pgsieve-receiver", daemon=True)
        self._thread.start()

    def confirm(self, lsn: int) -> None:
        """Report everything before `lsn` as flushed from now on, so that the slot can release it."""
        self._confirmed = lsn
        self._wakeup.ring()

    def end(self) -> None:
        """Make the thread and `items` end soon."""
        self._ended = True
        self._wakeup.ring()

    def close(self) -> None:
        """End the stream after a last report, and close the connection, which releases the slot."""
        self.end()
        self._thread.join()
        self._connection.close()

    def items(self) -> Iterator[Received]:
        """The items that arrive, in order, until the end; raises the error that ended the connection."""
        latest = Received(pa.RecordBatch.from_pylist([], MESSAGES), self._confirmed)
        while True:
            try:
                item = self._arrived.get(timeout=TICK_SECONDS)
            except queue.Empty:
                yield latest
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            size = item.messages.nbytes
            self._taken_bytes += size
            if self._handed_bytes - self._taken_bytes + size >= self._buffer_bytes:
                self._wakeup.ring()
            latest = Received(latest.messages, item.position)
            yield item

    def _run(self) -> None:
        try:
            try:
                self._receive()
            finally:
                self._hand_over()
            self._end_stream()
            self._arrived.put(None)
        except Exception as error:  # noqa: BLE001 (raised again in the consumer's thread)
            self._arrived.put(error)

    def _receive(self) -> None:
        reading, resting = select.poll(), select.poll()
        reading.register(self._pgconn.socket, select.POLLIN)
        for waiting in (reading, resting):
            waiting.register(self._wakeup, select.POLLIN)
        read = 0
        while not self._ended:
            full = self._handed_bytes - self._taken_bytes >= self._buffer_bytes
            (resting if full else reading).poll(self._pause() * 1000)
            self._wakeup.clear()
            if full:
                self._last_message_at = time.monotonic()
            else:
                if read < _FEW_BYTES:
                    time.sleep(_COALESCE_SECONDS)
                read = self._read()
            time_of_wakeup = time.monotonic()
            if len(self._octets) >= _BATCH_BYTES or (
                time_of_wakeup >= self._handed_at + _LINGER_SECONDS and self._arrived.empty()
            ):
                self._hand_over()
            if (
                self._answer_wanted
                or self._confirmed > self._reported
                or time_of_wakeup >= self._reported_at + self._status_seconds
            ):
                self._report(time_of_wakeup)

    def _pause(self) -> float:
        """How long to wait for the server or the consumer: until the next batch or report is due."""
        if self._octets or self._position > self._handed_position:
            return _LINGER_SECONDS
        return max(0.0, self._reported_at + self._status_seconds - time.monotonic())

    def _read(self) -> int:
        """Take all messages that have arrived; return the number of their bytes."""
        self._pgconn.consume_input()
        messages: list[memoryview] = []
        append, length = messages.append, 0
        nothing: tuple[int, memoryview | bytes] = (0, b"")
        for length, message in iter(self._next_message, nothing):
            if length > XLOG_DATA_HEADER_BYTES:
                append(message)
            elif length > 0:
                self._handle_control(message)
            else:
                break
        # Joined at once, as thousands of small long-lived buffers would cost more than everything else here.
        octets = b"".join(messages)
        if messages:
            self._octets += octets
            self._lengths.extend(map(len, messages))
            self._last_message_at = time.monotonic()
        if length < 0:
            raise self._end_of_copy()
        return len(octets)

    def _handle_control(self, message: memoryview) -> None:
        """Take a message that is too short for data. Messages other than keepalives are ignored."""
        self._last_message_at = time.monotonic()
        envelope = decode_envelope(message)
        if isinstance(envelope, PrimaryKeepalive):
            self._position = max(self._position, envelope.wal_end)
            self._answer_wanted |= envelope.reply_requested

    def _hand_over(self) -> None:
        """Give the pending messages to the consumer as one batch, without the headers of XLogData."""
        if not self._octets and self._position <= self._handed_position:
            return
        lsns, data = xlog_data_columns(self._octets, np.asarray(self._lengths, np.int32))
        self._octets, self._lengths = bytearray(), array("i")
        messages = Octets(data)
        ends = lsns[np.isin(messages.words(messages.starts) >> 56, _TRANSACTION_ENDS)]
        self._position = int(ends.max(initial=self._position))
        batch = pa.RecordBatch.from_arrays([pa.array(lsns), data], schema=MESSAGES)
        self._handed_bytes += batch.nbytes
        self._handed_position, self._handed_at = self._position, time.monotonic()
        self._arrived.put(Received(batch, self._position))

    def _report(self, time_of_report: float) -> None:
        """Report the position to the server; request an answer if no message came since the last report."""
        if time_of_report >= self._last_message_at + self._silence_seconds:
            raise psycopg.OperationalError(f"the server has been silent for {self._silence_seconds:g} s")
        confirmed = self._confirmed
        silent = self._last_message_at < self._reported_at
        written = max(self._handed_position, confirmed)
        self._pgconn.put_copy_data(status_update(written, confirmed, reply_requested=silent))
        self._pgconn.flush()
        self._reported, self._reported_at, self._answer_wanted = confirmed, time_of_report, False

    def _end_of_copy(self) -> psycopg.Error:
        """Why the server ended the stream: the server's error, or a shutdown."""
        result = self._pgconn.get_result()
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            return psycopg.errors.error_from_result(result, self._connection.info.encoding)
        return psycopg.OperationalError("the server ended the stream")

    def _end_stream(self) -> None:
        """End the stream after a last report, and wait until the server has released the slot."""
        self._report(time.monotonic())
        end_copy(self._pgconn)


def status_update(written: int, flushed: int, *, reply_requested: bool = False) -> bytes:
    """A standby status update as of now, which reports the flushed position also as applied."""
    return encode_envelope(
        StandbyStatusUpdate(
            written=written,
            flushed=flushed,
            applied=flushed,
            client_time=time.time_ns() // 1000 - _POSTGRES_EPOCH_MICROS,
            reply_requested=reply_requested,
        )
    )


def end_copy(pgconn: PGconn) -> None:
    """End a stream, and wait until the server has handled all earlier messages and ended the stream, too."""
    pgconn.put_copy_end()
    pgconn.flush()
    deadline = time.monotonic() + _END_TIMEOUT_SECONDS
    incoming = select.poll()
    incoming.register(pgconn.socket, select.POLLIN)
    copying = True
    while time.monotonic() < deadline:
        while copying and (length := pgconn.get_copy_data(1)[0]):
            copying = length > 0
        if not copying and not pgconn.is_busy():
            return
        incoming.poll(_END_TIMEOUT_SECONDS * 1000)
        pgconn.consume_input()
