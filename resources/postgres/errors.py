"""Turns errors of a PostgreSQL server or connection into pgsieve's: the operation and the remedy, but no cell's value.

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
from pgsieve.resources.passwords import concealed


class SourceError(PgsieveError):
    """The publisher cannot be used as it is."""


class SourceUnreachableError(SourceError):
    """No connection: wrong conninfo, server down, or authentication refused."""


class SourcePermissionError(SourceError):
    """The role lacks a right."""


class PassingFaultError(SourceError):
    """A fault that passes by itself: a lost connection, a server that shuts down, or too few resources.

    The same operation may succeed a moment later, and no table is the cause.
    """


class LockedTableError(PassingFaultError):
    """The table stays locked for longer than other tables may wait for it."""


class ForeignServerError(SourceError):
    """A statement cannot connect to another server, which a foreign table or a function in it needs."""


class LockHeldError(SourceError):
    """Another process has not finished work that only one process may do at a time."""


class SourceSettingError(SourceError):
    """A server setting prevents logical replication."""


class UntestedServerError(SourceError):
    """The server is newer than the versions that pgsieve was tested with, and the configuration does not allow it."""


#: The first characters of the SQLSTATEs of passing faults: connection lost, resources exhausted, operator
#: intervention and statement_timeout, a session's other timeouts, serialization failure, deadlock,
#: lock_timeout (appendix A).
_PASSING = ("08", "53", "57", "25P03", "25P04", "40001", "40P01", "55P03")
#: Connection exceptions, and fdw_unable_to_establish_connection, which foreign data wrappers raise instead.
_CONNECTION = ("08", "HV00N")
#: The SQLSTATE of lock_timeout.
LOCKED_OUT = "55P03"
#: The hint of a ForeignServerError.
OF_FOREIGN_SERVER = (
    "make sure that the other server answers, or detach the partition that is its foreign table"
)


def is_passing(error: BaseException) -> bool:
    """Whether a driver's error passes by itself; an error without a SQLSTATE is a failed connection.

    libpq reports a failed connection without a result, which psycopg raises as OperationalError, or with a
    result that has no SQLSTATE, which psycopg raises as a plain DatabaseError.
    """
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(_PASSING) and not is_of_foreign_server(error)
    if isinstance(error, adbc_driver_manager.Error):
        return error.status_code == adbc_driver_manager.AdbcStatusCode.IO
    return isinstance(error, psycopg.OperationalError) or type(error) is psycopg.DatabaseError


def is_of_foreign_server(error: BaseException) -> bool:
    """Whether a driver's error is about a connection from the server to another server, such as postgres_fdw's.

    The severity distinguishes it from an error of pgsieve's own connection: ERROR ends only the statement,
    FATAL the session (section 19.8.2, table 19.2). An error of libpq itself has no severity.
    """
    if not str(getattr(error, "sqlstate", None)).startswith(_CONNECTION):
        return False
    if isinstance(error, psycopg.Error):
        return error.diag.severity_nonlocalized == "ERROR"
    return (b"PG_DIAG_SEVERITY_NONLOCALIZED", b"ERROR") in (getattr(error, "details", None) or ())


def source_error(error: BaseException, message: str) -> SourceError:
    """The error of pgsieve for a driver's error, by its SQLSTATE."""
    sqlstate = getattr(error, "sqlstate", None)
    if is_of_foreign_server(error):
        return ForeignServerError(message, hint=OF_FOREIGN_SERVER, sqlstate=sqlstate)
    if is_passing(error):
        return PassingFaultError(message, hint="run again: nothing is lost", sqlstate=sqlstate)
    return SourceError(message, sqlstate=sqlstate)


#: Messages of a server that refuses a new session, and their SQLSTATEs, which libpq does not pass on
#: (src/backend/libpq/auth.c, utils/init/postinit.c, miscinit.c and postmaster/postmaster.c).
_NO_SESSION = {
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
    states = (state for words, state in _NO_SESSION.items() if re.search(words, str(error)))
    return error.sqlstate or next(states, _CONNECTION_FAILURE)


@contextmanager
def without_values() -> Iterator[None]:
    """Keep cells' values out of the errors of the block: Spark's log shows an executor's error unaltered."""
    try:
        yield
    except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        raise source_error(error, message_without_values(error)) from None


@contextmanager
def refusing(source: str, what: str) -> Iterator[None]:
    """Turn the server's refusal into a SourceError that names the operation, `what`."""
    try:
        yield
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as error:
        on_standby = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
        raise SourcePermissionError(
            f'source "{source}": cannot {what} ({message_without_values(error)})',
            hint="on a standby nothing can be created: run what `pgsieve validate` prints on its primary"
            if on_standby
            else "grant the right, or have the object created by its owner; `pgsieve validate` prints the SQL",
            sqlstate=error.sqlstate,
        ) from cause_without_values(error)
    except (psycopg.Error, adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        message = f'source "{source}": cannot {what} ({message_without_values(error)})'
        raise source_error(error, message) from cause_without_values(error)


def one_line(error: Exception) -> str:
    """A message of libpq on one line, without any part of a password."""
    return concealed(" ".join(str(error).split()))


def message_without_values(error: Exception) -> str:
    """The server's message about a query, without the values that it shows.

    Only its first line is taken, because DETAIL and CONTEXT show rows. Data exceptions (SQLSTATE class 22)
    show a value in that line, too: at the end, quoted or as a number, or as `value "..."`. Messages in
    another language (lc_messages) use that language's quotation marks.
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
    return concealed(re.sub(r"(:\s)[«»„“”‚‘’「『].*", r"\1...", shown))


def cause_without_values(error: Exception) -> Exception | None:
    """The driver's error without values, as the cause of an error of pgsieve: a traceback shows causes, too."""
    shown = message_without_values(error)
    if isinstance(error, psycopg.Error):
        return type(error)(shown, info=error.pgresult)
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, shown)
    return None
