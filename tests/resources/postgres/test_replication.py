"""Streaming replication from a real server: what arrives, what is confirmed, and what happens when it is cut."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import psycopg
import pytest

from pgsieve.decoding.lsn import parse_lsn
from pgsieve.decoding.protocol.change_messages import Insert
from pgsieve.decoding.protocol.messages import decode
from pgsieve.decoding.protocol.tuple_data import Text
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceError, SourceUnreachableError
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import Received, Receiver, Wakeup
from pgsieve.resources.postgres.slot import (
    SlotAheadError,
    SlotInUseError,
    SlotMissingError,
    create_slot,
    drop_slot,
    slot_state,
)
from pgsieve.resources.postgres.source import Source, literal, quote
from pgsieve.resources.postgres.stream import ReplicationStream, Started, StreamLimits, start_replication
from pgsieve.resources.postgres.wal import current_lsn
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server

PUBLICATION = r"""odd "name", it's \ all"""
OPTIONS = PgoutputOptions((PUBLICATION,))

_numbers = itertools.count(1)


@dataclass
class Publisher:
    """A database, a connection to it and a slot."""

    server: EmbeddedServer
    name: str
    connection: psycopg.Connection[Any]
    slot: str = ""
    start: int = 0
    log: list[str] = field(default_factory=list)

    def __call__(self, *statements: str) -> list[tuple[Any, ...]]:
        cursor = None
        for statement in statements:
            cursor = self.connection.execute(statement.encode())
        return cursor.fetchall() if cursor and cursor.description else []

    def source(self, **settings: str) -> Source:
        """Conninfo over the server's socket; `settings` are the session's."""
        options = " ".join(f"-c {name}={value}" for name, value in settings.items())
        return Source("shop", self.server.conninfo(dbname=self.name, options=options))

    def new_slot(self) -> str:
        self.slot = f"slot_{next(_numbers)}"
        self.start = create_slot(self.connection, "shop", self.slot)
        return self.slot

    def stream(self, options: PgoutputOptions = OPTIONS, **limits: Any) -> ReplicationStream:
        settings = limits.pop("settings", {})
        slot, start = limits.pop("slot", self.slot), limits.pop("start", self.start)
        source, chosen = self.source(**settings), StreamLimits(**limits)
        return ReplicationStream(source, slot, options, start, log=self.log.append, limits=chosen)

    def confirmed(self) -> int:
        state = slot_state(self.connection, self.slot)
        assert state is not None
        return state.confirmed_lsn

    def walsender(self) -> int:
        """The process that has the slot."""
        rows = self(f"select active_pid from pg_replication_slots where slot_name = '{self.slot}' and active")
        return int(rows[0][0]) if rows else 0

    def reconnect(self) -> None:
        self.connection.close()
        self.connection = psycopg.connect(self.server.conninfo(dbname=self.name), autocommit=True)


@contextmanager
def database(server: EmbeddedServer) -> Iterator[Publisher]:
    name = f"stream_{next(_numbers)}"
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name} template template0".encode())
    made = Publisher(server, name, psycopg.connect(server.conninfo(dbname=name), autocommit=True))
    made(
        "create table t (a bigint primary key, b text)",
        f"create publication {quote(PUBLICATION)} for table t",
    )
    yield made
    for (slot,) in made("select slot_name from pg_replication_slots where database = current_database()"):
        drop_slot(made.connection, "publisher", slot)
    made.connection.close()
    with psycopg.connect(server.conninfo(), autocommit=True) as admin:
        admin.execute(f"drop database {name} with (force)".encode())


@pytest.fixture
def publisher(publisher_server: EmbeddedServer) -> Iterator[Publisher]:
    with database(publisher_server) as made:
        made.new_slot()
        yield made


