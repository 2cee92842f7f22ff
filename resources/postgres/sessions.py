"""The one place that opens sessions of a publisher: with psycopg, as a walsender's client, and with ADBC.

In: a `Conninfo`. Out: sessions that all have the same settings. Raises UnreadableConninfoError,
PasswordCommandError, and what the drivers raise where there is no connection.

Names mean PostgreSQL's own objects whatever the role's search_path is, as in its own workers (ALWAYS_SECURE_SEARCH_PATH_SQL
in src/include/common/connect.h): a function that somebody else made in `public` would else be run with the rights of
pgsieve's role (section 5.10.6). No session is ended for being long or idle, and a peer that is gone is noticed.
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

#: How values are printed: as PostgreSQL's own apply worker asks for (libpqrcv_connect in
#: src/backend/replication/libpqwalreceiver/libpqwalreceiver.c), with UTC and hex bytea beside.
OUTPUT_SETTINGS: Mapping[str, str] = {
    "datestyle": "ISO,MDY",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "timezone": "UTC",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
}

#: Temporary tables last: left out, they would come before pg_catalog (section 19.11.1).
_SEARCH_PATH = "pg_catalog,pg_temp"

#: What a literal, a condition or a transaction means, and what a refusal does: as in a session of which nothing was set.
#: docs/connections.md says what each does, and `tests/resources/test_settings.py` which others there are.
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

#: Settings that no user's options may change. The encoding is a parameter of its own.
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

#: A lost peer is noticed after two minutes: a firewall that forgets a connection sends nothing.
_KEEPALIVES: Mapping[str, str] = {
    "keepalives": "1",
    "keepalives_idle": "60",
    "keepalives_interval": "10",
    "keepalives_count": "6",
    "tcp_user_timeout": "120000",
}

#: What reads a slot or a table sends nothing for minutes: the server looks so often whether its client is there still, or
#: goes on for one that was killed (section 19.3.2; from 14 on, not on every platform).
_NOTICING = ("client_connection_check_interval", "2s")

#: For what came without our options: from a service file, or through a pooler that keeps them to itself. Without a
#: function before the path is set.
_SETTLED = f"set search_path = {_SEARCH_PATH};" + "".join(
    f"set {name} = '{value}';" for name, value in _PINNED.items() if name != "search_path"
)
#: The timeouts that this version has, switched off. What the user's own options say has the source "client", and stays.
_WITHOUT_TIMEOUTS = (
    "select name, pg_catalog.set_config(name, '0', false) from pg_catalog.pg_settings"
    f" where name in ({', '.join(repr(name) for name in _TIMEOUTS)}) and source <> 'client'"
)

_LOOK_SECONDS = 0.1

#: A command that makes a password may ask a server for it.
PASSWORD_SECONDS = 30.0


class UnreadableConninfoError(PgsieveError):
    """A conninfo that libpq cannot read; its own words quote what it stumbled over, maybe a part of a password."""


class PasswordCommandError(PgsieveError):
    """The command that should print a password did not."""


def execute(cursor: "dbapi.Cursor", query: str) -> None:
    """Run a query of an ADBC session; what interrupts this thread cancels it, and is raised.

    In the main thread the driver has SIGINT itself cancel a query, and Python never hears of it: whoever waits would take the
    interruption for a fault of the server's, and ask again. So there another thread waits for the driver.
    """
    if threading.current_thread() is not threading.main_thread():
        cursor.execute(query)
        return
    with ThreadPoolExecutor(1, "pgsieve-query") as pool:
        running = pool.submit(cursor.execute, query)
        try:
            running.result()
        finally:
            while not running.done():  # One that comes before the query cancels nothing.
                with suppress(adbc_driver_manager.Error):
                    cursor.adbc_cancel()
                wait([running], _LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class Conninfo:
    """How to open sessions of a database: libpq's conninfo, and where its password comes from; no repr shows them.

    `password_command` is a program and its arguments, run for each session; no shell reads them.
    """

    text: str = field(repr=False)
    password: str | None = field(default=None, repr=False)
    password_command: tuple[str, ...] = field(default=(), repr=False)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit session; `options` are psycopg's and libpq's, the latter where the conninfo has no others."""
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
        # A timeout of the role's may have been faster. A server refuses one that it does not know, and only now its version is known.
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
        """An ADBC session with a transaction begun, of what `for_executors` returned."""
        from adbc_driver_postgresql import dbapi

        remember_those_of(self.text)
        password = self._password()
        secret = {} if password is None else {"password": password}
        # The driver reads the names of all types first: one that is no text would let no session begin.
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
        """The same where the environment (PGPASSWORD, service files) is another; the session is one of this conninfo."""
        parameters: dict[str, Any] = _parameters(connection)
        noticing = _NOTICING if _can_be_set(connection, *_NOTICING) else None
        parameters["options"] = self._switches(connection, connection.info.server_version, noticing)
        # Those that libpq does not show: the password, also from a file, and that of the client's key.
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
        """The user's own."""
        options = parameters_of(self.text).get("options")
        return str(options) if options else os.environ.get("PGOPTIONS")

    def _switches(
        self, connection: psycopg.Connection[Any], version: int, noticing: tuple[str, str] | None = None
    ) -> str:
        """The options of a session like this one, all timeouts of the server's version among them."""
        # Also of a session that the server has ended.
        own = _parameters(connection).get("options") if self._has_service else self._user_options
        return _options(own, [name for name, least in _TIMEOUTS.items() if least <= version], noticing)

    def _parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Those beside the conninfo's own."""
        own = parameters_of(self.text)
        remember_those_of(self.text)
        defaults: dict[str, Any] = {"application_name": "pgsieve", "connect_timeout": "10", **options}
        if not self._has_service:  # What stands in a service file would not count any more.
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
    """Give a session the settings of a new one, in one round trip; raises psycopg.Error where it does not answer.

    Returns the `statements` for the next time. The server makes rows of all its settings to tell a few, so a session is asked once for
    the timeouts that are to be switched off: where a setting comes from does not change while its session lasts.
    """
    if statements is None:
        names = _settle(connection, "reset all;")
        return "reset all;" + _SETTLED + "".join(f"set {name} = '0';" for name in names)
    _executed(connection, statements, ExecStatus.COMMAND_OK)
    return statements


