"""A status update confirms the same as an advance of the slot, but without decoding."""

from __future__ import annotations

import random
from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.resources.postgres import confirmation
from pgsieve.resources.postgres.confirmation import confirm, release_wal
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.slot import advance_slot, create_slot, read_slot_state
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_flushed_lsn
from tests.fixtures.servers import DECODINGS_LOGGED, TEST_SETTINGS, decodings, new_server

pytestmark = pytest.mark.slow

OPTIONS = PgoutputOptions(publications=("p",))


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    settings = {**TEST_SETTINGS, **DECODINGS_LOGGED, "max_prepared_transactions": "10"}
    settings |= {"log_replication_commands": "on", "max_wal_senders": "1"}
    with new_server(postgres_version, settings) as running:
        yield running


@pytest.fixture
def connection(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A session of a database in which every confirmation counts as large."""
    monkeypatch.setattr(confirmation, "STATUS_UPDATE_MIN_BYTES", 0)
    with psycopg.connect(server.conninfo(), autocommit=True) as session:
        session.execute("CREATE TABLE t (k int, v text); CREATE PUBLICATION p FOR TABLE t")
        yield session


def sent(connection: psycopg.Connection, slot: str) -> list[bytes]:
    query = peek_query(slot, read_flushed_lsn(connection), OPTIONS, connection.info.server_version)
    return [bytes(data) for (data,) in connection.execute(query).fetchall()]


@pytest.mark.parametrize("two_phase", [False, True])
def test_a_status_update_confirms_the_same_as_an_advance(
    server: EmbeddedServer, connection: psycopg.Connection, two_phase: bool
) -> None:
    source, numbers = Source("shop", server.conninfo()), random.Random(7)
    for slot in ("reported", "advanced"):
        create_slot(connection, source.name, slot, two_phase=two_phase)
    open_ones: list[psycopg.Connection] = []
    for number in range(40):
        session = psycopg.connect(server.conninfo())
        session.execute(
            "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, %s) i", [1 + number * 5]
        )
        match numbers.randrange(4):
            case 0:
                open_ones.append(session)
            case 1:
                with session:
                    session.execute(f"PREPARE TRANSACTION 'g{number}'".encode())
                if numbers.random() < 0.7:
                    connection.execute(f"COMMIT PREPARED 'g{number}'".encode())
            case _:
                with session:
                    pass
        if open_ones and numbers.random() < 0.4:
            with open_ones.pop(0):
                pass
        if number % 3 == 0:
            connection.execute("SELECT pg_log_standby_snapshot()")
        if number % 4 == 0:
            lsn = read_flushed_lsn(connection)
            confirm(connection, source, "reported", lsn, OPTIONS, durable)
            advance_slot(connection, source.name, "advanced", lsn)
            reported, advanced = (read_slot_state(connection, slot) for slot in ("reported", "advanced"))
            assert reported
            assert advanced
            assert reported.confirmed_lsn == advanced.confirmed_lsn == lsn
            assert not reported.is_active
            assert sent(connection, "reported") == sent(connection, "advanced") == []
            if number % 8 == 0:
                release_wal(connection, source.name, "reported", lsn)
        assert sent(connection, "reported") == sent(connection, "advanced")
    for session in open_ones:
        with session:
            pass
    assert sent(connection, "reported") == sent(connection, "advanced") != []


def test_a_status_update_confirms_without_decoding(
    server: EmbeddedServer, connection: psycopg.Connection
) -> None:
    source = Source("shop", server.conninfo())
    create_slot(connection, source.name, "s")
    connection.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 1000) i")
    begun, lsn = decodings(server, "s"), read_flushed_lsn(connection)
    confirm(connection, source, "s", lsn, OPTIONS, durable)
    # The walsender starts one decoding, which it ends at once. An advance would be a second one.
    assert decodings(server, "s") == begun + 1
    confirm(connection, source, "s", lsn, OPTIONS, durable)
    assert decodings(server, "s") == begun + 1
    confirm(connection, source, "gone", lsn, OPTIONS, durable)


def test_an_advance_confirms_few_changes(
    server: EmbeddedServer, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirmation, "STATUS_UPDATE_MIN_BYTES", 2**40)
    assert_advanced(server, connection, Source("shop", server.conninfo()))


def test_a_slot_is_advanced_if_no_walsender_starts(
    server: EmbeddedServer, connection: psycopg.Connection
) -> None:
    with psycopg.connect(server.conninfo(), replication="database") as other:
        assert_advanced(server, connection, Source("shop", server.conninfo()))
        assert not other.closed


def test_a_failover_slot_is_advanced(
    server: EmbeddedServer, connection: psycopg.Connection, postgres_version: int
) -> None:
    """An advance waits until the standbys have the confirmed changes (synchronized_standby_slots)."""
    if postgres_version < 17:
        pytest.skip("slots have `failover` from 17 on")
    assert_advanced(server, connection, Source("shop", server.conninfo()), failover=True)


def durable() -> None:
    """Succeed: the changes to confirm are on disk."""


def lost() -> None:
    """Fail: the changes to confirm did not reach the disk."""
    raise OSError("no disk")


def assert_advanced(
    server: EmbeddedServer, connection: psycopg.Connection, source: Source, *, failover: bool = False
) -> None:
    create_slot(connection, source.name, "s", failover=failover)
    connection.execute("SELECT pg_logical_emit_message(true, 'x', 'y')")
    lsn, before = read_flushed_lsn(connection), read_slot_state(connection, "s")
    with pytest.raises(OSError, match="no disk"):
        confirm(connection, source, "s", lsn, OPTIONS, lost)
    assert read_slot_state(connection, "s") == before
    confirm(connection, source, "s", lsn, OPTIONS, durable)
    state = read_slot_state(connection, "s")
    assert state is not None
    assert state.confirmed_lsn == lsn
    # A walsender would have its own line: START_REPLICATION is logged as soon as it is received.
    assert "START_REPLICATION" not in server.log_path.read_text(errors="replace")