@pytest.fixture(scope="module")
def own_server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server that may be stopped; a test that stops it starts it again."""
    settings = TEST_SETTINGS | {"shared_buffers": "16MB"}
    with new_server(postgres_version, settings) as server:
        yield server


@pytest.fixture
def own_publisher(own_server: EmbeddedServer) -> Iterator[Publisher]:
    with database(own_server) as made:
        made.new_slot()
        yield made
        own_server.start()
        made.reconnect()


class Consumer:
    """Keeps whole transactions as durable, confirms them at once, and forgets the rest when the stream restarts."""

    def __init__(self, stream: ReplicationStream) -> None:
        self.stream, self.items = stream, stream.items()
        self.durable: list[bytes] = []
        self.pending: list[bytes] = []
        self.starts: list[int] = []
        self.position = 0

    def take(self, item: Started | Received) -> None:
        if isinstance(item, Started):
            self.starts.append(item.lsn)
            self.pending.clear()
            return
        for message in item.messages.column("data").to_pylist():
            self.pending.append(message)
            if message[:1] == b"C":
                self.durable += self.pending
                self.pending.clear()
        self.position = item.position
        self.stream.confirm(item.position)

    def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        for item in self.items:
            self.take(item)
            if done():
                return
            assert time.monotonic() < deadline, "what is waited for did not arrive"

    @property
    def changes(self) -> list[bytes]:
        """Inserts, updates and deletes; Relation messages come again in each session."""
        return [message for message in self.durable if message[:1] in b"IUD"]


@contextmanager
def consuming(stream: ReplicationStream) -> Iterator[Consumer]:
    """A consumer in a thread of its own, stopped at the end of the block; its error is the block's."""
    consumer, failures = Consumer(stream), []

    def run() -> None:
        try:
            for item in consumer.items:
                consumer.take(item)
        except Exception as error:  # noqa: BLE001 (raised below)
            failures.append(error)

    thread = threading.Thread(target=run)
    with stream:
        thread.start()
        try:
            yield consumer
        finally:
            stream.stop()
            thread.join(10)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def peeked(
    publisher: Publisher, slot: str, options: PgoutputOptions, **settings: str
) -> list[tuple[int, bytes]]:
    with publisher.source(**settings).connect() as connection:
        arguments = options.arguments(connection.info.server_version)
        quoted = ", ".join(literal(text) for argument in arguments.items() for text in argument)
        query = (
            f"select lsn::text, data from pg_logical_slot_peek_binary_changes('{slot}', null, null, {quoted})"
        )
        return [(parse_lsn(lsn), data) for lsn, data in connection.execute(query.encode())]


def keys(changes: list[bytes]) -> list[int]:
    """The first column of inserts into t."""
    inserted = []
    for change in map(decode, changes):
        assert isinstance(change, Insert)
        assert isinstance(change.new[0], Text)
        inserted.append(int(change.new[0].content))
    return inserted


CASES = {
    "plain": OPTIONS,
    "binary": replace(OPTIONS, binary=True),
    "streaming": replace(OPTIONS, streaming="on"),
    "parallel": replace(OPTIONS, streaming="parallel"),
    "two_phase": replace(OPTIONS, two_phase=True),
    "origin": replace(OPTIONS, origin="none"),
    "messages": replace(OPTIONS, messages=True),
    "all": PgoutputOptions((PUBLICATION,), True, "parallel", True, "none", True),
}
SMALL_MEMORY = {"logical_decoding_work_mem": "64kB", "datestyle": "german", "bytea_output": "escape"}


@pytest.fixture(scope="module")
def recorded(publisher_server: EmbeddedServer) -> Iterator[tuple[Publisher, dict[str, int]]]:
    """A database with all that options are about, and two slots a case with where they begin."""
    with database(publisher_server) as made:
        made(
            "create type mood as enum ('glad', 'sad')",
            "create table v (a int primary key, b timestamptz, c bytea, d interval, e float8, f mood, g numeric)",
            f"alter publication {quote(PUBLICATION)} add table v",
        )
        starts = {}
        for case in CASES:
            starts[case] = create_slot(made.connection, "shop", f"{made.name}_{case}")
            made(f"select pg_copy_logical_replication_slot('{made.name}_{case}', '{made.name}_{case}_peek')")
        made(
            "insert into v select i, timestamptz '2024-02-29 12:00+01' + i * interval '1 day', '\\x00ff', '1 mon 2 days',"
            " i / 3.0, 'sad', i / 7.0 from generate_series(1, 50) i",
            "update v set e = 'nan', f = null where a < 5",
            "select pg_logical_emit_message(false, 'outside', 'of a transaction')",
            "begin",
            "insert into t select i, 'streamed ' || i from generate_series(1, 2000) i",
            "savepoint s",
            "insert into t select i, 'rolled back' from generate_series(3001, 4000) i",
            "rollback to s",
            "select pg_logical_emit_message(true, 'inside', 'a transaction')",
            "delete from t where a % 2 = 0",
            "commit",
            "begin",
            "insert into t values (5000, 'prepared')",
            f"prepare transaction '{made.name}'",
            "insert into t values (5001, 'between')",
            f"commit prepared '{made.name}'",
            f"select pg_replication_origin_create('{made.name}')",
            f"select pg_replication_origin_session_setup('{made.name}')",
            "insert into t values (5002, 'from elsewhere')",
            "select pg_replication_origin_session_reset()",
            f"select pg_replication_origin_drop('{made.name}')",
            "truncate t",
        )
        yield made, starts


