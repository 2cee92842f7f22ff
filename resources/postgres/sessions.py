"""Opens all sessions of a publisher: with psycopg, also as a client of a walsender, and with ADBC.

In: a `Conninfo`. Out: sessions, all with the same settings. Raises UnreadableConninfoError,
PasswordCommandError, and the drivers' errors if there is no connection.

The sessions search only PostgreSQL's own objects, whatever the role's search_path is, as PostgreSQL's own
workers do (ALWAYS_SECURE_SEARCH_PATH_SQL in src/include/common/connect.h). Otherwise a function that another
user made in `public` could run with the rights of pgsieve's role (PostgreSQL documentation, Usage Patterns of
schemas). No timeout of the server ends a session, and keepalives detect a lost peer.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adbc_driver_manager
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import ExecStatus

from pgsieve.decoding.errors import PgsieveError
from pgsieve.resources.passwords import conceal_passwords, remember, remember_conninfo

if TYPE_CHECKING:
    from adbc_driver_manager import dbapi
    from psycopg.pq.abc import PGresult

#: How values are printed: as PostgreSQL's own apply worker requests it (libpqrcv_connect in
#: src/backend/replication/libpqwalreceiver/libpqwalreceiver.c), plus UTC and hex bytea.
OUTPUT_SETTINGS: Mapping[str, str] = {
    "datestyle": "ISO,MDY",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "timezone": "UTC",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
}

#: Temporary tables come last. If the path did not list them, the server would search them before pg_catalog
#: (PostgreSQL documentation, setting search_path).
_SEARCH_PATH = "pg_catalog,pg_temp"

#: The server's defaults of the settings that alter the meaning of literals, conditions and transactions, or
#: the effect of errors. docs/connections.md describes each; `tests/resources/test_settings.py` lists the
#: other settings.
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

#: Settings that the user's options cannot change. The encoding is a separate parameter.
_PINNED_SETTINGS = {
    **{k: v for k, v in OUTPUT_SETTINGS.items() if k != "client_encoding"},
    **_SERVER_DEFAULTS,
    "search_path": _SEARCH_PATH,
}

#: The settings that limit the time of statements and sessions, each with the first version that has it.
_TIMEOUTS: Mapping[str, int] = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}

#: A lost peer is noticed after two minutes: a firewall that drops a connection sends nothing.
_KEEPALIVES: Mapping[str, str] = {
    "keepalives": "1",
    "keepalives_idle": "60",
    "keepalives_interval": "10",
    "keepalives_count": "6",
    "tcp_user_timeout": "120000",
}

#: How often the server checks whether the client still exists. A session that reads a slot or a table may
#: send nothing for minutes; without the check it would continue after its client was killed. From 14 on, not
#: on every platform (PostgreSQL documentation, TCP Settings).
_CLIENT_CHECK = ("client_connection_check_interval", "2s")

#: Statements for a session that did not get our options: a service file has its own, and a pooler may drop
#: them. They set the path first, and call no function before.
_SET_ALL = f"set search_path = {_SEARCH_PATH};" + "".join(
    f"set {name} = '{value}';" for name, value in _PINNED_SETTINGS.items() if name != "search_path"
)
#: Switches off the timeouts that the server has. A timeout in the user's own options, whose source is
#: "client", stays.
_DISABLE_TIMEOUTS = (
    "select name, pg_catalog.set_config(name, '0', false) from pg_catalog.pg_settings"
    f" where name in ({', '.join(repr(name) for name in _TIMEOUTS)}) and source <> 'client'"
)

#: The pause between two requests to cancel a query.
_CANCEL_INTERVAL_SECONDS = 0.1

#: How long a password command may take: it may request the password from a server.
PASSWORD_SECONDS = 30.0


class UnreadableConninfoError(PgsieveError):
    """libpq cannot parse the conninfo. The message leaves out libpq's own, which may quote a part of a password."""


class PasswordCommandError(PgsieveError):
    """The password command printed no password."""