def _settle(connection: psycopg.Connection[Any], before: str = "") -> list[str]:
    """In one round trip of the simple protocol, the only one that a walsender speaks; the timeouts that were switched off."""
    settled = _executed(connection, before + _SETTLED + _WITHOUT_TIMEOUTS, ExecStatus.TUPLES_OK)
    return [(settled.get_value(row, 0) or b"").decode() for row in range(settled.ntuples)]


def _executed(connection: psycopg.Connection[Any], statements: str, status: ExecStatus) -> "PGresult":
    result = connection.pgconn.exec_(statements.encode())
    if result.status != status:
        raise psycopg.errors.error_from_result(result, connection.info.encoding)
    return result


def _parameters(connection: psycopg.Connection[Any]) -> dict[str, Any]:
    """The parameters of a connection. psycopg asks for the home, which a user id without a name has not where HOME is unset."""
    if not Path(os.path.expanduser("~")).is_absolute():  # noqa: PTH111 - a Path raises where there is none
        os.environ["HOME"] = "/nonexistent"
    return dict(connection.info.get_parameters())


def _can_be_set(connection: psycopg.Connection[Any], name: str, value: str) -> bool:
    """Whether the server takes this value of a setting."""
    taken = connection.pgconn.exec_(f"set {name} = '{value}'; reset {name}".encode())
    return taken.status == ExecStatus.COMMAND_OK


def _options(own: str | None, timeouts: Sequence[str], noticing: tuple[str, str] | None = None) -> str:
    """The server's command line: of two values of a setting the later one counts."""
    switches = [f"-c {name}=0" for name in timeouts]
    switches += [f"-c {'='.join(noticing)}"] if noticing else []
    pinned = [f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in _PINNED.items()]
    return " ".join([*switches, *([own] if own else []), *pinned])


def _printed(command: Sequence[str]) -> str:
    """The first line that a command prints; nothing else of it is shown to anybody, and no argument."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the administrator's own, from pgsieve.yaml
            command,
            # The system's own may lack a token that is kept out of the lake's requests (`keep_token_out`).
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
        raise _refusal("printed what is not UTF-8") from None
    if not lines or not lines[0] or "\0" in lines[0]:
        raise _refusal("printed no password")
    return lines[0]


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command, and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _refusal(reason: str) -> PasswordCommandError:
    return PasswordCommandError(
        f"its password_command {reason}",
        hint="run the command by hand as the same user; it should print the password, and end with status 0",
    )
