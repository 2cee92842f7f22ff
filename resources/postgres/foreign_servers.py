"""Checks whether the foreign servers of a partition tree answer.

A leaf of a partition tree may be a foreign table, whose rows are on another server, the foreign server. A foreign
server may accept a connection and then send nothing. A query of the foreign table would then wait forever. Before
PostgreSQL 16, not even a cancel request ends the wait, because postgres_fdw cannot be interrupted while it
connects (contrib/postgres_fdw/connection.c). So the check has its own session, which can be abandoned.

In: a `Source`, and the name of a partition tree.
Out: nothing, if all foreign servers answer.

Raises ForeignServerError if one does not.
"""

import select
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
from psycopg.pq import ExecStatus

from pgsieve.resources.postgres.errors import (
    FOREIGN_SERVER_HINT,
    ForeignServerError,
    convert_source_error,
    is_of_foreign_server,
    remove_values_from_message,
)
from pgsieve.resources.postgres.source import Source

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

#: How long the foreign servers may take to answer.
ANSWER_SECONDS = 5.0
#: How long a request to cancel the check may take.
_CANCEL_SECONDS = 1.0

#: Finds which tables of a tree to query, so that the server connects to the foreign server of each foreign leaf. If the
#: role may not read a leaf, the root is queried instead, and the server then reads its leaves.
#: Each row has the oid of the root, and the quoted name of a table to query.
_FOREIGN_LEAVES_QUERY = """
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
#: True if it is too early for another check. Each check that is still unanswered doubles the time until the next
#: one.
_IS_TOO_EARLY_QUERY = """
select coalesce(max(query_start) > now() - %(seconds)s::interval * 2 ^ count(*), false) from pg_stat_activity
 where starts_with(query, %(mark)s) and state = 'active' and query_start < now() - %(seconds)s::interval
"""


def verify_foreign_servers(source: Source, root_name: tuple[str, str]) -> None:
    """Raise ForeignServerError if the foreign server of a leaf of this tree refuses connections or does not answer.

    Other errors are ignored here, because a query of the table raises them, too.
    """
    with source.connect() as connection:
        rows = connection.execute(_FOREIGN_LEAVES_QUERY, list(root_name)).fetchall()
        if not rows:
            return
        root_oid, table_names = rows[0][0], [name for _, name in rows]
        # If a check is abandoned, the server process goes on until its connection to the foreign server ends. The mark,
        # a comment in the query, identifies the processes of abandoned checks in pg_stat_activity.
        mark = f"/* pgsieve asks for the foreign leaves of {root_oid} */"
        if connection.execute(
            _IS_TOO_EARLY_QUERY, {"seconds": f"{ANSWER_SECONDS:g}s", "mark": mark}
        ).fetchone() == (True,):
            raise _make_no_answer_error(table_names)
        # A foreign scan connects to the foreign server before it requests a row, so `limit 0` suffices. The
        # lock_timeout is shorter than ANSWER_SECONDS, so that a locked table is not taken for a silent server.
        queries = [f"select from {name} limit 0" for name in table_names]
        results = _fetch_results(connection.pgconn, f"{mark} set lock_timeout = '1s'; " + "; ".join(queries))
        if results is None:
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=_CANCEL_SECONDS)
            connection.close()
            raise _make_no_answer_error(table_names)
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                error = psycopg.errors.error_from_result(result, connection.info.encoding)
                if is_of_foreign_server(error):
                    raise convert_source_error(error, remove_values_from_message(error))


def _fetch_results(pgconn: "PGconn", statements: str) -> "list[PGresult] | None":
    """The results of statements; None if not all of them arrive within `ANSWER_SECONDS`."""
    pgconn.send_query(statements.encode())
    deadline, results = time.monotonic() + ANSWER_SECONDS, list["PGresult"]()
    events = select.poll()
    events.register(pgconn.socket, select.POLLIN)
    while True:
        pgconn.flush()
        while pgconn.is_busy():
            if (remaining_seconds := deadline - time.monotonic()) <= 0:
                return None
            events.poll(remaining_seconds * 1000)
            pgconn.consume_input()
        if (result := pgconn.get_result()) is None:
            return results
        results.append(result)


def _make_no_answer_error(table_names: Iterable[str]) -> ForeignServerError:
    return ForeignServerError(
        f"the server of {', '.join(table_names)} does not answer", hint=FOREIGN_SERVER_HINT, sqlstate="08001"
    )
