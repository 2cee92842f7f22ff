"""Consumes a replication slot continuously by the streaming replication protocol; reconnects if a connection is lost.

In: a `Source`, its slot, options for pgoutput, and the LSN up to which the consumer has everything. Out:
`Started` and `Received` items, in order. Raises SourceError and its subclasses if another attempt cannot
help, or did not help in time.

A consumer that gets `Started` must drop the messages that it received but did not confirm. The server sends
again all transactions that commit at or after the LSN of `Started`, the last confirmed one (PostgreSQL
documentation, Streaming Replication Protocol, START_REPLICATION; Replication Slots).
"""

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
from pgsieve.resources.postgres.errors import SourceError, SourceUnreachableError, is_transient
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import Received, Receiver, Wakeup
from pgsieve.resources.postgres.slot import (
    SlotInUseError,
    slot_state,
    translate_slot_errors,
    verify_slot,
    verify_wal_end,
)
from pgsieve.resources.postgres.source import Source, quote
from pgsieve.resources.postgres.timeline import current_timeline, refuse_divergence

#: Bytes of messages that may wait for the consumer.
BUFFER_BYTES = 64 * 1024 * 1024
#: How long to try at the start: a killed process may still occupy the slot for a moment.
CONNECT_SECONDS = 10.0
#: How long to try after a connection was lost.
RECONNECT_SECONDS = 600.0
#: A server that sends nothing for this long, even on request, counts as gone; like wal_receiver_timeout.
SILENCE_SECONDS = 60.0
#: The longest time between two reports; like wal_receiver_status_interval.
_STATUS_SECONDS = 10.0
#: The wait before each new connection, which limits the load on a server that ends every connection.
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Started:
    """The stream begins, or begins again, at `lsn`: the server sends all unconfirmed messages again.

    `timeline` is the server's timeline, which changes with a failover.
    """

    lsn: int
    timeline: int


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """The limits of a stream: bytes that wait for the consumer, and seconds.

    The seconds limit the first connection, each reconnection, and the silence after which a server counts as
    gone.
    """

    buffer_bytes: int = BUFFER_BYTES
    connect_seconds: float = CONNECT_SECONDS
    reconnect_seconds: float = RECONNECT_SECONDS
    silence_seconds: float = SILENCE_SECONDS


_LIMITS = StreamLimits()


