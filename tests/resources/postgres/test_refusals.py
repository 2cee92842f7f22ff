"""What the server refuses is said in its own words, whichever driver asked."""

from __future__ import annotations

import os
import socket

import psycopg
import pytest
from psycopg.pq import ExecStatus

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import PassingFaultError, refusing
from pgsieve.resources.postgres.sessions import Conninfo


def test_a_refusal_of_what_a_driver_asks_for_itself_shows_the_servers_words(
    publisher_server: EmbeddedServer,
) -> None:
    impatient = Conninfo(publisher_server.conninfo(options="-c lock_timeout=100ms"))
    with psycopg.connect(publisher_server.conninfo()) as other:
        # ADBC's driver reads the types when it connects.
        other.execute("LOCK TABLE pg_catalog.pg_type IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(PassingFaultError) as refused, refusing("shop", "read"), impatient.adbc():
            pass
    assert refused.value.message == ('source "shop": cannot read (canceling statement due to lock timeout)')


def test_a_connection_that_was_cut_passes_however_libpq_tells_it(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo()) as connection:
        socket.socket(fileno=os.dup(connection.pgconn.socket)).shutdown(socket.SHUT_RDWR)
        result = connection.pgconn.exec_(b"select 1")
        assert result.status == ExecStatus.FATAL_ERROR
        told = psycopg.errors.error_from_result(result)
        assert (type(told), told.sqlstate) == (psycopg.DatabaseError, None)
        with pytest.raises(PassingFaultError), refusing("shop", "read"):
            raise told
    with psycopg.connect(publisher_server.conninfo()) as connection:
        socket.socket(fileno=os.dup(connection.pgconn.socket)).shutdown(socket.SHUT_RDWR)
        with pytest.raises(PassingFaultError), refusing("shop", "read"):
            connection.execute("select 1")
