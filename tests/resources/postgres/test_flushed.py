"""Who reads a slot does not wait for a record of which the server has flushed a part."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.slot import (
    advance,
    create_slot,
    current_lsn,
    flushed_lsn,
    inserted_lsn,
    peek_query,
)
from pgsieve.resources.postgres.source import Source
from tests.fixtures.oracle import wait_until
from tests.fixtures.servers import TEST_SETTINGS, new_server


@pytest.fixture
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    with new_server(postgres_version, TEST_SETTINGS) as running:
        yield running


@pytest.mark.parametrize("setting", ["default_transaction_read_only=on", "synchronous_commit=off"])
def test_what_is_flushed_in_part_is_read_at_once(server: EmbeddedServer, setting: str) -> None:
    # The server would have it flushed within 15 seconds (LOG_SNAPSHOT_INTERVAL_MS in src/backend/postmaster/bgwriter.c).
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
        position: list[int] = []

        def is_flushed_in_part() -> bool:
            position[:] = [current_lsn(connection), inserted_lsn(connection)]
            return position[0] % 8192 == 0 and position[0] < position[1]

        wait_until(is_flushed_in_part, lambda: f"{position}")
        lsn = flushed_lsn(reading)
        assert position[1] <= lsn <= current_lsn(reading)
        query = peek_query("s", lsn, PgoutputOptions(("p",)), connection.info.server_version)
        kinds = b"".join(data[:1] for (data,) in reading.execute(query).fetchall())
        assert kinds == b"BRIC"
        advance(reading, "shop", "s", lsn)


def test_where_all_is_flushed_nothing_is_written(server: EmbeddedServer) -> None:
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("CREATE TABLE t (k int)")
        connection.execute("CHECKPOINT")
        wait_until(lambda: current_lsn(connection) >= inserted_lsn(connection), lambda: "it is never flushed")
        before = inserted_lsn(connection)
        assert flushed_lsn(connection) == before == inserted_lsn(connection)
