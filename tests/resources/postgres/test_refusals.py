"""Refusals of the server keep its own words, with every driver."""

from __future__ import annotations

import os
import socket

import adbc_driver_manager
import psycopg
import pytest
from psycopg import sql
from psycopg.pq import ExecStatus

from pgsieve.resources.postgres.embedded import EmbeddedServer
from pgsieve.resources.postgres.errors import (
    ForeignServerError,
    TransientError,
    remove_values_from_message,
    translate_errors,
)
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.source import Source, SourceUnreachableError


def test_a_refusal_of_a_drivers_own_query_shows_the_servers_words(
    publisher_server: EmbeddedServer,
) -> None:
    impatient = Conninfo(publisher_server.conninfo(options="-c lock_timeout=100ms"))
    with psycopg.connect(publisher_server.conninfo()) as other:
        # ADBC's driver reads the types when it connects.
        other.execute("LOCK TABLE pg_catalog.pg_type IN ACCESS EXCLUSIVE MODE")
        with (
            pytest.raises(TransientError) as refused,
            translate_errors("shop", "read"),
            impatient.connect_adbc(),
        ):
            pass
    assert refused.value.message == ('source "shop": cannot read (canceling statement due to lock timeout)')


def test_a_lost_connection_is_temporary_however_libpq_reports_it(publisher_server: EmbeddedServer) -> None:
    with psycopg.connect(publisher_server.conninfo()) as connection:
        socket.socket(fileno=os.dup(connection.pgconn.socket)).shutdown(socket.SHUT_RDWR)
        result = connection.pgconn.exec_(b"select 1")
        assert result.status == ExecStatus.FATAL_ERROR
        error = psycopg.errors.error_from_result(result)
        assert (type(error), error.sqlstate) == (psycopg.DatabaseError, None)
        with pytest.raises(TransientError), translate_errors("shop", "read"):
            raise error
    with psycopg.connect(publisher_server.conninfo()) as connection:
        socket.socket(fileno=os.dup(connection.pgconn.socket)).shutdown(socket.SHUT_RDWR)
        with pytest.raises(TransientError), translate_errors("shop", "read"):
            connection.execute("select 1")


def test_a_role_that_may_not_replicate_is_told_which_attribute_it_lacks(
    publisher_server: EmbeddedServer,
) -> None:
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as connection:
        connection.execute("create role reading login")
        source = Source("shop", publisher_server.conninfo(user="reading"))
        try:
            with pytest.raises(SourceUnreachableError) as refused, source.connect(replication="database"):
                pass
            assert refused.value.sqlstate == "42501"
            assert refused.value.hint is not None
            assert "ALTER ROLE ... REPLICATION" in refused.value.hint
            connection.execute("alter role reading replication")
            with source.connect(replication="database"):
                pass
        finally:
            connection.execute("drop role reading")


@pytest.mark.parametrize("work_mem", ["64kB", "4MB"], ids=["first statement of a session", "later statement"])
def test_too_large_temporary_files_are_no_lost_connection(
    publisher_server: EmbeddedServer, work_mem: str
) -> None:
    """The advice to run again, or to look at host and port, would not help."""
    options = f"-c work_mem={work_mem} -c temp_file_limit=64kB"
    source = Source("shop", publisher_server.conninfo(options=options))
    with pytest.raises(TransientError) as refused, source.connect() as connection:
        connection.execute("select * from generate_series(1, 1000000)")
    assert refused.value.sqlstate == "53400"
    assert "no connection" not in refused.value.message
    hint = refused.value.hint
    assert hint is not None
    assert "ALTER ROLE ... SET temp_file_limit = -1" in hint


