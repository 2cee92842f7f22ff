"""Opens the sessions of a publisher, by psycopg (also in replication mode) and by ADBC.

In: a `Conninfo`.
Out: sessions, all of which have the same settings.

Raises UnreadableConninfoError, PasswordCommandError, and the errors of the drivers if there is no connection.

A session finds only PostgreSQL's own objects by unqualified names, whatever the search_path of the role is. Otherwise
pgsieve could call a function that another user made in the schema `public`, and this function would run with the
privileges of pgsieve's role (PostgreSQL documentation, Usage Patterns of schemas). PostgreSQL's own workers protect
themselves by an empty search_path (ALWAYS_SECURE_SEARCH_PATH_SQL in src/include/common/connect.h).

No timeout of the server ends a session, unless the user has set the timeout in the options of the conninfo or in
PGOPTIONS. Keepalives detect that the server is gone.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import adbc_driver_manager
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.passwords import conceal_passwords, remember_conninfo, remember_password
from pgsieve.resources.postgres.errors import find_connection_sqlstate
from pgsieve.resources.postgres.idle_sessions import IdleSessions
from pgsieve.resources.postgres.password_command import read_printed_password

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi
    from psycopg.pq.abc import PGresult

Session = TypeVar("Session")

#: Settings that decide how the server prints values. PostgreSQL's own apply worker requests the first three
#: (libpqrcv_connect in src/backend/replication/libpqwalreceiver/libpqwalreceiver.c). pgsieve adds the time zone
#: UTC, bytea as hexadecimal digits, and UTF-8.
OUTPUT_SETTINGS: Mapping[str, str] = {
    "datestyle": "ISO,MDY",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "timezone": "UTC",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
}

#: While the server has no room for a further connection, the attempt to open a session is repeated for this many
#: seconds.
_RETRY_SECONDS = 1.0

#: Temporary tables come last. If the path did not contain them, the server would look for tables there before
#: pg_catalog (PostgreSQL documentation, setting search_path).
_SEARCH_PATH = "pg_catalog,pg_temp"
#: The search_path in the options of a session, as `_make_options` writes it.
_SEARCH_PATH_OPTION = f"-c search_path={_SEARCH_PATH}"

#: Settings that change the meaning of literals, conditions and transactions, or the effect of errors. They get the
#: server's defaults, whatever the role has. docs/connections.md describes each of them;
#: `tests/resources/test_settings.py` lists all other settings.
_SERVER_DEFAULTS: Mapping[str, str] = {
    "standard_conforming_strings": "on",
    "backslash_quote": "safe_encoding",
    "array_nulls": "on",
    "transform_null_equals": "off",
    "row_security": "on",
    "quote_all_identifiers": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "default_transaction_deferrable": "off",
    "exit_on_error": "off",
    "client_min_messages": "notice",
}

#: Settings that the user's own options cannot change. The encoding is missing because it is a separate parameter
#: of a connection.
_PINNED_SETTINGS = {
    **{k: v for k, v in OUTPUT_SETTINGS.items() if k != "client_encoding"},
    **_SERVER_DEFAULTS,
    "search_path": _SEARCH_PATH,
}

#: The settings that limit the time of statements and sessions, each with the first server version that has it (0:
#: every version).
_TIMEOUT_FIRST_VERSIONS: Mapping[str, int] = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}

#: Parameters with which a lost connection is noticed after two minutes. Without them it might not be noticed at
#: all, because a firewall that drops a connection tells neither side.
_KEEPALIVE_PARAMETERS: Mapping[str, str] = {
    "keepalives": "1",
    "keepalives_idle": "60",
    "keepalives_interval": "10",
    "keepalives_count": "6",
    "tcp_user_timeout": "120000",
}

#: How often the server checks whether its client still exists. A session that reads a slot or a table may send
#: nothing for minutes. Without the check the session would go on after its client was killed. The setting exists
#: from PostgreSQL 14 on, and not on every platform (PostgreSQL documentation, TCP Settings).
_CLIENT_CHECK_SETTING = ("client_connection_check_interval", "2s")

#: Statements that apply the pinned settings. Sessions need them if they did not get the settings as options: a
#: service file may have its own options, and a pooler may drop options. The search_path is set first, and before
#: that no function is called, so that no function of another user can be called.
_SET_PINNED_STATEMENTS = f"set search_path = {_SEARCH_PATH};" + "".join(
    f"set {name} = '{value}';" for name, value in _PINNED_SETTINGS.items() if name != "search_path"
)
#: A query that switches off all timeouts of the server, and returns their names. A timeout that the user has set
#: in the conninfo's options has the source "client", and stays.
_DISABLE_TIMEOUTS_QUERY = (
    "select name, pg_catalog.set_config(name, '0', false) from pg_catalog.pg_settings"
    f" where name in ({', '.join(repr(name) for name in _TIMEOUT_FIRST_VERSIONS)}) and source <> 'client'"
)

#: The pause between two requests to cancel a query.
_CANCEL_INTERVAL_SECONDS = 0.1


class UnreadableConninfoError(PgsieveError):
    """libpq cannot parse the conninfo.

    The message does not contain libpq's message, because that may quote a part of a password.
    """


def execute(cursor: "dbapi.Cursor", query: str) -> None:
    """Run a query in an ADBC session. An interrupt (Ctrl-C) cancels the query, and is raised.

    In the main thread the driver would handle SIGINT itself, and Python would not notice the interrupt. The caller
    would take the cancelled query for an error of the server, and repeat it. So the query runs in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        cursor.execute(query)
        return
    with ThreadPoolExecutor(1, "pgsieve-query") as pool:
        query_future = pool.submit(cursor.execute, query)
        try:
            query_future.result()
        finally:
            while not query_future.done():
                # A cancel request before the query begins has no effect, so the request is repeated.
                with suppress(adbc_driver_manager.Error):
                    cursor.adbc_cancel()
                wait([query_future], _CANCEL_INTERVAL_SECONDS)


