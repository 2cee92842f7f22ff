"""Turns errors of a PostgreSQL server or connection into pgsieve's: with the operation and a remedy, without cell values.

In: errors of psycopg, ADBC, Arrow or a socket. Out: `SourceError` and its subclasses, with PostgreSQL's
SQLSTATE.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import adbc_driver_manager
import psycopg
import pyarrow as pa

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.passwords import conceal_passwords


class SourceError(PgsieveError):
    """The publisher cannot be used as it is."""


class SourceUnreachableError(SourceError):
    """No connection: wrong conninfo, server down, or authentication refused."""


class SourcePermissionError(SourceError):
    """The role lacks a right."""


class TransientError(SourceError):
    """An error that no table has caused, and after which the same operation may succeed a moment later.

    Examples are a lost connection, a server that shuts down, and too few resources.
    """


class LockedTableError(TransientError):
    """Another session holds a lock on the table for longer than pgsieve waits."""


class ForeignServerError(SourceError):
    """The server cannot connect to the foreign server that a statement needs."""


class LockHeldError(SourceError):
    """Another process is doing work that only one process may do at a time."""


class SourceSettingError(SourceError):
    """A server setting prevents logical replication."""


class UntestedServerError(SourceError):
    """The server is newer than the tested versions, and the configuration does not allow it."""


#: The first characters of the SQLSTATEs of transient errors: connection lost, resources exhausted, operator
#: intervention and statement_timeout, a session's other timeouts, serialization failure, deadlock,
#: lock_timeout (PostgreSQL documentation, Error Codes).
_TRANSIENT_SQLSTATES = ("08", "53", "57", "25P03", "25P04", "40001", "40P01", "55P03")
#: Connection exceptions, and fdw_unable_to_establish_connection, which some foreign data wrappers raise instead.
_CONNECTION_SQLSTATES = ("08", "HV00N")
#: The SQLSTATE of lock_timeout.
LOCK_TIMEOUT_SQLSTATE = "55P03"
#: The hint of a ForeignServerError.
FOREIGN_SERVER_HINT = (
    "make sure that the other server answers, or detach the partition that is its foreign table"
)


def is_transient(error: BaseException) -> bool:
    """Whether a driver's error is transient; an error without a SQLSTATE is a failed connection.

    If libpq reports a failed connection without a result, psycopg raises OperationalError. If the result has
    no SQLSTATE, psycopg raises a plain DatabaseError.
    """
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(_TRANSIENT_SQLSTATES) and not is_of_foreign_server(error)
    if isinstance(error, adbc_driver_manager.Error):
        return error.status_code == adbc_driver_manager.AdbcStatusCode.IO
    return isinstance(error, psycopg.OperationalError) or type(error) is psycopg.DatabaseError


def is_of_foreign_server(error: BaseException) -> bool:
    """Whether a driver's error is about a connection from the server to a foreign server, such as postgres_fdw's.

    Its severity is ERROR, which ends only the statement. An error of pgsieve's own connection is FATAL, or has
    no severity if it is from libpq itself (PostgreSQL documentation, Message Severity Levels).
    """
    if not str(getattr(error, "sqlstate", None)).startswith(_CONNECTION_SQLSTATES):
        return False
    if isinstance(error, psycopg.Error):
        return error.diag.severity_nonlocalized == "ERROR"
    return (b"PG_DIAG_SEVERITY_NONLOCALIZED", b"ERROR") in (getattr(error, "details", None) or ())


def source_error(error: BaseException, message: str) -> SourceError:
    """Choose pgsieve's class for a driver's error by the SQLSTATE."""
    sqlstate = getattr(error, "sqlstate", None)
    if is_of_foreign_server(error):
        return ForeignServerError(message, hint=FOREIGN_SERVER_HINT, sqlstate=sqlstate)
    if is_transient(error):
        return TransientError(message, hint="run again: nothing is lost", sqlstate=sqlstate)
    return SourceError(message, sqlstate=sqlstate)


#: Messages of a server that refuses a new session, and their SQLSTATEs, which libpq does not pass on
#: (src/backend/libpq/auth.c, utils/init/postinit.c, miscinit.c and postmaster/postmaster.c).
_REFUSED_SESSION_SQLSTATES = {
    r"password authentication failed": "28P01",
    r"pg_hba\.conf|authentication failed for user|role \".*\" does not exist|not permitted to log in": "28000",
    r"database \".*\" does not exist": "3D000",
    r"permission denied for database": "42501",
    r"too many (?:clients|connections)|remaining connection slots": "53300",
    r"is not currently accepting connections": "55000",
    r"database system is (?:starting up|shutting down|in recovery|not yet accepting)": "57P03",
}
#: The SQLSTATE of a subscriber's own error (libpqrcv_connect in
#: src/backend/replication/libpqwalreceiver/libpqwalreceiver.c).
_CONNECTION_FAILURE = "08006"


def sqlstate_of_connection(error: psycopg.Error) -> str:
    """The SQLSTATE of an error that ended a connection attempt."""
    states = (state for words, state in _REFUSED_SESSION_SQLSTATES.items() if re.search(words, str(error)))
    return error.sqlstate or next(states, _CONNECTION_FAILURE)


@contextmanager
def without_values() -> Iterator[None]:
    """Turn the block's errors into errors without cell values: Spark's log shows an executor's error unaltered."""
    try:
        yield
    except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        raise source_error(error, message_without_values(error)) from None