class ReplicationStream:
    """The messages of a slot from `start_lsn` on: `with ReplicationStream(...) as s: for item in s.items(): ...`.

    `timeline` is the timeline of `start_lsn`; None if it is unknown. `confirm` moves the slot. A consumer that
    has made everything durable must confirm the position of the newest item, even of an item without
    messages. Otherwise an idle database retains its WAL, and the server's shutdown waits.
    """

    def __init__(
        self,
        source: Source,
        slot: str,
        options: PgoutputOptions,
        start_lsn: int,
        *,
        log: Callable[[str], None],
        timeline: int | None = None,
        limits: StreamLimits = _LIMITS,
    ) -> None:
        self._source, self._slot, self._options, self._log = source, slot, options, log
        self._limits = limits
        self._confirmed = self._delivered = start_lsn
        self._timeline = timeline
        self._receiver: Receiver | None = None
        self._connection = ExitStack()
        self._wakeup = Wakeup()
        self._stopped = self._restarting = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.disconnect()
        self._wakeup.close()

    def stop(self) -> None:
        """Make `items` and the stream end soon; any thread, and a signal handler, may call this."""
        self._stopped = True
        if (receiver := self._receiver) is not None:
            receiver.end()
        self._wakeup.ring()

    def restart(self) -> None:
        """Make `items` connect again after the newest item; the server sends all unconfirmed messages again."""
        self._restarting = True

    def confirm(self, lsn: int) -> None:
        """Confirm to the slot that everything that commits before `lsn` is durable; ignore an earlier `lsn`.

        Raises ValueError for a position beyond the items since the last `Started`.
        """
        if lsn > self._delivered:
            raise ValueError(f"{format_lsn(lsn)} was not received, only {format_lsn(self._delivered)}")
        if lsn > self._confirmed:
            self._confirmed = lsn
            if self._receiver is not None:
                self._receiver.confirm(lsn)

    def items(self) -> Iterator[Started | Received]:
        """The items that arrive, in order, until `stop`; at least one per second while there is a connection."""
        seconds = self._limits.connect_seconds
        try:
            while (receiver := self._connect(seconds)) is not None:
                self._delivered = self._confirmed
                assert self._timeline is not None
                yield Started(self._confirmed, self._timeline)
                try:
                    with translate_slot_errors(self._source.name, self._slot, "read"):
                        yield from self._receive(receiver)
                except SourceError as error:
                    if not _may_succeed_later(error):
                        raise
                    self._log(f"{error.message}; connecting again from {format_lsn(self._confirmed)}")
                self.disconnect()
                self._pause(_PAUSE_SECONDS)
                seconds = self._limits.reconnect_seconds
        finally:
            self.disconnect()

    def _receive(self, receiver: Receiver) -> Iterator[Received]:
        for item in receiver.items():
            if self._stopped:
                return
            self._delivered = item.position
            yield item
            if self._restarting:
                self._restarting = False
                return

    def _connect(self, seconds: float) -> Receiver | None:
        """A running receiver, within this many seconds; None if the stream was stopped meanwhile."""

        def is_over(state: RetryCallState) -> bool:
            return self._stopped or stop_after_delay(seconds)(state)

        attempts = Retrying(
            retry=retry_if_exception(_may_succeed_later),
            wait=wait_exponential(0.1, max=30),
            stop=is_over,
            sleep=self._pause,
            reraise=True,
        )
        if self._stopped:
            return None
        try:
            self._receiver = attempts(self._start)
        except SourceError:
            if self._stopped:
                return None
            raise
        return None if self._stopped else self._receiver

    def _start(self) -> Receiver:
        source, slot = self._source, self._slot
        with ExitStack() as stack:
            # A walsender takes no parameters, so the cursor merges them into the query.
            connection = stack.enter_context(
                source.connect(replication="database", cursor_factory=psycopg.ClientCursor)
            )
            with translate_slot_errors(source.name, slot, "read"):
                state, timeline = slot_state(connection, slot), current_timeline(connection)
                status_seconds = _status_seconds(connection)
            if self._timeline not in {None, timeline}:
                refuse_divergence(source, self._timeline, self._confirmed, timeline)
            self._timeline = timeline
            verify_slot(state, source.name, slot, self._confirmed)
            with translate_slot_errors(source.name, slot, "read"):
                verify_wal_end(connection, source.name, self._confirmed)
                start_replication(connection, slot, self._confirmed, self._options)
            receiver = Receiver(
                connection,
                self._confirmed,
                self._wakeup,
                buffer_bytes=self._limits.buffer_bytes,
                status_seconds=min(status_seconds, self._limits.silence_seconds / 3),
                silence_seconds=self._limits.silence_seconds,
            )
            stack.callback(receiver.close)
            self._connection = stack.pop_all()
        return receiver

    def disconnect(self) -> None:
        """End the connection; other processes can use the slot a moment later."""
        self._receiver = None
        self._connection.close()

    def _pause(self, seconds: float) -> None:
        """Wait this long, or until `stop`."""
        self._wakeup.clear()
        if not self._stopped:
            waiting = poll()
            waiting.register(self._wakeup, POLLIN)
            waiting.poll(seconds * 1000)


def _may_succeed_later(error: BaseException) -> bool:
    """Whether another attempt may succeed: the connection was lost, the slot is in use, or the server's error is transient."""
    if isinstance(error, SourceUnreachableError | SlotInUseError):
        return True
    cause = error.__cause__
    return isinstance(cause, psycopg.Error) and is_transient(cause)


def _status_seconds(connection: psycopg.Connection[Any]) -> float:
    """The pause between two reports, short enough for the server's wal_sender_timeout."""
    row = connection.execute(
        "select setting::integer from pg_settings where name = 'wal_sender_timeout'"
    ).fetchone()
    assert row is not None
    return min(_STATUS_SECONDS, row[0] / 3000 or _STATUS_SECONDS)


def start_replication(
    connection: psycopg.Connection[Any], slot: str, lsn: int, options: PgoutputOptions
) -> None:
    """Run START_REPLICATION. The only escape in its strings is the doubled quote (repl_scanner.l)."""
    arguments = ", ".join(
        f"{quote(name)} '{value.replace(chr(39), chr(39) * 2)}'"
        for name, value in options.arguments(connection.info.server_version).items()
    )
    if connection.info.parameter_status("server_encoding") == "SQL_ASCII":
        # Otherwise bytes that are not UTF-8 would end the whole stream; see `_SQL_ASCII_CASE` of slot.py.
        connection.pgconn.exec_(b"set client_encoding = 'SQL_ASCII'")
    result = connection.pgconn.exec_(
        f"START_REPLICATION SLOT {quote(slot)} LOGICAL {format_lsn(lsn)} ({arguments})".encode()
    )
    if result.status != ExecStatus.COPY_BOTH:
        raise psycopg.errors.error_from_result(result, connection.info.encoding)