@pytest.mark.parametrize("sqlstate", ["08000", "08001", "08003", "08006", "08P01", "HV00N"])
def test_a_lost_connection_is_another_servers_if_the_session_continues(
    publisher_server: EmbeddedServer, sqlstate: str
) -> None:
    """postgres_fdw and dblink raise such an error. If a server ends a session it says FATAL, and libpq gives no SQLSTATE."""
    raising = f"do $$ begin raise exception using errcode = '{sqlstate}', message = 'no connection'; end $$"
    with psycopg.connect(publisher_server.conninfo(), autocommit=True) as connection:
        with pytest.raises(ForeignServerError) as refused, translate_errors("shop", "read"):
            connection.execute(raising)
        assert refused.value.sqlstate == sqlstate
        connection.execute("select 1")
        with Conninfo(publisher_server.conninfo()).connect_adbc() as other, other.cursor() as cursor:
            with pytest.raises(ForeignServerError) as refused, translate_errors("shop", "read"):
                cursor.execute(raising)
            assert refused.value.sqlstate == sqlstate
            other.rollback()
            cursor.execute("select pg_backend_pid()")
            connection.execute("select pg_terminate_backend(%s)", cursor.fetchone())
            with pytest.raises(TransientError), translate_errors("shop", "read"):
                cursor.execute("select 1")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ('invalid input syntax for type integer: "a cell"', "invalid input syntax for type integer: ..."),
        ("ungültige Eingabesyntax für Typ integer: »a cell«", "ungültige Eingabesyntax für Typ integer: ..."),
        ("syntaxe en entrée invalide pour le type integer : « a cell »",
         "syntaxe en entrée invalide pour le type integer : ..."),
        ("Zeitzone »a cell« nicht erkannt", "Zeitzone ... nicht erkannt"),
        ("Relation »ddl_log« existiert nicht", "Relation »ddl_log« existiert nicht"),
    ],
)  # fmt: skip
def test_no_value_is_shown_in_any_language_of_the_server(error: str, shown: str) -> None:
    """The language is that of lc_messages, which only a superuser sets."""
    kind = psycopg.errors.UndefinedTable if "Relation" in error else psycopg.errors.InvalidTextRepresentation
    assert remove_values_from_message(kind(error)) == shown


def shown_refusals(server: EmbeddedServer, query: str) -> list[str]:
    """What is shown of a server's refusal of a query: by psycopg, and by ADBC."""
    with (
        psycopg.connect(server.conninfo(), autocommit=True) as connection,
        Conninfo(server.conninfo()).connect_adbc() as other,
        other.cursor() as cursor,
    ):
        with pytest.raises(psycopg.Error) as refused:
            connection.execute(query.encode())
        with pytest.raises(adbc_driver_manager.Error) as refused_by_adbc:
            cursor.execute(query).fetchall()
        return [remove_values_from_message(error) for error in (refused.value, refused_by_adbc.value)]


@pytest.mark.parametrize("cell", ["ce\nll", 'c"e\nl"l', "\ncell", 'ce"\n"ll'])
def test_no_line_of_a_value_is_shown(publisher_server: EmbeddedServer, cell: str) -> None:
    """The server quotes a value as it is, with its line breaks and quotation marks."""
    rows = sql.SQL("from unnest(array[{}]) as cells (cell)").format(cell).as_string(None)
    for function, words in (
        ("int4in(textout(cell))::int", "invalid input syntax for type integer: ..."),
        ("pg_size_bytes(cell)", "invalid size: ..."),
    ):
        assert shown_refusals(publisher_server, f"select {function} {rows}") == [words, words]


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("timestamptz '2020-01-01' at time zone textin('Ce\"ll')", "time zone ... not recognized"),
        (
            "date_trunc('cell', timestamp '2020-01-01')",
            "unit ... not recognized for type timestamp without time zone",
        ),
        ("(77e400::numeric)::float8", "... is out of range for type double precision"),
        ("make_date(77, 77, 77)", "date field value out of range: ..."),
        ("make_time(77, 77, 77)", "time field value out of range: ..."),
        ("get_byte('a', 77)", "index ... out of valid range, 0..0"),
        ("convert_from('\\xff77'::bytea, 'UTF8')", 'invalid byte sequence for encoding "UTF8": ...'),
        (
            "convert('\\xe282ac'::bytea, 'UTF8', 'LATIN1')",
            'character with byte sequence ... in encoding "UTF8" has no equivalent in encoding "LATIN1"',
        ),
    ],
)
def test_no_value_is_shown_wherever_a_message_has_it(
    publisher_server: EmbeddedServer, expression: str, shown: str
) -> None:
    assert shown_refusals(publisher_server, f"select {expression}") == [shown, shown]
