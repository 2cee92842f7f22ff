"""Finds the privileges that pgsieve's database role needs and does not have, before anything is created.

In: a session of the role, and the tables that the role has to copy
Out: an error for each missing right, in PostgreSQL's words. The hint has the GRANT or ALTER ROLE (PostgreSQL
     documentation, 29.11 Security). A limit that allows too few sessions is an error, too.

Superusers have all rights.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import psycopg

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import Table
from pgsieve.decoding.publications.published_tables import ReplicatedTable
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.decoding.wording import quantity

_INSUFFICIENT_PRIVILEGE = "42501"

#: On Amazon RDS a role does not get the attribute REPLICATION, but the role rds_replication.
_REPLICATION_QUERY = """
select current_user, rolsuper or rolreplication or exists (
    select from pg_roles granted where granted.rolname = 'rds_replication' and pg_has_role(granted.oid, 'usage'))
from pg_roles where rolname = current_user
"""
#: The limits on the number of sessions: of the role, of the database, and of the server less its reserved connections.
_LIMITS_QUERY = """
select r.rolname, d.datname, case when r.rolsuper then -1 else r.rolconnlimit end,
       case when r.rolsuper then -1 else d.datconnlimit end,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
         - coalesce(current_setting('reserved_connections', true)::int, 0)
  from pg_roles r, pg_database d where r.rolname = current_user and d.datname = current_database()
"""
#: The number of sessions that a `run`, a `check` and a first copy have open at the same time. A first copy of many tables on
#: many cores opens more.
_RUN_SESSIONS, _CHECK_SESSIONS, _COPY_SESSIONS = 4, 6, 8
_TABLE_RIGHTS_QUERY = """
select oid, current_user, has_schema_privilege(relnamespace, 'usage'), has_table_privilege(oid, 'select')
from pg_class join unnest(%s::oid[]) with ordinality as listed (oid, number) using (oid) order by number
"""
#: For a role without the right on a table, it is enough to have the right on each of the published columns.
_COLUMN_RIGHTS_QUERY = """
select bool_and(has_column_privilege(%s::oid, name, 'select')) from unnest(%s::text[]) as name
"""


def find_missing_rights(
    connection: psycopg.Connection[Any], tables: Iterable[ReplicatedTable]
) -> Iterator[PgsieveError]:
    """Yields an error for each right that the session's role lacks: to read a slot, to use a schema, or to read a table.

    Also yields an error for each limit that allows too few sessions.
    """
    answer = connection.execute(_REPLICATION_QUERY).fetchone()
    assert answer is not None
    role, may_replicate = answer
    if not may_replicate:
        yield PgsieveError(
            f'permission denied to use replication slots: the role "{role}" has no REPLICATION attribute',
            hint=f"ALTER ROLE {quote_identifier(role)} REPLICATION; at Amazon: GRANT rds_replication TO {quote_identifier(role)}",
            sqlstate=_INSUFFICIENT_PRIVILEGE,
        )
    yield from _find_session_limits(connection)
    messages = set[str]()
    for _, error in _find_denials(connection, tables):
        # A missing right on a schema would be reported for each of its tables.
        if error.message not in messages:
            messages.add(error.message)
            yield error


def _find_session_limits(connection: psycopg.Connection[Any]) -> Iterator[PgsieveError]:
    """Yields an error if the role, the database or the server allows too few sessions."""
    row = connection.execute(_LIMITS_QUERY).fetchone()
    assert row is not None
    role, database, role_limit, database_limit, server_limit = row
    for owner, limit, hint in (
        (
            f'the role "{role}"',
            role_limit,
            f"ALTER ROLE {quote_identifier(role)} CONNECTION LIMIT {_COPY_SESSIONS}",
        ),
        (
            f'the database "{database}"',
            database_limit,
            f"ALTER DATABASE {quote_identifier(database)} CONNECTION LIMIT {_COPY_SESSIONS}, and more for other sessions",
        ),
        ("the server", server_limit, "raise max_connections"),
    ):
        if 0 <= limit < _CHECK_SESSIONS:
            yield PgsieveError(
                f"{owner} may have no more than {quantity(limit, 'session')}: a run needs {_RUN_SESSIONS}, a check {_CHECK_SESSIONS}, and"
                f" a copy on two cores {_COPY_SESSIONS}",
                hint=hint,
                sqlstate="53300",
            )


def find_denied_tables(
    connection: psycopg.Connection[Any], tables: Iterable[ReplicatedTable]
) -> dict[tuple[str, str], PgsieveError]:
    """Find the tables that the session's role may not read. Map each of them to an error about the first missing right."""
    problems: dict[tuple[str, str], PgsieveError] = {}
    for table, error in _find_denials(connection, tables):
        problems.setdefault((table.schema, table.name), error)
    return problems


def _find_denials(
    connection: psycopg.Connection[Any], tables: Iterable[ReplicatedTable]
) -> Iterator[tuple[Table, PgsieveError]]:
    """Yields each table that the session's role may not read, with an error for each right that is missing."""
    replicated_table_by_oid = {replicated_table.table.oid: replicated_table for replicated_table in tables}
    for oid, role, may_use_schema, may_read in connection.execute(
        _TABLE_RIGHTS_QUERY, [list(replicated_table_by_oid)]
    ).fetchall():
        table, grantee = replicated_table_by_oid[oid].table, quote_identifier(role)
        if not may_use_schema:
            yield (
                table,
                PgsieveError(
                    f'permission denied for schema "{table.schema}"',
                    hint=f"GRANT USAGE ON SCHEMA {quote_identifier(table.schema)} TO {grantee}",
                    sqlstate=_INSUFFICIENT_PRIVILEGE,
                ),
            )
        columns = list(replicated_table_by_oid[oid].columns)
        if not may_read and connection.execute(_COLUMN_RIGHTS_QUERY, [oid, columns]).fetchone() != (True,):
            name = quote_qualified(table.schema, table.name)
            yield (
                table,
                PgsieveError(
                    f"permission denied for table {name}",
                    hint=f"GRANT SELECT ON {name} TO {grantee}",
                    sqlstate=_INSUFFICIENT_PRIVILEGE,
                ),
            )