@pytest.mark.parametrize("case", CASES)
def test_both_transports_deliver_the_same_messages(
    recorded: tuple[Publisher, dict[str, int]], case: str
) -> None:
    publisher, begin = recorded
    options, slot = CASES[case], f"{publisher.name}_{case}"
    expected = peeked(publisher, f"{slot}_peek", options, **SMALL_MEMORY)
    arrived: list[tuple[int, bytes]] = []
    end = current_lsn(publisher.connection)
    with publisher.stream(options, slot=slot, start=begin[case], settings=SMALL_MEMORY) as stream:
        items = stream.items()
        assert next(items) == Started(begin[case], timeline=1)
        for item in items:
            assert isinstance(item, Received)
            columns = item.messages.to_pydict()
            arrived += zip(columns["lsn"], columns["data"], strict=True)
            if item.position >= end:
                break
    # A walsender gives no position to what another message follows on (WalSndPrepareWrite in walsender.c).
    assert {data[:1] for lsn, data in arrived if not lsn} <= {b"R", b"Y", b"O", b"B", b"b", b"S"}
    assert arrived == [
        (lsn if at else 0, data) for (lsn, data), (at, _) in zip(expected, arrived, strict=True)
    ]
    texts, kinds = [data for _, data in arrived], {data[:1] for _, data in arrived}
    modern = publisher.connection.info.server_version >= 160000
    assert (b"S" in kinds) == (options.streaming != "off")
    assert ({b"b", b"P", b"K"} <= kinds) == options.two_phase
    assert (b"M" in kinds) == options.messages
    assert any(b"elsewhere" in text for text in texts) == (options.origin == "any" or not modern)
    # Output settings are the session's own, whatever conninfo says.
    assert any(b"2024-03-01 11:00:00+00" in text for text in texts) == (not options.binary)
    assert any(rb"\x00ff" in text for text in texts) == (not options.binary)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (130000, {"proto_version": "1"}),
        (140000, {"proto_version": "2", "binary": "true", "messages": "true", "streaming": "on"}),
        (
            150000,
            {
                "proto_version": "3",
                "binary": "true",
                "messages": "true",
                "streaming": "on",
                "two_phase": "true",
            },
        ),
        (
            160000,
            {
                "proto_version": "4",
                "binary": "true",
                "messages": "true",
                "streaming": "parallel",
                "two_phase": "true",
                "origin": "none",
            },
        ),
    ],
)
def test_a_server_is_asked_only_for_what_it_knows(version: int, expected: dict[str, str]) -> None:
    names = {"publication_names": '"odd ""name"", it\'s \\ all"'}
    assert CASES["all"].arguments(version) == expected | names
    assert OPTIONS.arguments(version) == {"proto_version": expected["proto_version"]} | names


@pytest.mark.slow
@pytest.mark.drawn
def test_a_busy_consumer_keeps_its_connection_and_little_memory(publisher: Publisher) -> None:
    rows, buffer_bytes = 110_000, 8 << 20
    publisher(  # 200 MB
        "alter table t alter b set storage plain",
        f"insert into t select i, repeat('x', 1900) from generate_series(1, {rows}) i",
    )
    process = psutil.Process()
    with publisher.stream(settings={"wal_sender_timeout": "2s"}, buffer_bytes=buffer_bytes) as stream:
        items = stream.items()
        assert isinstance(next(items), Started)
        walsender, before = publisher.walsender(), process.memory_info().rss
        time.sleep(5)
        received = 0
        most = process.memory_info().rss
        while received < rows + 3:  # Begin, Relation, Commit
            item = next(items)
            assert isinstance(item, Received), "the connection was cut"
            received += item.messages.num_rows
            most = max(most, process.memory_info().rss)
        assert publisher.walsender() == walsender
    assert most - before < buffer_bytes + (24 << 20)