@contextmanager
def translate_errors(source: str, operation: str) -> Iterator[None]:
    """Turn the block's errors into a SourceError that names the operation, as in "cannot drop the slot"."""
    try:
        yield
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as error:
        on_standby = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
        raise SourcePermissionError(
            f'source "{source}": cannot {operation} ({message_without_values(error)})',
            hint="on a standby nothing can be created: run what `pgsieve validate` prints on its primary"
            if on_standby
            else "grant the right, or have the object created by its owner; `pgsieve validate` prints the SQL",
            sqlstate=error.sqlstate,
        ) from cause_without_values(error)
    except (psycopg.Error, adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        message = f'source "{source}": cannot {operation} ({message_without_values(error)})'
        raise source_error(error, message) from cause_without_values(error)


def one_line(error: Exception) -> str:
    """The message of libpq's error on one line, without any part of a password."""
    return conceal_passwords(" ".join(str(error).split()))


def message_without_values(error: Exception) -> str:
    """The first line of the server's message, without cell values. DETAIL and CONTEXT show rows.

    Data exceptions (SQLSTATE class 22) show a value in the first line, too: at the end, quoted or as a
    number, or as `value "..."`. Messages in another language (lc_messages) use its quotation marks.
    """
    text = str(error)
    if isinstance(error, adbc_driver_manager.Error):
        # The driver quotes its own queries, which have several lines.
        text = re.sub(r"\[libpq\] Failed to execute query '.*?': \w+: +", "", text, flags=re.DOTALL)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, adbc_driver_manager.Error):
        line = line.removeprefix(f"{error.status_code.name}: ")
        request = r"Execution error \[\w+\]|Failed to execute query: could not begin COPY"
        line = re.sub(rf"^\[libpq\] (?:{request}): \w+: +", "", line)
    shown = re.sub(r'(: |\bvalue |\bcharacter )(".*"|-?[\d.]+$)', r"\1...", " ".join(line.split()))
    return conceal_passwords(re.sub(r"(:\s)[«»„“”‚‘’「『].*", r"\1...", shown))


def cause_without_values(error: Exception) -> Exception | None:
    """The driver's error without cell values, as the cause of pgsieve's error: a traceback shows causes, too."""
    shown = message_without_values(error)
    if isinstance(error, psycopg.Error):
        return type(error)(shown, info=error.pgresult)
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, shown)
    return None
