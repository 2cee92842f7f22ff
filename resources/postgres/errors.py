"""Turns errors of a PostgreSQL server or connection into pgsieve's errors.

pgsieve's errors name the operation that failed and, if there is one, a remedy. They never contain the value of a cell
of a table.

In: errors of psycopg, ADBC, Arrow or a socket.
Out: `SourceError` and its subclasses, with PostgreSQL's SQLSTATE.
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
    """The publisher cannot be used as it is configured."""


class SourceUnreachableError(SourceError):
    """There is no connection, because the conninfo is wrong, the server is down, or it refuses the authentication."""


class SourceSilentError(SourceUnreachableError):
    """The server did not answer in time. Nothing has refused the connection."""


class SourcePermissionError(SourceError):
    """The role lacks a privilege that an operation needs, or the server is a read-only standby."""


class TransientError(SourceError):
    """An error whose cause is not in a table, so that the same operation may succeed a moment later.

    Examples are a lost connection, a server that is shutting down, and too few resources.
    """


class LockedTableError(TransientError):
    """Another session holds a lock on the table for longer than pgsieve waits."""


class ForeignServerError(SourceError):
    """The publisher cannot connect to the foreign server that a statement needs, for example through postgres_fdw."""


class LockHeldError(SourceError):
    """Another process is doing work that only one process may do at a time."""


class SourceSettingError(SourceError):
    """A server setting prevents logical replication."""


class UntestedServerError(SourceError):
    """The server is newer than the tested versions, and the configuration does not allow it."""


#: The first characters of the SQLSTATEs of transient errors (PostgreSQL documentation, Error Codes). In this
#: order: lost connections; exhausted resources; operator intervention and statement_timeout; two timeouts of a
#: session; serialization failure; deadlock; lock_timeout.
_TRANSIENT_SQLSTATES = ("08", "53", "57", "25P03", "25P04", "40001", "40P01", "55P03")
#: The first characters of the SQLSTATEs of connection exceptions. HV00N is fdw_unable_to_establish_connection,
#: which some foreign data wrappers raise instead of class 08.
_CONNECTION_SQLSTATES = ("08", "HV00N")
#: The SQLSTATE of lock_timeout.
LOCK_TIMEOUT_SQLSTATE = "55P03"
#: The setting that limits the size of a session's temporary files. The server's message names it in all languages.
_TEMPORARY_FILES_SETTING = "temp_file_limit"
#: The hint if a session exceeds that limit. The server writes what a peek of the slot returns to a temporary file.
_TEMPORARY_FILES_HINT = "raise the limit, then run again: nothing is lost; a superuser can: ALTER ROLE ... SET temp_file_limit = -1"
#: The hint of a ForeignServerError.
FOREIGN_SERVER_HINT = (
    "make sure that the other server answers, or detach the partition that is its foreign table"
)


def is_transient(error: BaseException) -> bool:
    """True if a driver's error is transient. An error without a SQLSTATE is transient if it is a failed connection.

    If libpq reports a failed connection without a result, psycopg raises OperationalError. If libpq returns a
    result without a SQLSTATE, psycopg raises a plain DatabaseError.
    """
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(_TRANSIENT_SQLSTATES) and not is_of_foreign_server(error)
    if isinstance(error, adbc_driver_manager.Error):
        return error.status_code == adbc_driver_manager.AdbcStatusCode.IO
    return isinstance(error, psycopg.OperationalError) or type(error) is psycopg.DatabaseError


def is_of_foreign_server(error: BaseException) -> bool:
    """True if a driver's error is about the server's connection to a foreign server, for example by postgres_fdw.

    Such an error has the severity ERROR, which ends only the statement. An error about pgsieve's own connection
    has the severity FATAL, or no severity if libpq itself reports it (PostgreSQL documentation, Message Severity
    Levels).
    """
    if not str(getattr(error, "sqlstate", None)).startswith(_CONNECTION_SQLSTATES):
        return False
    if isinstance(error, psycopg.Error):
        return error.diag.severity_nonlocalized == "ERROR"
    return (b"PG_DIAG_SEVERITY_NONLOCALIZED", b"ERROR") in (getattr(error, "details", None) or ())


def is_of_statement(error: psycopg.Error) -> bool:
    """True if a statement of an open session failed, and not the session itself."""
    return error.diag.severity_nonlocalized == "ERROR"


def convert_source_error(error: BaseException, message: str) -> SourceError:
    """Make the error of pgsieve that fits the SQLSTATE of a driver's error."""
    sqlstate = getattr(error, "sqlstate", None)
    if is_of_foreign_server(error):
        return ForeignServerError(message, hint=FOREIGN_SERVER_HINT, sqlstate=sqlstate)
    if is_transient(error):
        exceeds_limit = _TEMPORARY_FILES_SETTING in str(error)
        hint = _TEMPORARY_FILES_HINT if exceeds_limit else "run again: nothing is lost"
        return TransientError(message, hint=hint, sqlstate=sqlstate)
    return SourceError(message, sqlstate=sqlstate)