def execute(cursor: "dbapi.Cursor", query: str) -> None:
    """Run a query of an ADBC session. An interrupt of this thread cancels the query, and is raised.

    In the main thread the driver would handle SIGINT itself, and Python would not notice. The caller would
    take the cancelled query for a fault of the server, and repeat it. So the query runs in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        cursor.execute(query)
        return
    with ThreadPoolExecutor(1, "pgsieve-query") as pool:
        running = pool.submit(cursor.execute, query)
        try:
            running.result()
        finally:
            while not running.done():
                # A cancel before the query begins has no effect, so it is repeated.
                with suppress(adbc_driver_manager.Error):
                    cursor.adbc_cancel()
                wait([running], _CANCEL_INTERVAL_SECONDS)


@dataclass(frozen=True, slots=True)
class Conninfo:
    """How to open sessions of a database: libpq's conninfo, and the source of its password.

    No repr shows them. `password_command` is a program and its arguments, run for each session without a
    shell.
    """

    text: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    password_command: tuple[str, ...] = field(default=(), repr=False)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit session; the conninfo's parameters take precedence over `options` (psycopg's and libpq's)."""
        parameters = self._parameters(options)
        connection = self._open(parameters)
        version = connection.info.server_version
        try:
            _apply_settings(connection)
        except BaseException as error:
            switches = self._options_without_timeouts(connection, version)
            has_ended = connection.broken or isinstance(error, psycopg.errors.QueryCanceled)
            connection.close()
            if not has_ended:
                raise
        else:
            return connection
        # One of the role's timeouts may have ended the session. Now the server's version is known, so all of its
        # timeouts can be switched off by options.
        connection = self._open({**parameters, "options": switches})
        try:
            _apply_settings(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(self, parameters: Mapping[str, Any]) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.text, autocommit=True, client_encoding="UTF8", **parameters)

    @contextmanager
    def connect_adbc(self) -> Iterator["dbapi.Connection"]:
        """An ADBC session with an open transaction; the conninfo must be a result of `for_executors`."""
        from adbc_driver_postgresql import dbapi

        remember_conninfo(self.text)
        password = self._password()
        secret = {} if password is None else {"password": password}
        # The driver first reads the names of all types. With another encoding than SQL_ASCII, an illegible name
        # would prevent the session.
        uri = make_conninfo(self.text, client_encoding="SQL_ASCII", **secret)
        try:
            connection = dbapi.connect(uri)
        except adbc_driver_manager.Error as error:
            text = conceal_passwords(str(error))
            raise type(error)(text, status_code=error.status_code, sqlstate=error.sqlstate) from None
        with connection:
            with connection.cursor() as cursor:
                cursor.execute(f"set search_path = {_SEARCH_PATH}")
                cursor.execute(f"set client_encoding = {OUTPUT_SETTINGS['client_encoding']}")
            yield connection

    def for_executors(self, connection: psycopg.Connection[Any]) -> "Conninfo":
        """The conninfo of an open session, for machines with another environment (PGPASSWORD, service files)."""
        parameters: dict[str, Any] = _parameters(connection)
        check = _CLIENT_CHECK if _can_be_set(connection, *_CLIENT_CHECK) else None
        parameters["options"] = self._options_without_timeouts(
            connection, connection.info.server_version, check
        )
        # libpq does not list the two passwords: of the user, even from a file, and of the client's key.
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
        """The host that the conninfo names."""
        host = parameters_of(self.text).get("host")
        return None if host is None else str(host)

    @property
    def _has_service(self) -> bool:
        return bool(parameters_of(self.text).get("service") or os.environ.get("PGSERVICE"))

    @property
    def _user_options(self) -> str | None:
        """The user's own `options`."""
        options = parameters_of(self.text).get("options")
        return str(options) if options else os.environ.get("PGOPTIONS")

    def _options_without_timeouts(
        self, connection: psycopg.Connection[Any], version: int, check: tuple[str, str] | None = None
    ) -> str:
        """The options of a session like this one that switch off all timeouts of the server's version."""
        # This works even if the server has ended the session.
        user_options = _parameters(connection).get("options") if self._has_service else self._user_options
        return _options(
            user_options,
            [name for name, first_version in _TIMEOUTS.items() if first_version <= version],
            check,
        )

    def _parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters to add to the conninfo's."""
        given_parameters = parameters_of(self.text)
        remember_conninfo(self.text)
        defaults: dict[str, Any] = {"application_name": "pgsieve", "connect_timeout": "10", **options}
        if not self._has_service:  # Added parameters would override those of the service file.
            defaults |= _KEEPALIVES
        parameters = {k: v for k, v in defaults.items() if k not in given_parameters}
        if not self._has_service:
            of_all_versions = [name for name, first_version in _TIMEOUTS.items() if not first_version]
            parameters["options"] = _options(self._user_options, of_all_versions)
        if (password := self._password()) is not None:
            parameters["password"] = password
        return parameters

    def _password(self) -> str | None:
        password = _command_output(self.password_command) if self.password_command else self.password
        remember(password)
        return password


