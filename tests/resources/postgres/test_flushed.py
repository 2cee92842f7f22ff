"""A reader of a slot does not wait for a record that the server has flushed only in part."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.slot import advance_slot, create_slot
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.wal import read_current_lsn, read_flushed_lsn, read_inserted_lsn
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server

pytestmark = pytest.mark.slow


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    with new_server(postgres_version, TEST_SETTINGS) as running:
        yield running


@pytest.mark.parametrize("setting", ["default_transaction_read_only=on", "synchronous_commit=off"])
def test_a_record_flushed_in_part_is_read_at_once(server: EmbeddedServer, setting: str) -> None:
    # The server itself would flush it within 15 seconds (LOG_SNAPSHOT_INTERVAL_MS in src/backend/postmaster/bgwriter.c).
    session = f"{server.conninfo()} options='-c {setting} -c statement_timeout=5s'"
    with (
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
        Source("shop", session).connect() as reading,
        psycopg.connect(server.conninfo()) as open_one,
    ):
        connection.execute("CREATE TABLE t (k int, v text); CREATE PUBLICATION p FOR TABLE t")
        create_slot(connection, "shop", "s")
        connection.execute("INSERT INTO t VALUES (1, 'committed')")
        open_one.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 200) i")
        wait_until(lambda: is_flushed_in_part(connection), lambda: "it is not flushed in part")
        inserted = read_inserted_lsn(connection)
        lsn = read_flushed_lsn(reading)
        assert inserted <= lsn <= read_current_lsn(reading)
        query = peek_query("s", lsn, PgoutputOptions(("p",)), connection.info.server_version)
        kinds = b"".join(data[:1] for (data,) in reading.execute(query).fetchall())
        assert kinds == b"BRIC"
        advance_slot(reading, "shop", "s", lsn)


@pytest.mark.parametrize("statement", ["CHECKPOINT", "SELECT pg_switch_wal()"])
def test_nothing_is_written_if_everything_is_flushed(server: EmbeddedServer, statement: str) -> None:
    """Otherwise an idle server would archive a segment at each `archive_timeout`."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (k int)")
        connection.execute(statement.encode())
        # After a switch comes the header of a page, which is flushed only with its first record.
        wait_until(
            lambda: read_inserted_lsn(connection) - read_current_lsn(connection) in {0, 40},
            lambda: "it is never flushed",
        )
        before = read_inserted_lsn(connection), read_current_lsn(connection)
        assert read_flushed_lsn(connection) == before[1]
        assert (read_inserted_lsn(connection), read_current_lsn(connection)) == before


def test_a_role_that_may_not_write_messages_waits_for_the_server(server: EmbeddedServer) -> None:
    with (
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
        psycopg.connect(server.conninfo()) as open_one,
    ):
        connection.execute("CREATE TABLE t (k int, v text); CREATE ROLE reader LOGIN REPLICATION")
        functions = connection.execute(
            "SELECT oid::regprocedure::text FROM pg_proc WHERE proname = 'pg_logical_emit_message'"
        ).fetchall()
        for (function,) in functions:
            connection.execute(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC".encode())
        open_one.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 200) i")
        wait_until(lambda: is_flushed_in_part(connection), lambda: "it is not flushed in part")
        with Source("shop", server.conninfo(user="reader")).connect() as reading:
            assert read_flushed_lsn(reading) % 8192 == 0


def is_flushed_in_part(connection: psycopg.Connection) -> bool:
    flushed = read_current_lsn(connection)
    return flushed % 8192 == 0 and flushed + 40 < read_inserted_lsn(connection)
