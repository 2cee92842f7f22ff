"""The one place that opens sessions of a publisher: with psycopg, as a walsender's client, and with ADBC.

In: a `Conninfo`. Out: sessions that all have the same settings. Raises UnreadableConninfoError,
PasswordCommandError, and the drivers' errors where there is no connection.

Names mean PostgreSQL's own objects whatever the role's search_path is, as in PostgreSQL's own workers
(ALWAYS_SECURE_SEARCH_PATH_SQL in src/include/common/connect.h). Otherwise a function that another user made
in `public` could run with the rights of pgsieve's role (section 5.10.6). No session is ended for being long
or idle, and a lost peer is noticed.
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
from pgsieve.resources.passwords import concealed, remember, remember_those_of

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

#: Temporary tables come last: not listed, they would come before pg_catalog (section 19.11.1).
_SEARCH_PATH = "pg_catalog,pg_temp"

#: The meaning of literals, conditions and transactions, and the effect of errors: as in a session without any
#: own settings. docs/connections.md says what each does, and `tests/resources/test_settings.py` which others
#: there are.
_USUAL: Mapping[str, str] = {
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

#: Settings that no user's options may change. The encoding is a separate parameter.
_PINNED = {
    **{k: v for k, v in OUTPUT_SETTINGS.items() if k != "client_encoding"},
    **_USUAL,
    "search_path": _SEARCH_PATH,
}

#: Settings that end statements and sessions, and the first version that has each.
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

#: A session that reads a slot or a table may send nothing for minutes. The server checks this often whether
#: its client still exists; otherwise it would continue for a killed client (section 19.3.2; from 14 on, not
#: on every platform).
_NOTICING = ("client_connection_check_interval", "2s")

#: For a session without our options: from a service file, or through a pooler that does not pass them on. It
#: calls no function before the path is set.
_SETTLED = f"set search_path = {_SEARCH_PATH};" + "".join(
    f"set {name} = '{value}';" for name, value in _PINNED.items() if name != "search_path"
)
#: The timeouts of this version, switched off. Those in the user's own options have the source "client", and
#: stay.
_WITHOUT_TIMEOUTS = (
    "select name, pg_catalog.set_config(name, '0', false) from pg_catalog.pg_settings"
    f" where name in ({', '.join(repr(name) for name in _TIMEOUTS)}) and source <> 'client'"
)

_LOOK_SECONDS = 0.1

#: A command that makes a password may ask a server for it.
PASSWORD_SECONDS = 30.0


class UnreadableConninfoError(PgsieveError):
    """libpq cannot read the conninfo; its message quotes what it stumbled over, perhaps a part of a password."""


class PasswordCommandError(PgsieveError):
    """The command that should print a password did not."""


def execute(cursor: "dbapi.Cursor", query: str) -> None:
    """Run a query of an ADBC session; an interrupt of this thread cancels the query, and is raised.

    In the main thread the driver handles SIGINT itself: it cancels the query, and Python does not notice. The
    caller would take the interrupt for a fault of the server, and ask again. So there another thread waits
    for the driver.
    """
    if threading.current_thread() is not threading.main_thread():
        cursor.execute(query)
        return
    with ThreadPoolExecutor(1, "pgsieve-query") as pool:
        running = pool.submit(cursor.execute, query)
        try:
            running.result()
        finally:
            while not running.done():  # An interrupt that comes before the query cancels nothing.
                with suppress(adbc_driver_manager.Error):
                    cursor.adbc_cancel()
                wait([running], _LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class Conninfo:
    """How to open sessions of a database: libpq's conninfo, and the source of its password.

    No repr shows them.

    `password_command` is a program and its arguments, run for each session without a shell.
    """

    text: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    password_command: tuple[str, ...] = field(default=(), repr=False)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit session; `options` are psycopg's and libpq's, libpq's only where the conninfo lacks them."""
        parameters = self._parameters(options)
        connection = self._opened(parameters)
        version = connection.info.server_version
        try:
            _settle(connection)
        except BaseException as error:
            switches = self._switches(connection, version)
            ended = connection.broken or isinstance(error, psycopg.errors.QueryCanceled)
            connection.close()
            if not ended:
                raise
        else:
            return connection
        # One of the role's timeouts may have struck before. A server refuses timeouts that it does not know,
        # and its version is known only now.
        connection = self._opened({**parameters, "options": switches})
        try:
            _settle(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _opened(self, parameters: Mapping[str, Any]) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.text, autocommit=True, client_encoding="UTF8", **parameters)

    @contextmanager
    def adbc(self) -> Iterator["dbapi.Connection"]:
        """An ADBC session with an open transaction, from the result of `for_executors`."""
        from adbc_driver_postgresql import dbapi

        remember_those_of(self.text)
        password = self._password()
        secret = {} if password is None else {"password": password}
        # The driver reads the names of all types first: an illegible one would prevent any session.
        uri = make_conninfo(self.text, client_encoding="SQL_ASCII", **secret)
        try:
            connection = dbapi.connect(uri)
        except adbc_driver_manager.Error as error:
            text = concealed(str(error))
            raise type(error)(text, status_code=error.status_code, sqlstate=error.sqlstate) from None
        with connection:
            with connection.cursor() as cursor:
                cursor.execute(f"set search_path = {_SEARCH_PATH}")
                cursor.execute(f"set client_encoding = {OUTPUT_SETTINGS['client_encoding']}")
            yield connection

    def for_executors(self, connection: psycopg.Connection[Any]) -> "Conninfo":
        """A conninfo for machines with another environment (PGPASSWORD, service files), made from a session of this one."""
        parameters: dict[str, Any] = _parameters(connection)
        noticing = _NOTICING if _can_be_set(connection, *_NOTICING) else None
        parameters["options"] = self._switches(connection, connection.info.server_version, noticing)
        # Parameters that libpq does not show: the password, also from a file, and that of the client's key.
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

    def _switches(
        self, connection: psycopg.Connection[Any], version: int, noticing: tuple[str, str] | None = None
    ) -> str:
        """The options of a session like this one, with all timeouts of the server's version."""
        # Works also for a session that the server has ended.
        own = _parameters(connection).get("options") if self._has_service else self._user_options
        return _options(own, [name for name, least in _TIMEOUTS.items() if least <= version], noticing)

    def _parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters to add to the conninfo's own."""
        own = parameters_of(self.text)
        remember_those_of(self.text)
        defaults: dict[str, Any] = {"application_name": "pgsieve", "connect_timeout": "10", **options}
        if not self._has_service:  # A parameter in a service file would lose its effect.
            defaults |= _KEEPALIVES
        parameters = {k: v for k, v in defaults.items() if k not in own}
        if not self._has_service:
            everywhere = [name for name, least in _TIMEOUTS.items() if not least]
            parameters["options"] = _options(self._user_options, everywhere)
        if (password := self._password()) is not None:
            parameters["password"] = password
        return parameters

    def _password(self) -> str | None:
        password = _printed(self.password_command) if self.password_command else self.password
        remember(password)
        return password