def test_a_server_that_asks_is_answered(publisher: Publisher) -> None:
    """Reports by the clock alone would come too late here."""
    source, wakeup = publisher.source(wal_sender_timeout="1s"), Wakeup()
    with source.connect(replication="database") as connection:
        start_replication(connection, publisher.slot, publisher.start, OPTIONS)
        limits = {"buffer_bytes": 1 << 20, "status_seconds": 60.0, "silence_seconds": 60.0}
        receiver = Receiver(connection, publisher.start, wakeup, **limits)
        walsender = publisher.walsender()
        time.sleep(3)
        assert publisher.walsender() == walsender
        receiver.close()
    wakeup.close()


def test_what_is_cut_is_sent_again_from_the_last_confirmed_position(publisher: Publisher) -> None:
    """Neither lost nor repeated: a consumer forgets what it has not confirmed."""
    for first in range(1, 20_001, 500):
        publisher(f"insert into t select i, repeat('x', 500) from generate_series({first}, {first + 499}) i")
    with publisher.stream(buffer_bytes=1 << 18) as stream:
        consumer = Consumer(stream)
        for goal in (500, 7000, 14_000):
            consumer.until(lambda goal=goal: len(consumer.changes) >= goal)
            publisher(f"select pg_terminate_backend({publisher.walsender()})")
        publisher("insert into t values (20001, 'after')")
        consumer.until(lambda: len(consumer.changes) >= 20_001)
    assert keys(consumer.changes) == list(range(1, 20_002))
    assert consumer.starts == sorted(consumer.starts)
    assert (
        len(publisher.log) == len(consumer.starts) - 1 >= 1
    )  # what is still buffered outlives its connection
    assert all("connecting again" in line for line in publisher.log)


@pytest.mark.parametrize("immediate", [False, True], ids=["fast", "immediate"])
def test_a_server_may_restart(own_publisher: Publisher, immediate: bool) -> None:
    publisher = own_publisher
    with consuming(publisher.stream()) as consumer:
        publisher("insert into t values (1, 'before')")
        wait_until(lambda: len(consumer.changes) == 1, lambda: "1 did not arrive")
        publisher.connection.close()
        publisher.server.stop(immediate=immediate)  # a fast stop waits until all is confirmed
        publisher.server.start()
        publisher.reconnect()
        publisher("insert into t values (2, 'after')")
        wait_until(lambda: len(consumer.changes) >= 2, lambda: "2 did not arrive")
    assert keys(consumer.changes) == [1, 2]
    assert len(consumer.starts) == 2


def test_a_server_that_stays_away_is_an_error_after_a_while(own_publisher: Publisher) -> None:
    publisher = own_publisher
    with publisher.stream(reconnect_seconds=0.5) as stream:
        items = stream.items()
        assert isinstance(next(items), Started)
        publisher.server.stop(immediate=True)
        with pytest.raises(SourceUnreachableError):
            list(items)


def test_a_server_that_falls_silent_is_left(publisher: Publisher) -> None:
    with consuming(publisher.stream(silence_seconds=1.5)) as consumer:
        wait_until(lambda: bool(publisher.walsender()), lambda: "no walsender")
        stopped = publisher.walsender()
        os.kill(stopped, signal.SIGSTOP)
        try:
            wait_until(lambda: "silent" in "".join(publisher.log), lambda: "silence is not noticed")
        finally:
            os.kill(stopped, signal.SIGCONT)
        publisher("insert into t values (1, 'x')")
        wait_until(lambda: bool(consumer.changes), lambda: "nothing arrives after the silence")
    assert len(consumer.starts) == 2


def test_an_idle_server_is_not_taken_for_a_silent_one(publisher: Publisher) -> None:
    with consuming(publisher.stream(silence_seconds=0.5)) as consumer:
        time.sleep(2)
        publisher("insert into t values (1, 'x')")
        wait_until(lambda: bool(consumer.changes), lambda: "nothing arrives")
    assert len(consumer.starts) == 1