def _is_refused_by_limit(error: BaseException) -> bool:
    """Whether the server has refused a session because a limit of connections is reached."""
    if not isinstance(error, psycopg.OperationalError | adbc_driver_manager.Error):
        return False
    return find_connection_sqlstate(error) == "53300"


def _connect_within_limits(connect: Callable[[], Session]) -> Session:
    """Open a session by `connect`. If a limit of connections is reached, try again for `_RETRY_SECONDS`.

    The server counts a session until the process of the session has ended, which is a moment after the client has closed
    the session. Executors run this function, and may lack tenacity, so it does not use this library to try again.
    """
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            return connect()
        except Exception as error:
            if not _is_refused_by_limit(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Conninfo:
    """How to open sessions of a database: the conninfo of libpq, and where the password comes from.

    The repr shows neither the conninfo nor the password. `password_command` is a program and its arguments. It is
    run for each new session, without a shell. `idle_sessions` are the sessions of ADBC that `connect_adbc` uses again.
    """

    text: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    password_command: tuple[str, ...] = field(default=(), repr=False)
    idle_sessions: IdleSessions | None = field(default=None, repr=False, compare=False)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """Open an autocommit session.

        `options` are parameters of psycopg and libpq. If the conninfo has one of these parameters, the conninfo's value
        counts.
        """
        parameters = self._make_parameters(options)
        connection = self._open(parameters)
        version = connection.info.server_version
        try:
            _apply_settings(connection)
        except BaseException as error:
            options_without_timeouts = self._make_options_without_timeouts(connection, version)
            is_ended_by_server = connection.broken or isinstance(error, psycopg.errors.QueryCanceled)
            connection.close()
            if not is_ended_by_server:
                raise
        else:
            return connection
        # One of the role's timeouts may have ended the session. The first attempt switched off only the timeouts that
        # every version has. Now the server's version is known, so options can switch off all of its timeouts.
        connection = self._open({**parameters, "options": options_without_timeouts})
        try:
            _apply_settings(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def open_unchanged(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Open an autocommit session without settings of pgsieve, except for the encoding."""
        return self._open({})

    def _open(self, parameters: Mapping[str, Any]) -> psycopg.Connection[tuple[Any, ...]]:
        return _connect_within_limits(
            lambda: psycopg.connect(self.text, autocommit=True, client_encoding="UTF8", **parameters)
        )

    @contextmanager
    def connect_adbc(self) -> Iterator["dbapi.Connection"]:
        """An ADBC session with an open transaction. This conninfo must be a result of `complete_for_executors`.

        The transaction is rolled back after the block.
        """
        idle_sessions = self.idle_sessions
        session = idle_sessions.take(_set_for_transaction) if idle_sessions else None
        if session is None:
            session = self._open_adbc()
        try:
            yield session
        except BaseException:
            session.close()
            raise
        if idle_sessions is None:
            session.close()
        else:
            idle_sessions.add(session)

    @contextmanager
    def keep_adbc_sessions(self) -> Iterator["Conninfo"]:
        """A conninfo with the same parameters, whose `connect_adbc` uses sessions again until the block ends.

        The driver reads the types when it opens a session, so a session does not know types that were created later.
        """
        with closing(IdleSessions()) as idle_sessions:
            yield replace(self, idle_sessions=idle_sessions)

    def _open_adbc(self) -> "dbapi.Connection":
        from adbc_driver_postgresql.dbapi import connect

        remember_conninfo(self.text)
        password = self._read_password()
        password_parameter = {} if password is None else {"password": password}
        # The driver begins by reading the names of all types. With another encoding than SQL_ASCII the server would
        # refuse to send a name with invalid bytes, and there would be no session.
        uri = make_conninfo(self.text, client_encoding="SQL_ASCII", **password_parameter)
        try:
            session: dbapi.Connection = _connect_within_limits(lambda: connect(uri))
        except adbc_driver_manager.Error as error:
            text = conceal_passwords(str(error))
            raise type(error)(text, status_code=error.status_code, sqlstate=error.sqlstate) from None
        try:
            _set_for_transaction(session)
        except BaseException:
            session.close()
            raise
        return session

    def complete_for_executors(self, connection: psycopg.Connection[Any]) -> "Conninfo":
        """The conninfo of an open session, complete enough for other machines.

        Executors run on machines with another environment, so the result does not depend on variables such as
        PGPASSWORD, or on service files.
        """
        parameters: dict[str, Any] = _read_parameters(connection)
        client_check = _CLIENT_CHECK_SETTING if _can_be_set(connection, *_CLIENT_CHECK_SETTING) else None
        parameters["options"] = self._make_options_without_timeouts(
            connection, connection.info.server_version, client_check
        )
        # The list of parameters lacks the two passwords: the password of the client's key, which is read here, and the
        # password of the user, which is read below and may come from a file.
        for option in connection.pgconn.info:
            if option.keyword == b"sslpassword" and option.val:
                parameters["sslpassword"] = option.val.decode()
        if self.password_command:
            parameters.pop("password", None)
            return Conninfo(make_conninfo("", **parameters), None, self.password_command)
        if connection.info.password:
            parameters["password"] = connection.info.password
        return Conninfo(make_conninfo("", **parameters))

    @property
    def host(self) -> str | None:
        """The host that the conninfo names, or None."""
        host = parse_conninfo(self.text).get("host")
        return None if host is None else str(host)

    @property
    def _has_service(self) -> bool:
        return bool(parse_conninfo(self.text).get("service") or os.environ.get("PGSERVICE"))

    @property
    def _user_options(self) -> str | None:
        """The options that the user has set, in the conninfo or in PGOPTIONS."""
        options = parse_conninfo(self.text).get("options")
        return str(options) if options else os.environ.get("PGOPTIONS")

    def _make_options_without_timeouts(
        self, connection: psycopg.Connection[Any], version: int, client_check: tuple[str, str] | None = None
    ) -> str:
        """The options for another session like `connection`. They switch off all timeouts that the server's version has.

        Timeouts in the user's own options stay.
        """
        # libpq keeps these parameters even if the server has ended the session.
        user_options = (
            _read_parameters(connection).get("options") if self._has_service else self._user_options
        )
        return _make_options(
            user_options,
            [name for name, first_version in _TIMEOUT_FIRST_VERSIONS.items() if first_version <= version],
            client_check,
        )

    def _make_parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters to add to those of the conninfo."""
        given_parameters = parse_conninfo(self.text)
        remember_conninfo(self.text)
        defaults: dict[str, Any] = {"application_name": "pgsieve", "connect_timeout": "10", **options}
        if not self._has_service:  # With a service file, these parameters would override those of the file.
            defaults |= _KEEPALIVE_PARAMETERS
        parameters = {k: v for k, v in defaults.items() if k not in given_parameters}
        if not self._has_service:
            common_timeouts = [
                name for name, first_version in _TIMEOUT_FIRST_VERSIONS.items() if not first_version
            ]
            parameters["options"] = _make_options(self._user_options, common_timeouts)
        if (password := self._read_password()) is not None:
            parameters["password"] = password
        return parameters

    def _read_password(self) -> str | None:
        password = read_printed_password(self.password_command) if self.password_command else self.password
        remember_password(password)
        return password


def _set_for_transaction(session: "dbapi.Connection") -> None:
    """Set the search_path and the encoding of an ADBC session, for its open transaction.

    The conninfo's options have the other settings. A pooler may give each transaction another session of the server,
    so what the last transaction has set does not count.
    """
    with session.cursor() as cursor:
        cursor.execute(f"set search_path = {_SEARCH_PATH}")
        cursor.execute(f"set client_encoding = {OUTPUT_SETTINGS['client_encoding']}")


def parse_conninfo(conninfo: str) -> Mapping[str, Any]:
    """The parameters of a connection string. Raises UnreadableConninfoError."""
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError:
        raise UnreadableConninfoError(
            "the conninfo is not valid",
            hint='use libpq\'s syntax, e.g. "host=db dbname=shop user=pgsieve" or a postgresql:// URI; put a password with'
            " special characters into the separate key `password`",
        ) from None


def read_own_search_path(connection: psycopg.Connection[Any]) -> str:
    """The search_path with which the role's sessions begin, if pgsieve does not set it.

    It may come from postgresql.conf, ALTER SYSTEM, ALTER DATABASE, ALTER ROLE, or the user's own options. A session of
    pgsieve cannot show it, so another session is opened for a moment. Raises psycopg.Error if that fails.
    """
    parameters = _read_parameters(connection)
    parameters["options"] = parameters.get("options", "").replace(_SEARCH_PATH_OPTION, "")
    if connection.info.password:
        parameters["password"] = connection.info.password
    with closing(Conninfo(make_conninfo("", **parameters)).open_unchanged()) as session:
        # SHOW calls no function, so the path cannot make it call another user's function.
        row = session.execute("show search_path").fetchone()
    assert row is not None
    return str(row[0])


def reset_settings(connection: psycopg.Connection[Any], statements: str | None = None) -> str:
    """Give a session the settings of a new session, in one round trip. Return the `statements` for the next call.

    Without `statements`, a query finds the timeouts of the server and switches them off. This query is slow,
    because the server makes rows of all its settings. The returned statements name the timeouts, which stay the
    same during a session, so the query is not needed again. Raises psycopg.Error if the session does not answer.
    """
    if statements is None:
        names = _apply_settings(connection, "reset all;")
        return "reset all;" + _SET_PINNED_STATEMENTS + "".join(f"set {name} = '0';" for name in names)
    _execute_simple(connection, statements, ExecStatus.COMMAND_OK)
    return statements


def _apply_settings(connection: psycopg.Connection[Any], first_statements: str = "") -> list[str]:
    """Apply the settings in one round trip. Return the names of the timeouts that were switched off.

    The statements are sent by the simple query protocol, the only one that a session in replication mode supports.
    """
    result = _execute_simple(
        connection, first_statements + _SET_PINNED_STATEMENTS + _DISABLE_TIMEOUTS_QUERY, ExecStatus.TUPLES_OK
    )
    return [(result.get_value(row, 0) or b"").decode() for row in range(result.ntuples)]


def _execute_simple(
    connection: psycopg.Connection[Any], statements: str, expected_status: ExecStatus
) -> "PGresult":
    """Run statements by the simple query protocol. Raises psycopg.Error if the result does not have this status."""
    result = connection.pgconn.exec_(statements.encode())
    if result.status != expected_status:
        raise psycopg.errors.error_from_result(result, connection.info.encoding)
    return result


def _read_parameters(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """The parameters of a connection.

    psycopg looks for files in the home directory of the user, and fails if there is none. In this case HOME is set
    to a folder that does not exist.
    """
    if not Path(os.path.expanduser("~")).is_absolute():  # noqa: PTH111 - Path.expanduser raises if there is none
        os.environ["HOME"] = "/nonexistent"
    return dict(connection.info.get_parameters())


def _can_be_set(connection: psycopg.Connection[Any], name: str, value: str) -> bool:
    """True if the server accepts this value of a setting."""
    result = connection.pgconn.exec_(f"set {name} = '{value}'; reset {name}".encode())
    return result.status == ExecStatus.COMMAND_OK


def _make_options(
    user_options: str | None, timeouts: Sequence[str], client_check: tuple[str, str] | None = None
) -> str:
    """The parameter `options` of a session. If a setting is in it twice, the server takes the later value."""
    timeout_options = [f"-c {name}=0" for name in timeouts]
    timeout_options += [f"-c {'='.join(client_check)}"] if client_check else []
    pinned_options = [
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in _PINNED_SETTINGS.items()
    ]
    return " ".join([*timeout_options, *([user_options] if user_options else []), *pinned_options])
