"""Runs DDL on a publisher so that the database's event triggers run as for any client of the role.

In: a session, and statements whose names are qualified. Out: the statements are committed together, or tried
and rolled back. Raises EventTriggerError if an event trigger fails, and SourceError if the server itself
refuses.

The search_path of pgsieve's sessions has only PostgreSQL's own objects, but the function of an event trigger
may rely on the role's search_path. So DDL runs under the role's search_path. This is safe, because only
superusers create event triggers, and the triggers run for every client (PostgreSQL documentation, Event Triggers).
"""

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsieve.resources.postgres.errors import (
    LOCK_TIMEOUT_SQLSTATE,
    LockedTableError,
    SourceError,
    cause_without_values,
    message_without_values,
    translate_errors,
)
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.waits import LOCK_SECONDS

#: The most specific search_path that ALTER ROLE or ALTER DATABASE has set (process_settings() in
#: src/backend/utils/init/postinit.c), or else the server's default.
_OWN_PATH = """
select coalesce((
    select substr(setting, length('search_path=') + 1) from pg_db_role_setting s cross join unnest(setconfig) setting
     where setdatabase in (0, (select oid from pg_database where datname = current_database()))
       and setrole in (0, (select oid from pg_roles where rolname = session_user)) and setting like 'search\\_path=%'
     order by setrole <> 0 and setdatabase <> 0 desc, setrole <> 0 desc, setdatabase <> 0 desc limit 1),
  (select boot_val from pg_settings where name = 'search_path'))
"""
_TRIGGERS = """
select evtname, nspname, proname from pg_event_trigger join pg_proc p on p.oid = evtfoid
  join pg_namespace n on n.oid = pronamespace
 where evtenabled <> 'D' and evtevent <> 'login' order by evtname
"""


class EventTriggerError(SourceError):
    """An event trigger on the publisher fails when pgsieve runs DDL."""


class UndefinedObjectError(SourceError):
    """An object that a statement names no longer exists."""


def own_search_path(connection: psycopg.Connection[Any]) -> str:
    """The search_path that a session of the role has by default."""
    row = connection.execute(_OWN_PATH).fetchone()
    assert row is not None
    return str(row[0])


def failed_trigger(connection: psycopg.Connection[Any], error: psycopg.Error) -> tuple[str, str] | None:
    """The event trigger that raised an error, and its function, quoted; None if the server itself raised the error."""
    function_lines = [line for line in (error.diag.context or "").splitlines() if "function" in line]
    for trigger, schema, function in connection.execute(_TRIGGERS).fetchall() if function_lines else ():
        if any(f"{function}(" in line or f"{quote(function)}(" in line for line in function_lines):
            return trigger, quote(schema, function)
    return None


def execute_ddl(
    connection: psycopg.Connection[Any],
    source: str,
    operation: str,
    statements: Sequence[str],
    *,
    dry_run: bool = False,
    lock_seconds: float = 0,
) -> None:
    """Run statements in one transaction, under the role's own search_path; with `dry_run` roll them back.

    The statements wait for locks. With `lock_seconds` the wait is limited, and raises LockedTableError.
    `operation` names the statements in messages.
    """
    path = own_search_path(connection)
    try:
        with connection.transaction(force_rollback=dry_run):
            connection.execute(f"set local lock_timeout = '{lock_seconds:g}s'")
            connection.execute("select set_config('search_path', %s, true)", [path])
            for statement in statements:
                connection.execute(statement)
    except psycopg.Error as error:
        failed = None if connection.broken else failed_trigger(connection, error)
        if failed is not None:
            trigger, function = failed
            raise EventTriggerError(
                f'source "{source}": cannot {operation}: the event trigger "{trigger}" fails ({message_without_values(error)})',
                hint=f"correct its function {function}, which ran under search_path = {path}, or run by hand, as a role for"
                f" which it does not fail: {'; '.join(statements)};",
                sqlstate=error.sqlstate,
            ) from cause_without_values(error)
        if isinstance(error, psycopg.errors.UndefinedObject):
            reason = message_without_values(error)
            raise UndefinedObjectError(
                f'source "{source}": cannot {operation} ({reason})', sqlstate=error.sqlstate
            ) from cause_without_values(error)
        if lock_seconds and error.sqlstate == LOCK_TIMEOUT_SQLSTATE:
            message = f'source "{source}": cannot {operation} ({message_without_values(error)})'
            raise LockedTableError(message, sqlstate=error.sqlstate) from cause_without_values(error)
        with translate_errors(source, operation):
            raise


def trigger_error(
    connection: psycopg.Connection[Any], source: str, operation: str, statements: Sequence[str]
) -> EventTriggerError | None:
    """The error that an event trigger would raise for the statements, or None.

    If the database has event triggers, the statements run and are rolled back.
    """
    if statements and connection.execute(_TRIGGERS).fetchone() is not None:
        try:
            execute_ddl(connection, source, operation, statements, dry_run=True, lock_seconds=LOCK_SECONDS)
        except EventTriggerError as error:
            return error
        except SourceError:
            return None  # Another role has to run them.
    return None