def test_stop_ends_it_from_another_thread_and_frees_the_slot(publisher: Publisher) -> None:
    publisher("insert into t values (1, 'x')")
    with publisher.stream() as stream:
        consumer = Consumer(stream)
        consumer.until(lambda: bool(consumer.durable))
        threading.Timer(0.3, stream.stop).start()
        begun = time.monotonic()
        for item in consumer.items:
            consumer.take(item)
        assert time.monotonic() - begun < 3
        assert not publisher.walsender()
    assert publisher.confirmed() == consumer.position


def test_stop_ends_it_from_a_signal_handler(publisher: Publisher) -> None:
    with publisher.stream() as stream:
        previous = signal.signal(signal.SIGUSR1, lambda *_: stream.stop())
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert isinstance(list(stream.items())[0], Started)  # noqa: RUF015 (all of them are waited for)
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert list(stream.items()) == []


def test_stop_ends_waiting_for_a_server(own_publisher: Publisher) -> None:
    publisher = own_publisher
    publisher.server.stop(immediate=True)
    with publisher.stream(connect_seconds=60) as stream:
        threading.Timer(0.5, stream.stop).start()
        assert list(stream.items()) == []


def test_a_slot_in_use_is_waited_for_and_then_refused(publisher: Publisher) -> None:
    with publisher.stream() as first:
        items = first.items()
        assert isinstance(next(items), Started)
        with publisher.stream(connect_seconds=0.5) as second, pytest.raises(SlotInUseError) as refused:
            next(second.items())
        assert refused.value.sqlstate == "55006"
        with publisher.stream(connect_seconds=30) as third:
            threading.Timer(0.5, first.stop).start()
            assert isinstance(next(third.items()), Started)


def test_what_no_repetition_mends_is_refused_at_once(publisher: Publisher) -> None:
    with publisher.stream(slot="nowhere") as stream, pytest.raises(SlotMissingError) as refused:
        next(stream.items())
    assert refused.value.sqlstate == "42704"
    publisher("insert into t values (1, 'x')")
    publisher(f"select pg_replication_slot_advance('{publisher.slot}', pg_current_wal_lsn())")
    with publisher.stream() as stream, pytest.raises(SlotAheadError, match="changes between are lost"):
        next(stream.items())


def test_an_error_of_decoding_follows_what_came_before_it(publisher: Publisher) -> None:
    publisher(
        f"alter publication {quote(PUBLICATION)} set table t where (10 / a > 0)",
        "insert into t values (1, 'x')",
        "insert into t values (0, 'division by zero')",
    )
    with publisher.stream() as stream:
        consumer = Consumer(stream)
        with pytest.raises(SourceError, match="division by zero") as refused:
            consumer.until(lambda: False)
    assert refused.value.sqlstate == "22012"
    assert keys(consumer.changes) == [1]
    assert not publisher.log


def test_an_idle_database_moves_the_slot(publisher: Publisher) -> None:
    with consuming(publisher.stream()):
        publisher("create table unpublished as select i from generate_series(1, 1000) i")
        end = current_lsn(publisher.connection)
        wait_until(lambda: publisher.confirmed() >= end, lambda: "the slot stays behind")


def test_only_what_was_received_is_confirmed_and_never_less(publisher: Publisher) -> None:
    publisher("insert into t values (1, 'x')")
    with publisher.stream() as stream:
        consumer = Consumer(stream)
        with pytest.raises(ValueError, match="was not received"):
            stream.confirm(publisher.start + 1)
        consumer.until(lambda: bool(consumer.durable))
        stream.confirm(publisher.start)
        with pytest.raises(ValueError, match="was not received"):
            stream.confirm(consumer.position + 1)
    assert publisher.confirmed() == consumer.position


def test_an_unconfirmed_transaction_holds_the_slot_back(publisher: Publisher) -> None:
    with publisher.stream() as stream:
        items = stream.items()
        next(items)
        publisher("insert into t values (1, 'x')")
        while not next(items).messages.num_rows:
            pass
    assert publisher.confirmed() == publisher.start
