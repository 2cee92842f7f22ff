"""Streaming replication whose connection is cut, falls silent, is stopped, or finds its slot in use."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceUnreachableError
from pgsieve.resources.postgres.receiver import Receiver, Wakeup
from pgsieve.resources.postgres.slot import SlotInUseError
from pgsieve.resources.postgres.stream import StreamStart, start_replication
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server
from tests.fixtures.streaming_publisher import (
    OPTIONS,
    Consumer,
    Publisher,
    consuming,
    keys,
    streaming_database,
)


@pytest.fixture(scope="module")
def own_server(postgres_version: int) -> Iterator[EmbeddedServer]:
    """A server that tests may stop; they start it again."""
    settings = TEST_SETTINGS | {"shared_buffers": "16MB"}
    with new_server(postgres_version, settings) as server:
        yield server


@pytest.fixture
def own_publisher(own_server: EmbeddedServer) -> Iterator[Publisher]:
    with streaming_database(own_server) as made:
        made.new_slot()
        yield made
        own_server.start()
        made.reconnect()


def test_a_server_that_asks_is_answered(publisher: Publisher) -> None:
    """Reports by the clock alone would be too late here."""
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


def test_after_a_cut_the_server_sends_again_from_the_last_confirmed_position(publisher: Publisher) -> None:
    """No message is lost or repeated: a consumer forgets unconfirmed messages."""
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
    assert len(publisher.log) == len(consumer.starts) - 1 >= 1  # buffered messages outlive their connection
    assert all("connecting again" in line for line in publisher.log)


@pytest.mark.parametrize("immediate", [False, True], ids=["fast", "immediate"])
def test_a_server_may_restart(own_publisher: Publisher, immediate: bool) -> None:
    publisher = own_publisher
    with consuming(publisher.stream()) as consumer:
        publisher("insert into t values (1, 'before')")
        wait_until(lambda: len(consumer.changes) == 1, lambda: "1 did not arrive")
        publisher.connection.close()
        publisher.server.stop(immediate=immediate)  # a fast stop waits until everything is confirmed
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
        assert isinstance(next(items), StreamStart)
        publisher.server.stop(immediate=True)
        with pytest.raises(SourceUnreachableError):
            list(items)


def test_a_silent_server_is_abandoned(publisher: Publisher) -> None:
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


def test_an_idle_server_is_not_mistaken_for_a_silent_one(publisher: Publisher) -> None:
    with consuming(publisher.stream(silence_seconds=0.5)) as consumer:
        time.sleep(2)
        publisher("insert into t values (1, 'x')")
        wait_until(lambda: bool(consumer.changes), lambda: "nothing arrives")
    assert len(consumer.starts) == 1


def test_stop_ends_the_stream_from_another_thread_and_frees_the_slot(publisher: Publisher) -> None:
    publisher("insert into t values (1, 'x')")
    with publisher.stream() as stream:
        consumer = Consumer(stream)
        consumer.until(lambda: bool(consumer.durable))
        stopped, late = threading.Event(), 0

        def stop() -> None:
            stream.stop()
            stopped.set()

        threading.Timer(0.3, stop).start()
        for item in consumer.items:
            late += stopped.is_set()
            consumer.take(item)
        assert late <= 1, "more than the item that was on its way"
        assert not publisher.walsender()
    assert publisher.confirmed() == consumer.position


def test_stop_ends_the_stream_from_a_signal_handler(publisher: Publisher) -> None:
    with publisher.stream() as stream:
        previous = signal.signal(signal.SIGUSR1, lambda *_: stream.stop())
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert isinstance(list(stream.items())[0], StreamStart)  # noqa: RUF015 (all of them are waited for)
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
        assert isinstance(next(items), StreamStart)
        with publisher.stream(connect_seconds=0.5) as second, pytest.raises(SlotInUseError) as refused:
            next(second.items())
        assert refused.value.sqlstate == "55006"
        with publisher.stream(connect_seconds=30) as third:
            threading.Timer(0.5, first.stop).start()
            assert isinstance(next(third.items()), StreamStart)
