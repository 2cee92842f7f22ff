"""Whether the servers answer that have the rows of a partition tree's foreign leaves.

In: a `Source`, and the name of a partition tree. Out: nothing, or a ForeignServerError. Such a server may accept a connection
and then say nothing. A query of its table would wait for ever, and before PostgreSQL 16 postgres_fdw cannot be interrupted
while it connects (contrib/postgres_fdw/connection.c). So the question has a session of its own, which can be abandoned.
"""

import select
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import ExecStatus

from pgsieve.resources.postgres.errors import (
    OF_FOREIGN_SERVER,
    ForeignServerError,
    is_of_foreign_server,
    message_without_values,
    source_error,
)
from pgsieve.resources.postgres.source import Source

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

#: How long such a server may take to accept a connection.
ANSWER_SECONDS = 5.0
#: How long to wait for the server when it is asked to cancel the question.
_CANCEL_SECONDS = 1.0

#: A leaf that the role may not read is read from the root.
_LEAVES = """
with recursive tree(root, oid) as (
  select c.oid, c.oid from pg_class c join pg_namespace n on n.oid = relnamespace where (nspname, relname) = (%s, %s)
  union all
  select root, inhrelid from tree join pg_inherits on inhparent = oid
)
select distinct root::bigint, format('%%I.%%I', nspname, read.relname) from tree join pg_class leaf on leaf.oid = tree.oid
  join pg_class read on read.oid = case when has_schema_privilege(leaf.relnamespace, 'usage')
   and has_table_privilege(leaf.oid, 'select') then leaf.oid else root end
  join pg_namespace n on n.oid = read.relnamespace where leaf.relkind = 'f' order by 2
"""
#: Whether it is too early for another question: each that nothing has answered doubles the time until the next one.
_ASKED = """
select coalesce(max(query_start) > now() - %(seconds)s::interval * 2 ^ count(*), false) from pg_stat_activity
 where starts_with(query, %(mark)s) and state = 'active' and query_start < now() - %(seconds)s::interval
"""


def refuse_unanswering(source: Source, name: tuple[str, str]) -> None:
    """Raise ForeignServerError where the server of a foreign leaf of this tree refuses a connection, or says nothing for some seconds.

    Any other error is an answer: a query of the table gets the same.
    """
    with source.connect() as connection:
        leaves = connection.execute(_LEAVES, list(name)).fetchall()
        if not leaves:
            return
        # The server's process may outlive the question, and wait for as long as its connection.
        mark = f"/* pgsieve asks for the foreign leaves of {leaves[0][0]} */"
        if connection.execute(_ASKED, {"seconds": f"{ANSWER_SECONDS:g}s", "mark": mark}).fetchone() == (
            True,
        ):
            raise _silence(", ".join(leaf for _, leaf in leaves))
        # A foreign scan connects to its server before it asks for a row. A lock is no silence.
        asked = [f"select from {leaf} limit 0" for _, leaf in leaves]
        results = _answers(connection.pgconn, f"{mark} set lock_timeout = '1s'; " + "; ".join(asked))
        if results is None:
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=_CANCEL_SECONDS)
            connection.close()
            raise _silence(", ".join(leaf for _, leaf in leaves))
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                error = psycopg.errors.error_from_result(result, connection.info.encoding)
                if is_of_foreign_server(error):
                    raise source_error(error, message_without_values(error))


def _answers(pgconn: "PGconn", statements: str) -> "list[PGresult] | None":
    """The results of statements; None where they do not come in time."""
    pgconn.send_query(statements.encode())
    until, results = time.monotonic() + ANSWER_SECONDS, list["PGresult"]()
    events = select.poll()
    events.register(pgconn.socket, select.POLLIN)
    while True:
        pgconn.flush()
        while pgconn.is_busy():
            if (left := until - time.monotonic()) <= 0:
                return None
            events.poll(left * 1000)
            pgconn.consume_input()
        if (result := pgconn.get_result()) is None:
            return results
        results.append(result)


def _silence(leaves: str) -> ForeignServerError:
    return ForeignServerError(
        f"the server of {leaves} does not answer", hint=OF_FOREIGN_SERVER, sqlstate="08001"
    )