def parameters_of(conninfo: str) -> Mapping[str, Any]:
    """The parameters of a connection string; raises UnreadableConninfoError."""
    try:
        return conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError:
        raise UnreadableConninfoError(
            "the conninfo is not valid",
            hint='write it as libpq does, e.g. "host=db dbname=shop user=pgsieve" or a postgresql:// URI; a password with'
            " special characters goes into a `password` of its own",
        ) from None


def settle_again(connection: psycopg.Connection[Any], statements: str | None = None) -> str:
    """Give a session the settings of a new one, in one round trip.

    Raises psycopg.Error where it does not answer.

    Returns the `statements` for the next time. To report a few settings, the server builds rows of all. So a
    session is asked only once for the timeouts to switch off: the source of a setting does not change during
    a session.
    """
    if statements is None:
        names = _settle(connection, "reset all;")
        return "reset all;" + _SETTLED + "".join(f"set {name} = '0';" for name in names)
    _executed(connection, statements, ExecStatus.COMMAND_OK)
    return statements


def _settle(connection: psycopg.Connection[Any], before: str = "") -> list[str]:
    """Apply the settings in one round trip of the simple protocol, the only one that a walsender supports.

    Returns the timeouts that were switched off.
    """
    settled = _executed(connection, before + _SETTLED + _WITHOUT_TIMEOUTS, ExecStatus.TUPLES_OK)
    return [(settled.get_value(row, 0) or b"").decode() for row in range(settled.ntuples)]


def _executed(connection: psycopg.Connection[Any], statements: str, status: ExecStatus) -> "PGresult":
    result = connection.pgconn.exec_(statements.encode())
    if result.status != status:
        raise psycopg.errors.error_from_result(result, connection.info.encoding)
    return result


def _parameters(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """The parameters of a connection.

    psycopg asks for the home directory, which a user id without a name does not have where HOME is unset.
    """
    if not Path(os.path.expanduser("~")).is_absolute():  # noqa: PTH111 - a Path raises where there is none
        os.environ["HOME"] = "/nonexistent"
    return dict(connection.info.get_parameters())


def _can_be_set(connection: psycopg.Connection[Any], name: str, value: str) -> bool:
    """Whether the server accepts this value of a setting."""
    taken = connection.pgconn.exec_(f"set {name} = '{value}'; reset {name}".encode())
    return taken.status == ExecStatus.COMMAND_OK


def _options(own: str | None, timeouts: Sequence[str], noticing: tuple[str, str] | None = None) -> str:
    """The server's command line: the later of two values of a setting counts."""
    switches = [f"-c {name}=0" for name in timeouts]
    switches += [f"-c {'='.join(noticing)}"] if noticing else []
    pinned = [f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in _PINNED.items()]
    return " ".join([*switches, *([own] if own else []), *pinned])


def _printed(command: Sequence[str]) -> str:
    """The first line that a command prints; no message shows the rest of its output, or its arguments."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the administrator's own, from pgsieve.yaml
            command,
            # The system's own environment may lack a token that is kept out of the lake's requests
            # (`keep_token_out`).
            env=dict(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a command"
        raise _refusal(f"cannot be run: {reason}") from None
    with process:
        try:
            printed, _ = process.communicate(timeout=PASSWORD_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise _refusal(f"did not end within {PASSWORD_SECONDS:g} s") from None
        except BaseException:
            _kill(process)
            raise
    if process.returncode:
        raise _refusal(f"ended with status {process.returncode}")
    try:
        lines = printed.decode().splitlines()
    except UnicodeDecodeError:
        raise _refusal("printed bytes that are not UTF-8") from None
    if not lines or not lines[0] or "\0" in lines[0]:
        raise _refusal("printed no password")
    return lines[0]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command, and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _refusal(reason: str) -> PasswordCommandError:
    return PasswordCommandError(
        f"its password_command {reason}",
        hint="run the command by hand as the same user; it should print the password, and end with status 0",
    )
