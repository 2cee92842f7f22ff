"""Finds the rights that the role of a source lacks, before anything is created.

In: a session of the role, and the tables that it has to copy. Out: an error for each missing right, in PostgreSQL's
words, with the GRANT in the hint (PostgreSQL documentation, 29.11 Security). Superusers have all rights.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import psycopg

from pgsieve.decoding.errors import PgsieveError
from pgsieve.decoding.publications.catalog import ReplicatedTable, Table
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.decoding.wording import quantity

_INSUFFICIENT_PRIVILEGE = "42501"

#: Amazon RDS grants the role rds_replication instead of the attribute REPLICATION.
_REPLICATION_QUERY = """
select current_user, rolsuper or rolreplication or exists (
    select from pg_roles granted where granted.rolname = 'rds_replication' and pg_has_role(granted.oid, 'usage'))
from pg_roles where rolname = current_user
"""
#: The limits on sessions of the role, of the database, and of the server without reserved connections.
_LIMITS_QUERY = """
select r.rolname, d.datname, case when r.rolsuper then -1 else r.rolconnlimit end,
       case when r.rolsuper then -1 else d.datconnlimit end,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
         - coalesce(current_setting('reserved_connections', true)::int, 0)
  from pg_roles r, pg_database d where r.rolname = current_user and d.datname = current_database()
"""
#: The numbers of concurrent sessions of `run`, of `check`, and of a first copy of some tables on few cores.
_RUN_SESSIONS, _CHECK_SESSIONS, _COPY_SESSIONS = 4, 6, 8
_TABLE_RIGHTS_QUERY = """
select oid, current_user, has_schema_privilege(relnamespace, 'usage'), has_table_privilege(oid, 'select')
from pg_class join unnest(%s::oid[]) with ordinality as listed (oid, number) using (oid) order by number
"""
#: Instead of the table, a role may have the right for each published column.
_COLUMN_RIGHTS_QUERY = """
select bool_and(has_column_privilege(%s::oid, name, 'select')) from unnest(%s::text[]) as name
"""


def missing_rights(
    connection: psycopg.Connection[Any], tables: Iterable[ReplicatedTable]
) -> Iterator[PgsieveError]:
    """The errors for rights that the session's role lacks: to read a slot, to use a schema, to select from a table."""
    answer = connection.execute(_REPLICATION_QUERY).fetchone()
    assert answer is not None
    role, replicates = answer
    if not replicates:
        yield PgsieveError(
            f'permission denied to use replication slots: the role "{role}" has no REPLICATION attribute',
            hint=f"ALTER ROLE {quote_identifier(role)} REPLICATION; at Amazon: GRANT rds_replication TO {quote_identifier(role)}",
            sqlstate=_INSUFFICIENT_PRIVILEGE,
        )
    yield from _too_few_sessions(connection)
    messages = set[str]()
    for _, error in _denied(connection, tables):
        if error.message not in messages:  # A missing right on a schema is reported once for all its tables.
            messages.add(error.message)
            yield error


def _too_few_sessions(connection: psycopg.Connection[Any]) -> Iterator[PgsieveError]:
    row = connection.execute(_LIMITS_QUERY).fetchone()
    assert row is not None
    role, database, of_role, of_database, of_server = row
    for owner, limit, hint in (
        (
            f'the role "{role}"',
            of_role,
            f"ALTER ROLE {quote_identifier(role)} CONNECTION LIMIT {_COPY_SESSIONS}",
        ),
        (
            f'the database "{database}"',
            of_database,
            f"ALTER DATABASE {quote_identifier(database)} CONNECTION LIMIT {_COPY_SESSIONS}, or more, as others need theirs",
        ),
        ("the server", of_server, "raise max_connections"),
    ):
        if 0 <= limit < _CHECK_SESSIONS:
            yield PgsieveError(
                f"{owner} may have no more than {quantity(limit, 'session')}: a run needs {_RUN_SESSIONS}, a check {_CHECK_SESSIONS}, and"
                " a copy one more for each table that it reads at the same time",
                hint=hint,
                sqlstate="53300",
            )


def denied_tables(
    connection: psycopg.Connection[Any], tables: Iterable[ReplicatedTable]
) -> dict[tuple[str, str], PgsieveError]:
    """The tables from which the session's role may not select, each with the first missing right."""
    problems: dict[tuple[str, str], PgsieveError] = {}
    for table, error in _denied(connection, tables):
        problems.setdefault((table.schema, table.name), error)
    return problems


def _denied(
    connection: psycopg.Connection[Any], tables: Iterable[ReplicatedTable]
) -> Iterator[tuple[Table, PgsieveError]]:
    replicated = {each.table.oid: each for each in tables}
    for oid, role, uses, reads in connection.execute(_TABLE_RIGHTS_QUERY, [list(replicated)]).fetchall():
        table, grantee = replicated[oid].table, quote_identifier(role)
        if not uses:
            yield (
                table,
                PgsieveError(
                    f'permission denied for schema "{table.schema}"',
                    hint=f"GRANT USAGE ON SCHEMA {quote_identifier(table.schema)} TO {grantee}",
                    sqlstate=_INSUFFICIENT_PRIVILEGE,
                ),
            )
        columns = list(replicated[oid].columns)
        if not reads and connection.execute(_COLUMN_RIGHTS_QUERY, [oid, columns]).fetchone() != (True,):
            name = quote_qualified(table.schema, table.name)
            yield (
                table,
                PgsieveError(
                    f"permission denied for table {name}",
                    hint=f"GRANT SELECT ON {name} TO {grantee}",
                    sqlstate=_INSUFFICIENT_PRIVILEGE,
                ),
            )
