"""Consumes a replication slot continuously, by the streaming replication protocol. Reconnects if a connection is lost.

In: - a `Source`, its slot, and the options for pgoutput
    - the LSN up to which the consumer (the caller that stores the messages) has everything
Out: items, in order: `StreamStart` where the stream begins, or begins again; and `ReceivedMessages`.

Raises SourceError and its subclasses if connecting again cannot help, or did not help in time.

`StreamStart` has the last confirmed LSN. The server then sends all transactions that commit at this LSN or later, even
those that it has sent before. So a consumer that gets `StreamStart` must discard the messages that it has received but
not confirmed (PostgreSQL documentation, Streaming Replication Protocol, START_REPLICATION; Replication Slots).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from select import POLLIN, poll
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.pq import ExecStatus
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.errors import (
    SourceError,
    SourceSilentError,
    SourceUnreachableError,
    is_transient,
)
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import ReceivedMessages, Receiver, Wakeup
from pgsieve.resources.postgres.slot import (
    SlotInUseError,
    read_slot_state,
    translate_slot_errors,
    verify_slot,
    verify_wal_end,
)
from pgsieve.resources.postgres.source import Source, quote
from pgsieve.resources.postgres.timeline import read_current_timeline, verify_timeline

#: The number of bytes of messages that may wait for the consumer.
BUFFER_BYTES = 64 * 1024 * 1024
#: How long the first connection is tried. The process of a killed run may still occupy the slot for a moment.
CONNECT_SECONDS = 10.0
#: How long a new connection is tried after a connection was lost.
RECONNECT_SECONDS = 600.0
#: If the server sends nothing for this long, even on request, the connection counts as lost. PostgreSQL's setting
#: wal_receiver_timeout has the same meaning.
SILENCE_SECONDS = 60.0
#: The longest time between two reports to the server, like PostgreSQL's setting wal_receiver_status_interval.
_STATUS_SECONDS = 10.0
#: The wait before each new connection. It limits the load on a server that ends each connection as soon as it is open.
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The stream begins at `lsn`, or begins there again. The server sends again all messages that were not confirmed.

    `timeline` is the server's timeline, which changes with a failover.
    """

    lsn: int
    timeline: int


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of a stream.

    - `buffer_bytes`: how many bytes of messages may wait for the consumer
    - `connect_seconds`: how long the first connection is tried
    - `reconnect_seconds`: how long a new connection is tried after a connection was lost
    - `silence_seconds`: after how much silence of the server the connection counts as lost
    """

    buffer_bytes: int = BUFFER_BYTES
    connect_seconds: float = CONNECT_SECONDS
    reconnect_seconds: float = RECONNECT_SECONDS
    silence_seconds: float = SILENCE_SECONDS


_LIMITS = StreamLimits()


class ReplicationStream:
    """The messages of a slot from `start_lsn` on: `with ReplicationStream(...) as s: for item in s.items(): ...`.

    `timeline` is the timeline of `start_lsn`; None if it is unknown. `confirm` moves the slot. Once a consumer has
    made everything durable, it must confirm the position of the newest item, even if this item has no messages.
    Otherwise the server keeps the WAL of an idle database, and waits when it shuts down.
    """

    def __init__(
        self,
        source: Source,
        slot: str,
        options: PgoutputOptions,
        start_lsn: int,
        *,
        log_message: Callable[[str], None],
        timeline: int | None = None,
        limits: StreamLimits = _LIMITS,
    ) -> None:
        self._source, self._slot, self._options, self._log_message = source, slot, options, log_message
        self._limits = limits
        self._confirmed_lsn = self._delivered_lsn = start_lsn
        self._timeline = timeline
        self._receiver: Receiver | None = None
        self._connection_stack = ExitStack()
        self._wakeup = Wakeup()
        self._is_stopped = self._must_restart = False
        self._answered_at: float | None = None

    @property
    def answered_at(self) -> float | None:
        """The time (time.monotonic) at which the server last sent a message or refused a connection; None if never."""
        receiver = self._receiver
        return self._answered_at if receiver is None else receiver.last_message_at

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.disconnect()
        self._wakeup.close()

    def stop(self) -> None:
        """Make `items` and the stream end soon. Any thread may call this, and a signal handler, too."""
        self._is_stopped = True
        if (receiver := self._receiver) is not None:
            receiver.end()
        self._wakeup.ring()

    def request_restart(self) -> None:
        """Let `items` connect again after the newest item.

        The server then sends again all messages that were not confirmed.
        """
        self._must_restart = True

    def confirm(self, lsn: int) -> None:
        """Tell the slot that everything that commits before `lsn` is durable. An `lsn` before the last one has no effect.

        Raises ValueError for a position that no item since the last `StreamStart` has reached.
        """
        if lsn > self._delivered_lsn:
            raise ValueError(f"{format_lsn(lsn)} was not received, only {format_lsn(self._delivered_lsn)}")
        if lsn > self._confirmed_lsn:
            self._confirmed_lsn = lsn
            if self._receiver is not None:
                self._receiver.confirm(lsn)

    def items(self) -> Iterator[StreamStart | ReceivedMessages]:
        """The items in the order in which they arrive, until `stop`.

        While there is a connection, it yields at least one item per second.
        """
        seconds = self._limits.connect_seconds
        try:
            while (receiver := self._connect(seconds)) is not None:
                self._delivered_lsn = self._confirmed_lsn
                assert self._timeline is not None
                yield StreamStart(self._confirmed_lsn, self._timeline)
                try:
                    with translate_slot_errors(self._source.name, self._slot, "read"):
                        yield from self._receive(receiver)
                except SourceError as error:
                    if not _may_succeed_later(error):
                        raise
                    self._log_message(
                        f"{error.message}; connecting again from {format_lsn(self._confirmed_lsn)}"
                    )
                self.disconnect()
                self._pause(_PAUSE_SECONDS)
                seconds = self._limits.reconnect_seconds
        finally:
            self.disconnect()

    def _receive(self, receiver: Receiver) -> Iterator[ReceivedMessages]:
        """Yield the items of one connection, until `stop` or `request_restart`."""
        for item in receiver.items():
            if self._is_stopped:
                return
            self._delivered_lsn = item.position_lsn
            yield item
            if self._must_restart:
                self._must_restart = False
                return

    def _connect(self, seconds: float) -> Receiver | None:
        """Try to connect for this many seconds. Return a running receiver; None if the stream was stopped meanwhile."""

        def is_over(state: RetryCallState) -> bool:
            return self._is_stopped or stop_after_delay(seconds)(state)

        attempts = Retrying(
            retry=retry_if_exception(_may_succeed_later),
            wait=wait_exponential(0.1, max=30),
            stop=is_over,
            sleep=self._pause,
            reraise=True,
        )
        if self._is_stopped:
            return None
        try:
            self._receiver = attempts(self._try_to_start_receiver)
        except SourceError:
            if self._is_stopped:
                return None
            raise
        return None if self._is_stopped else self._receiver

    def _try_to_start_receiver(self) -> Receiver:
        """Start a receiver. If the server refuses that, note that it has answered."""
        try:
            return self._start_receiver()
        except SourceSilentError:
            raise
        except SourceError:
            self._answered_at = time.monotonic()
            raise

    def _start_receiver(self) -> Receiver:
        """Open a connection, check that the slot has what the consumer needs, and start replication on the connection."""
        source, slot = self._source, self._slot
        with ExitStack() as stack:
            # A session in replication mode takes no query parameters, so ClientCursor writes them into the query.
            connection = stack.enter_context(
                source.connect(replication="database", cursor_factory=psycopg.ClientCursor)
            )
            with translate_slot_errors(source.name, slot, "read"):
                state, timeline = read_slot_state(connection, slot), read_current_timeline(connection)
                status_seconds = _read_status_seconds(connection)
            if self._timeline not in {None, timeline}:
                verify_timeline(source, self._timeline, self._confirmed_lsn, timeline)
            self._timeline = timeline
            verify_slot(state, source.name, slot, self._confirmed_lsn)
            with translate_slot_errors(source.name, slot, "read"):
                verify_wal_end(connection, source.name, self._confirmed_lsn)
                start_replication(connection, slot, self._confirmed_lsn, self._options)
            receiver = Receiver(
                connection,
                self._confirmed_lsn,
                self._wakeup,
                buffer_bytes=self._limits.buffer_bytes,
                status_seconds=min(status_seconds, self._limits.silence_seconds / 3),
                silence_seconds=self._limits.silence_seconds,
            )
            stack.callback(receiver.close)
            self._connection_stack = stack.pop_all()
        return receiver

    def disconnect(self) -> None:
        """End the connection. A moment later other processes can use the slot."""
        self._answered_at, self._receiver = self.answered_at, None
        self._connection_stack.close()

    def _pause(self, seconds: float) -> None:
        """Wait this long, or until `stop`."""
        self._wakeup.clear()
        if not self._is_stopped:
            events = poll()
            events.register(self._wakeup, POLLIN)
            events.poll(seconds * 1000)


def _may_succeed_later(error: BaseException) -> bool:
    """True if another attempt may succeed.

    This is so if the connection was lost, if the slot is in use, or if the server's error is transient.
    """
    if isinstance(error, SourceUnreachableError | SlotInUseError):
        return True
    cause = error.__cause__
    return isinstance(cause, psycopg.Error) and is_transient(cause)


def _read_status_seconds(connection: psycopg.Connection[Any]) -> float:
    """The time between two reports. It is short enough for the server's wal_sender_timeout."""
    row = connection.execute(
        "select setting::integer from pg_settings where name = 'wal_sender_timeout'"
    ).fetchone()
    assert row is not None
    return min(_STATUS_SECONDS, row[0] / 3000 or _STATUS_SECONDS)


def start_replication(
    connection: psycopg.Connection[Any], slot: str, lsn: int, options: PgoutputOptions
) -> None:
    """Run START_REPLICATION. In its strings, a quote is doubled; there are no other escapes (repl_scanner.l)."""
    arguments = ", ".join(
        f"{quote(name)} '{value.replace(chr(39), chr(39) * 2)}'"
        for name, value in options.make_arguments(connection.info.server_version).items()
    )
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        # Without this, bytes that are not UTF-8 would end the whole stream; see `_SQL_ASCII_CASE` in slot.py.
        connection.pgconn.exec_(b"set client_encoding = 'SQL_ASCII'")
    result = connection.pgconn.exec_(
        f"START_REPLICATION SLOT {quote(slot)} LOGICAL {format_lsn(lsn)} ({arguments})".encode()
    )
    if result.status != ExecStatus.COPY_BOTH:
        raise psycopg.errors.error_from_result(result, connection.info.encoding)