def parameters_of(conninfo: str) -> Mapping[str, Any]:
    """The parameters of a connection string; raises UnreadableConninfoError."""
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError:
        raise UnreadableConninfoError(
            "the conninfo is not valid",
            hint='use libpq\'s syntax, e.g. "host=db dbname=shop user=pgsieve" or a postgresql:// URI; put a password with'
            " special characters into the separate key `password`",
        ) from None


def reset_settings(connection: psycopg.Connection[Any], statements: str | None = None) -> str:
    """Give a session the settings of a new one, in one round trip; return the `statements` for the next time.

    Without `statements` a query switches off the timeouts that it finds. This query is slow, because the server
    builds rows of all settings; the returned statements name the timeouts, which stay the same during a
    session. Raises psycopg.Error if the session does not answer.
    """
    if statements is None:
        names = _apply_settings(connection, "reset all;")
        return "reset all;" + _SET_ALL + "".join(f"set {name} = '0';" for name in names)
    _execute_simple(connection, statements, ExecStatus.COMMAND_OK)
    return statements


def _apply_settings(connection: psycopg.Connection[Any], first_statements: str = "") -> list[str]:
    """Apply the settings in one round trip; return the timeouts that were switched off.

    It uses the simple protocol, the only protocol that a walsender supports.
    """
    names = _execute_simple(connection, first_statements + _SET_ALL + _DISABLE_TIMEOUTS, ExecStatus.TUPLES_OK)
    return [(names.get_value(row, 0) or b"").decode() for row in range(names.ntuples)]


def _execute_simple(connection: psycopg.Connection[Any], statements: str, status: ExecStatus) -> "PGresult":
    result = connection.pgconn.exec_(statements.encode())
    if result.status != status:
        raise psycopg.errors.error_from_result(result, connection.info.encoding)
    return result


def _parameters(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """The parameters of a connection.

    If the user has no home directory, which psycopg needs, HOME is set to a folder that does not exist.
    """
    if not Path(os.path.expanduser("~")).is_absolute():  # noqa: PTH111 - Path.expanduser raises if there is none
        os.environ["HOME"] = "/nonexistent"
    return dict(connection.info.get_parameters())


def _can_be_set(connection: psycopg.Connection[Any], name: str, value: str) -> bool:
    """Whether the server accepts this value of a setting."""
    result = connection.pgconn.exec_(f"set {name} = '{value}'; reset {name}".encode())
    return result.status == ExecStatus.COMMAND_OK


def _options(user_options: str | None, timeouts: Sequence[str], check: tuple[str, str] | None = None) -> str:
    """The parameter `options` of a session. Of two values of a setting the server takes the later."""
    switches = [f"-c {name}=0" for name in timeouts]
    switches += [f"-c {'='.join(check)}"] if check else []
    pinned_options = [
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in _PINNED_SETTINGS.items()
    ]
    return " ".join([*switches, *([user_options] if user_options else []), *pinned_options])


def _command_output(command: Sequence[str]) -> str:
    """The first line that a command prints. No message shows its output or its arguments."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the administrator's own, from pgsieve.yaml
            command,
            # os.environ has a token that `hide_token` hides from the lake's requests; the environment
            # that a child inherits by default lacks it.
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a command"
        raise _command_error(f"cannot be run: {reason}") from None
    with process:
        try:
            printed, _ = process.communicate(timeout=PASSWORD_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise _command_error(f"did not end within {PASSWORD_SECONDS:g} s") from None
        except BaseException:
            _kill(process)
            raise
    if process.returncode:
        raise _command_error(f"ended with status {process.returncode}")
    try:
        lines = printed.decode().splitlines()
    except UnicodeDecodeError:
        raise _command_error("printed bytes that are not UTF-8") from None
    if not lines or not lines[0] or "\0" in lines[0]:
        raise _command_error("printed no password")
    return lines[0]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command, and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _command_error(reason: str) -> PasswordCommandError:
    return PasswordCommandError(
        f"its password_command {reason}",
        hint="run the command by hand as the same user; it must print the password, and end with status 0",
    )