#: Maps patterns of messages with which a server refuses a new session to the SQLSTATEs of these messages
#: (src/backend/libpq/auth.c, utils/init/postinit.c, miscinit.c and postmaster/postmaster.c). libpq passes on the
#: messages, but not their SQLSTATEs.
_REFUSED_SESSION_SQLSTATES = {
    r"password authentication failed": "28P01",
    r"pg_hba\.conf|authentication failed for user|role \".*\" does not exist|not permitted to log in": "28000",
    r"database \".*\" does not exist": "3D000",
    r"permission denied (?:for database|to start WAL sender)": "42501",
    r"too many (?:clients|connections)|remaining connection slots": "53300",
    r"is not currently accepting connections": "55000",
    r"database system is (?:starting up|shutting down|in recovery|not yet accepting)": "57P03",
}
#: The SQLSTATE that PostgreSQL's own subscriber reports if it cannot connect (libpqrcv_connect in
#: src/backend/replication/libpqwalreceiver/libpqwalreceiver.c).
_CONNECTION_FAILURE = "08006"


def find_connection_sqlstate(error: psycopg.Error | adbc_driver_manager.Error) -> str:
    """The SQLSTATE of an error that ended an attempt to connect."""
    matching_states = (
        state for words, state in _REFUSED_SESSION_SQLSTATES.items() if re.search(words, str(error))
    )
    return error.sqlstate or next(matching_states, _CONNECTION_FAILURE)


#: The parts of a data exception's message that may show a value: a text in quotation marks, bytes, an index, or a
#: number, date or time after a colon. A text in quotation marks stays if a word of the group `name` is before it,
#: because then it is a name.
_DATA_PATTERN = re.compile(
    r"""(?P<name>\b(?:encoding|parameter|column|relation|slot|publication)\ "[^"]*")
    |".*" | [«»„“”‚‘’「『].*[«»„“”‚‘’」』]
    |\b0x[0-9a-f]{2}(?:\ 0x[0-9a-f]{2})* | (?<=\bindex\ )-?\d+ | (?<=:\ )-?\d[\d.:-]*(?=\n|$)""",
    re.DOTALL | re.VERBOSE,
)


@contextmanager
def remove_values() -> Iterator[None]:
    """Turn the block's errors of ADBC, Arrow and sockets into errors without cell values.

    Executors use this, because Spark's log shows the error of an executor as it was raised.
    """
    try:
        yield
    except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        raise convert_source_error(error, remove_values_from_message(error)) from None


@contextmanager
def translate_errors(source_name: str, operation: str) -> Iterator[None]:
    """Turn the block's errors into a SourceError whose message names the operation, as in "cannot drop the slot"."""
    try:
        yield
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.ReadOnlySqlTransaction) as error:
        is_on_standby = isinstance(error, psycopg.errors.ReadOnlySqlTransaction)
        raise SourcePermissionError(
            f'source "{source_name}": cannot {operation} ({remove_values_from_message(error)})',
            hint="on a standby nothing can be created: run what `pgsieve validate` prints on its primary"
            if is_on_standby
            else "grant the right, or have the object created by its owner; `pgsieve validate` prints the SQL",
            sqlstate=error.sqlstate,
        ) from remove_values_from_cause(error)
    except (psycopg.Error, adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
        message = f'source "{source_name}": cannot {operation} ({remove_values_from_message(error)})'
        raise convert_source_error(error, message) from remove_values_from_cause(error)


def join_lines(error: Exception) -> str:
    """The message of libpq's error on one line, without passwords or parts of them."""
    return conceal_passwords(" ".join(str(error).split()))


def remove_values_from_message(error: Exception) -> str:
    """The first line of the server's message, without cell values.

    The lines DETAIL and CONTEXT, which show rows, are left out.

    Messages show a value after a colon, or after the word `value` or `character`. It is in quotation marks, and may have
    several lines; or it is a number at the end of the line. Data exceptions (SQLSTATE class 22) also show values in other
    places. If the server's messages are in another language (lc_messages), the quotation marks are those of that language.
    """
    text = _find_server_message(error) or _remove_request(error)
    if str(getattr(error, "sqlstate", None)).startswith("22"):
        text = _DATA_PATTERN.sub(lambda match: match["name"] or "...", text)
    text = re.sub(r'(: |\bvalue |\bcharacter )(".*"|-?[\d.]+(?=\n|$))', r"\1...", text, flags=re.DOTALL)
    text = re.sub(r"(:\s)[«»„“”‚‘’「『].*", r"\1...", text)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return conceal_passwords(" ".join(line.split()))


def _find_server_message(error: Exception) -> str | None:
    """The server's message, with all of its lines, but without DETAIL, HINT and CONTEXT. None if the driver lacks it."""
    if isinstance(error, psycopg.Error):
        return error.diag.message_primary
    message = dict(getattr(error, "details", None) or ()).get(b"PG_DIAG_MESSAGE_PRIMARY")
    return None if message is None else message.decode(errors="replace")


def _remove_request(error: Exception) -> str:
    """The text of a driver's error, without the words in which ADBC's driver describes its own request."""
    text = str(error)
    if not isinstance(error, adbc_driver_manager.Error):
        return text
    # The driver quotes its own queries, which have several lines.
    text = re.sub(r"\[libpq\] Failed to execute query '.*?': \w+: +", "", text, flags=re.DOTALL)
    text = text.strip().removeprefix(f"{error.status_code.name}: ")
    request_pattern = r"Execution error \[\w+\]|Failed to execute query: could not begin COPY"
    return re.sub(rf"^\[libpq\] (?:{request_pattern}): \w+: +", "", text)


def remove_values_from_cause(error: Exception) -> Exception | None:
    """The driver's error without cell values, to be the cause of pgsieve's error.

    A traceback shows the causes of an error, too.
    """
    message = remove_values_from_message(error)
    if isinstance(error, psycopg.Error):
        return type(error)(message, info=error.pgresult)
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, message)
    return None
