"""Runs DDL statements of pgsieve on a publisher.

In: - a session
    - statements in which all names are qualified by their schema
Out: the statements are committed together; or, as a trial, they are run and rolled back.

Raises EventTriggerError if an event trigger of the database fails, and SourceError if the server itself refuses a
statement.

DDL runs the event triggers of the database. The function of an event trigger may rely on the search_path of the
role, but pgsieve's sessions have a search_path with only PostgreSQL's own objects. So DDL runs under the
search_path that the role has by default. This is safe: only superusers create event triggers, and the triggers run
for every client (PostgreSQL documentation, Event Triggers).
"""

from collections.abc import Sequence
from typing import Any

import psycopg

from pgsieve.resources.postgres.errors import (
    LOCK_TIMEOUT_SQLSTATE,
    LockedTableError,
    SourceError,
    remove_values_from_cause,
    remove_values_from_message,
    translate_errors,
)
from pgsieve.resources.postgres.sessions import read_own_search_path
from pgsieve.resources.postgres.source import quote
from pgsieve.resources.postgres.waits import LOCK_SECONDS

#: The enabled event triggers that DDL can run, and the schemas and names of their functions.
_EVENT_TRIGGERS_QUERY = """
select evtname, nspname, proname from pg_event_trigger join pg_proc p on p.oid = evtfoid
  join pg_namespace n on n.oid = pronamespace
 where evtenabled <> 'D' and evtevent <> 'login' order by evtname
"""


class EventTriggerError(SourceError):
    """An event trigger on the publisher fails when pgsieve runs DDL."""


class UndefinedObjectError(SourceError):
    """An object that a statement names does not exist, or no longer exists."""


def find_failed_trigger(connection: psycopg.Connection[Any], error: psycopg.Error) -> tuple[str, str] | None:
    """The name of the event trigger that raised an error, and the quoted name of its function.

    None if the server itself raised the error. The server's error names only functions, so a trigger is found by
    its function.
    """
    function_lines = [line for line in (error.diag.context or "").splitlines() if "function" in line]
    for trigger, schema, function in (
        connection.execute(_EVENT_TRIGGERS_QUERY).fetchall() if function_lines else ()
    ):
        if any(f"{function}(" in line or f"{quote(function)}(" in line for line in function_lines):
            return trigger, quote(schema, function)
    return None


def execute_ddl(
    connection: psycopg.Connection[Any],
    source_name: str,
    operation: str,
    statements: Sequence[str],
    *,
    dry_run: bool = False,
    lock_timeout_seconds: float = 0,
) -> None:
    """Run statements in one transaction. With `dry_run` the transaction is rolled back.

    If the database has event triggers, the statements run under the role's own search_path.

    - `operation`: names the statements in messages, for example `prepare the capture publication "p"`
    - `lock_timeout_seconds`: how long a statement may wait for a lock; after that LockedTableError is raised. With 0 a
      statement waits without a limit.
    """
    search_path = None
    with translate_errors(source_name, operation):
        if connection.execute(_EVENT_TRIGGERS_QUERY).fetchone() is not None:
            search_path = read_own_search_path(connection)
    try:
        with connection.transaction(force_rollback=dry_run):
            connection.execute(f"set local lock_timeout = '{lock_timeout_seconds:g}s'")
            if search_path is not None:
                connection.execute("select set_config('search_path', %s, true)", [search_path])
            for statement in statements:
                connection.execute(statement)
    except psycopg.Error as error:
        trigger_and_function = None if connection.broken else find_failed_trigger(connection, error)
        if trigger_and_function is not None:
            trigger, function = trigger_and_function
            raise EventTriggerError(
                f'source "{source_name}": cannot {operation}: the event trigger "{trigger}" fails ({remove_values_from_message(error)})',
                hint=f"correct its function {function}, which ran under search_path = {search_path}, or run by hand, as a role for"
                f" which it does not fail: {'; '.join(statements)};",
                sqlstate=error.sqlstate,
            ) from remove_values_from_cause(error)
        if isinstance(error, psycopg.errors.UndefinedObject):
            reason = remove_values_from_message(error)
            raise UndefinedObjectError(
                f'source "{source_name}": cannot {operation} ({reason})', sqlstate=error.sqlstate
            ) from remove_values_from_cause(error)
        if lock_timeout_seconds and error.sqlstate == LOCK_TIMEOUT_SQLSTATE:
            message = f'source "{source_name}": cannot {operation} ({remove_values_from_message(error)})'
            raise LockedTableError(message, sqlstate=error.sqlstate) from remove_values_from_cause(error)
        with translate_errors(source_name, operation):
            raise


def find_trigger_error(
    connection: psycopg.Connection[Any], source_name: str, operation: str, statements: Sequence[str]
) -> EventTriggerError | None:
    """The error that an event trigger would raise if these statements ran; None if no event trigger would raise an error.

    If the database has event triggers, the statements are run and rolled back.
    """
    if statements and connection.execute(_EVENT_TRIGGERS_QUERY).fetchone() is not None:
        try:
            execute_ddl(
                connection,
                source_name,
                operation,
                statements,
                dry_run=True,
                lock_timeout_seconds=LOCK_SECONDS,
            )
        except EventTriggerError as error:
            return error
        except SourceError:
            # The server itself has refused a statement, for example because another role has to run it.
            return None
    return None
