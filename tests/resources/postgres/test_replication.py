"""Streaming replication from a real server: received messages, confirmed positions, and refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from pgsieve.decoding.lsn import parse_lsn
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import ReceivedMessages
from pgsieve.resources.postgres.slot import SlotAheadError, SlotMissingError, create_slot
from pgsieve.resources.postgres.source import quote, quote_literal
from pgsieve.resources.postgres.stream import StreamStart
from pgsieve.resources.postgres.wal import read_current_lsn
from tests.fixtures.oracle import wait_until
from tests.fixtures.streaming_publisher import (
    OPTIONS,
    PUBLICATION,
    Consumer,
    Publisher,
    consuming,
    keys,
    streaming_database,
)


def peeked(
    publisher: Publisher, slot: str, options: PgoutputOptions, **settings: str
) -> list[tuple[int, bytes]]:
    with publisher.source(**settings).connect() as connection:
        arguments = options.make_arguments(connection.info.server_version)
        quoted = ", ".join(quote_literal(text) for argument in arguments.items() for text in argument)
        query = (
            f"select lsn::text, data from pg_logical_slot_peek_binary_changes('{slot}', null, null, {quoted})"
        )
        return [(parse_lsn(lsn), data) for lsn, data in connection.execute(query.encode())]


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
    """A database with changes for all options. Each case has two slots, and the LSN where they begin."""
    with streaming_database(publisher_server) as made:
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
    end = read_current_lsn(publisher.connection)
    with publisher.stream(options, slot=slot, start=begin[case], settings=SMALL_MEMORY) as stream:
        items = stream.items()
        assert next(items) == StreamStart(begin[case], timeline=1)
        for item in items:
            assert isinstance(item, ReceivedMessages)
            columns = item.messages.to_pydict()
            arrived += zip(columns["lsn"], columns["data"], strict=True)
            if item.position_lsn >= end:
                break
    # A walsender gives no position to a message that another one follows (WalSndPrepareWrite in walsender.c).
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
    # Each session has its own output settings, whatever conninfo says.
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
def test_a_server_gets_only_options_that_it_knows(version: int, expected: dict[str, str]) -> None:
    names = {"publication_names": '"odd ""name"", it\'s \\ all"'}
    assert CASES["all"].make_arguments(version) == expected | names
    assert OPTIONS.make_arguments(version) == {"proto_version": expected["proto_version"]} | names


@pytest.mark.slow
@pytest.mark.drawn
def test_a_busy_consumer_keeps_its_connection_and_little_memory(publisher: Publisher) -> None:
    """It may take long: 230 MB are written and streamed.

    The memory is compared with that after the first 30 MB, because other tests of the process have left memory in an
    unknown state: the allocators take new memory from the system for the first messages.
    """
    first_rows, rows, buffer_bytes = 16_000, 110_000, 8 << 20
    publisher(
        "alter table t alter b set storage plain",
        f"insert into t select -i, repeat('x', 1900) from generate_series(1, {first_rows}) i",
        f"insert into t select i, repeat('x', 1900) from generate_series(1, {rows}) i",
    )
    process = psutil.Process()
    with publisher.stream(settings={"wal_sender_timeout": "2s"}, buffer_bytes=buffer_bytes) as stream:
        items = stream.items()
        assert isinstance(next(items), StreamStart)
        walsender, received = publisher.walsender(), 0
        before = most = 0
        while received < first_rows + rows + 5:  # Relation, and Begin and Commit of each transaction
            if not before and received > first_rows:
                before = process.memory_info().rss
                time.sleep(5)
            item = next(items)
            assert isinstance(item, ReceivedMessages), "the connection was lost"
            received += item.messages.num_rows
            most = max(most, process.memory_info().rss)
        assert publisher.walsender() == walsender
    assert most - before < buffer_bytes + (24 << 20)


def test_a_permanent_error_is_raised_at_once(publisher: Publisher) -> None:
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
        end = read_current_lsn(publisher.connection)
        wait_until(lambda: publisher.confirmed() >= end, lambda: "the slot stays behind")


def test_exactly_the_received_changes_are_confirmed(publisher: Publisher) -> None:
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


def test_the_slot_waits_for_an_unconfirmed_transaction(publisher: Publisher) -> None:
    with publisher.stream() as stream:
        items = stream.items()
        next(items)
        publisher("insert into t values (1, 'x')")
        while not next(items).messages.num_rows:
            pass
    assert publisher.confirmed() == publisher.start
