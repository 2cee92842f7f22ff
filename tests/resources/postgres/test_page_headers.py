"""A reading that ends within a WAL page's header leaves the next record to the next reading: no change is delivered twice."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from pgsieve.decoding.lsn import format_lsn, parse_lsn
from pgsieve.decoding.protocol.messages import Insert, decode
from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.peeks import peek_query
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from tests.fixtures.servers import new_server

_PAGE, _HEADER = 8192, 24


@pytest.fixture(scope="module")
def server(postgres_version: int) -> Iterator[EmbeddedServer]:
    # No other process may write WAL.
    with new_server(postgres_version, {"autovacuum": "off", "fsync": "off"}) as running:
        yield running


def _inserted(session: psycopg.Connection) -> int:
    row = session.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def _fill_page(session: psycopg.Connection) -> int:
    """Let the last record end at the end of a page. Return this LSN."""

    def write(length: int) -> None:
        session.execute("select pg_logical_emit_message(false, 'p', repeat('x', %s))", [length])

    besides = 0
    for _ in range(200):
        at = _inserted(session)
        room = _PAGE - at % _PAGE
        if at % _PAGE == _HEADER and besides:
            return at - _HEADER
        if room < 2000:
            write(2000)  # continues in the next page
        elif not besides:
            write(800)
            besides = _inserted(session) - at - 800
        else:
            write(room - besides)
    raise AssertionError("no record ended with a page")


def test_a_record_after_a_header_is_delivered_once(server: EmbeddedServer) -> None:
    options = PgoutputOptions(publications=("p",))
    with (
        psycopg.connect(server.conninfo(), autocommit=True) as database,
        psycopg.connect(server.conninfo()) as session,
    ):
        version = database.info.server_version
        database.execute("create table t (a int primary key); create publication p for table t")
        database.execute("select pg_create_logical_replication_slot('s', 'pgoutput')")
        for number, offset in enumerate((0, 8, 16, _HEADER, _HEADER + 8), 1):
            session.execute("insert into t values (%s)", [number])
            page = _fill_page(session)
            session.commit()  # the commit record begins after the header
            ends = [page + offset, _inserted(database)]
            read = []
            for end in ends:
                rows = database.execute(peek_query("s", end, options, version)).fetchall()
                messages = (decode(bytes(data)) for (data,) in rows)
                read.append(sum(isinstance(message, Insert) for message in messages))
                database.execute("select pg_replication_slot_advance('s', %s::pg_lsn)", [format_lsn(end)])
            assert read == ([0, 1] if offset <= _HEADER else [1, 0]), offset
