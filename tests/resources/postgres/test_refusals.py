"""What the server refuses is said in its own words, whichever driver asked."""

from __future__ import annotations

import os
import socket

import psycopg
import pytest
from psycopg.pq import ExecStatus

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import (
    ForeignServerError,
    PassingFaultError,
    message_without_values,
    refusing,
)
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


@pytest.mark.parametrize("sqlstate", ["08000", "08001", "08003", "08006", "08P01", "HV00N"])
def test_a_lost_connection_is_another_servers_where_the_session_goes_on(
    publisher_server: EmbeddedServer, sqlstate: str
) -> None:
    """As postgres_fdw and dblink raise it; a server that ends a session says FATAL, and libpq has no SQLSTATE."""
    raising = f"do $$ begin raise exception using errcode = '{sqlstate}', message = 'no connection'; end $$"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as connection:
        with pytest.raises(ForeignServerError) as refused, refusing("shop", "read"):
            connection.execute(raising)
        assert refused.value.sqlstate == sqlstate
        connection.execute("select 1")
        with Conninfo(publisher_server.conninfo()).adbc() as other, other.cursor() as cursor:
            with pytest.raises(ForeignServerError) as refused, refusing("shop", "read"):
                cursor.execute(raising)
            assert refused.value.sqlstate == sqlstate
            other.rollback()
            cursor.execute("select pg_backend_pid()")
            connection.execute("select pg_terminate_backend(%s)", cursor.fetchone())
            with pytest.raises(PassingFaultError), refusing("shop", "read"):
                cursor.execute("select 1")


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ('invalid input syntax for type integer: "a cell"', "invalid input syntax for type integer: ..."),
        ("ungültige Eingabesyntax für Typ integer: »a cell«", "ungültige Eingabesyntax für Typ integer: ..."),
        ("syntaxe en entrée invalide pour le type integer : « a cell »",
         "syntaxe en entrée invalide pour le type integer : ..."),
        ("Relation »ddl_log« existiert nicht", "Relation »ddl_log« existiert nicht"),
    ],
)  # fmt: skip
def test_a_value_is_not_shown_in_whatever_language_the_server_speaks(told: str, shown: str) -> None:
    """By lc_messages, which only a superuser sets."""
    assert message_without_values(psycopg.errors.InvalidTextRepresentation(told)) == shown
