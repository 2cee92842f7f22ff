"""Represents the publisher: opens its sessions, takes its locks, checks its settings, and quotes names for its SQL.

In: a conninfo of libpq.
Out: sessions and locks.

Raises `SourceError` subclasses for errors that a user can correct, such as an unreachable server, wrong settings,
or missing privileges.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from psycopg import sql

from pgsieve.decoding.server_versions import NEWEST_SERVER, OLDEST_SERVER
from pgsieve.resources.context import assign_within
from pgsieve.resources.postgres.advisory_locks import AdvisoryLock
from pgsieve.resources.postgres.errors import (
    LockHeldError,
    SourceError,
    SourceSettingError,
    SourceSilentError,
    SourceUnreachableError,
    UntestedServerError,
    convert_source_error,
    find_connection_sqlstate,
    is_of_statement,
    join_lines,
    remove_values_from_cause,
    remove_values_from_message,
)
from pgsieve.resources.postgres.password_command import PasswordCommandError
from pgsieve.resources.postgres.pooler import find_pooler, is_pooled, name_pooler, shares_server_processes
from pgsieve.resources.postgres.session_pool import get_session_pool
from pgsieve.resources.postgres.sessions import Conninfo, UnreadableConninfoError

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor


def quote(*parts: str) -> str:
    """A qualified and quoted SQL identifier. All SQL of pgsieve gets its identifiers from this function."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def quote_literal(value: str) -> str:
    """A string as a quoted SQL literal."""
    return sql.Literal(value).as_string(None)


#: The WAL level in effect. From PostgreSQL 19 on, the level is `logical` even with wal_level = replica, as long as
#: a logical slot exists: the first slot switches decoding on, and dropping the last slot switches it off
#: (PostgreSQL documentation, setting wal_level).
_WAL_LEVEL_SQL = "coalesce(current_setting('effective_wal_level', true), current_setting('wal_level'))"
_SWITCHED_DECODING_VERSION = 190000

_UNREACHABLE_HINT = "check host, port, dbname, user and password in conninfo, and that the server is running"
#: The hint if the function of an event trigger on login failed. The server's message names the function, but not the
#: trigger.
_LOGIN_TRIGGER_HINT = (
    "an event trigger on login fails: correct its function, e.g. by ALTER FUNCTION ... SET search_path = ..., since pgsieve's"
    " sessions have search_path = pg_catalog, pg_temp"
)
#: Hints for refusals of a session, by a part of the server's message.
_REFUSAL_HINT_BY_TEXT = {
    "PL/pgSQL function": _LOGIN_TRIGGER_HINT,
    "to start WAL sender": "a role with REPLICATION has to be in conninfo; a superuser gives it to a role by"
    " ALTER ROLE ... REPLICATION; at Amazon: GRANT rds_replication TO ...",
    "pg_hba.conf": "allow the role, the database and this host in the server's pg_hba.conf, then SELECT pg_reload_conf()",
}
#: A terminal shows the messages of this logger, and the log of a Dagster step does not.
_LOGGER = logging.getLogger(__name__)

#: The locks that the context of this thread holds, by their source and activity. The activity is the work that the
#: lock protects; the lock is named after it.
_HELD_LOCK_BY_ACTIVITY: ContextVar[Mapping[tuple["Source", str], AdvisoryLock]] = ContextVar(
    "locks", default=MappingProxyType({})
)
#: The source and the session of the enclosing `share_lock_session`, or None.
_LOCK_SESSION: ContextVar[tuple["Source", psycopg.Connection[tuple[Any, ...]]] | None] = ContextVar(
    "locking", default=None
)


@dataclass(frozen=True)
class Source:
    """One PostgreSQL database and its conninfo. No repr and no message shows the conninfo."""

    name: str
    _conninfo: str
    _password: str | None = None
    _password_command: tuple[str, ...] = ()
    #: True if the user allows that the server is a standby.
    standby: bool = False
    #: True if the user allows a server that is newer than the versions with which pgsieve was tested.
    allow_untested_server: bool = False

    def __repr__(self) -> str:
        return f"Source({self.name!r})"

    @property
    def _full_conninfo(self) -> Conninfo:
        return Conninfo(self._conninfo, self._password, self._password_command)

    @contextmanager
    def connect(self, **options: Any) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """An autocommit session for the block (`pgsieve.resources.postgres.sessions`). Errors become SourceErrors.

        Without `options` the session may come from the pool (`pgsieve.resources.postgres.session_pool`). Raises
        SourceSettingError if the server is too old. Raises UntestedServerError if the server is newer than the
        tested versions, unless `allow_untested_server` is set.
        """
        pool, conninfo = None if options else get_session_pool(), self._full_conninfo
        connection = pool.take(conninfo) if pool else None
        try:
            connection = connection or conninfo.connect(**options)
        except (UnreadableConninfoError, PasswordCommandError) as error:
            raise SourceUnreachableError(f'source "{self.name}": {error.message}', hint=error.hint) from None
        except psycopg.Error as error:
            pooler = find_pooler(self._full_conninfo.host, str(error))
            if pooler is None and is_of_statement(error):
                message = f'source "{self.name}": cannot set up a session ({join_lines(error)})'
                raise convert_source_error(error, message) from None
            pooler_text = f" through {pooler.name}" if pooler else ""
            is_silent = isinstance(error, psycopg.errors.ConnectionTimeout) or "timed out" in str(error)
            raise (SourceSilentError if is_silent else SourceUnreachableError)(
                f'source "{self.name}": no connection{pooler_text} ({join_lines(error)})',
                hint=pooler.hint if pooler else _choose_refusal_hint(str(error)),
                sqlstate=find_connection_sqlstate(error),
            ) from None
        try:
            with pool.lend(conninfo, connection) if pool else connection:
                self._check_version(connection.info.server_version)
                yield connection
        except psycopg.Error as error:
            if connection.broken:
                raise SourceUnreachableError(
                    f'source "{self.name}": the connection was lost ({join_lines(error)})',
                    hint="run again once the server answers: nothing is lost",
                    sqlstate=error.sqlstate,
                ) from None
            message = f'source "{self.name}": {remove_values_from_message(error)}'
            raise convert_source_error(error, message) from remove_values_from_cause(error)

    @contextmanager
    def hold_lock(self, activity: str, seconds: float | None = None) -> Iterator[AdvisoryLock]:
        """Hold an advisory lock of the database during the block, so that only one process at a time does this activity.

        Blocks may be nested. If another process holds the lock, LockHeldError is raised after `seconds`. Without
        `seconds` this function waits for the lock. After a second it logs a warning that names the process with
        the lock.

        If the session of the lock is lost, the server releases the lock without a message. So the block must be
        correct even without the lock.
        """
        key = (self, activity)
        if (lock := _HELD_LOCK_BY_ACTIVITY.get().get(key)) is not None:
            yield lock
            return
        with self._hold_new_lock(activity, seconds) as lock:
            _HELD_LOCK_BY_ACTIVITY.set({**_HELD_LOCK_BY_ACTIVITY.get(), key: lock})
            try:
                yield lock
            finally:
                _HELD_LOCK_BY_ACTIVITY.set(
                    {k: held_lock for k, held_lock in _HELD_LOCK_BY_ACTIVITY.get().items() if k != key}
                )
                lock.release()

    @contextmanager
    def _hold_new_lock(self, activity: str, seconds: float | None) -> Iterator[AdvisoryLock]:
        """Take a lock that this context does not hold yet. The rules are those of `hold_lock`."""
        if (free_lock := self._take_free_lock(activity)) is not None:
            yield free_lock
            return
        with self.connect() as connection:
            lock = AdvisoryLock(connection, _make_lock_name(activity))
            try:
                lock.take(1.0 if seconds is None else seconds)
            except psycopg.errors.LockNotAvailable:
                holders = lock.describe_holders()
                if seconds is not None:
                    raise LockHeldError(
                        f'source "{self.name}": another process is {activity}: {holders}',
                        hint="stop it first",
                        sqlstate="55006",
                    ) from None
                _LOGGER.warning('waiting for "%s" of source "%s": %s', activity, self.name, holders)
                lock.take(None)
            yield lock

    @contextmanager
    def share_lock_session(self) -> Iterator[None]:
        """Within the block, this thread and the threads that it starts share one session for all locks that are free.

        The server may limit the number of sessions of a role, so pgsieve does not open one session per lock.
        """
        with ExitStack() as stack:
            # Errors are ignored here. If the error persists, the next request for a lock raises it.
            with suppress(SourceError):
                connection = stack.enter_context(self.connect())
                stack.enter_context(assign_within(_LOCK_SESSION, (self, connection)))
            yield

    def _take_free_lock(self, activity: str) -> AdvisoryLock | None:
        """Take a lock in the session of `share_lock_session`.

        None if there is no such session, if it was lost, or if the lock is not free.
        """
        source, connection = _LOCK_SESSION.get() or (None, None)
        if connection is None or source != self:
            return None
        lock = AdvisoryLock(connection, _make_lock_name(activity))
        with suppress(psycopg.Error):  # The session was lost.
            return lock if lock.take_if_free() else None
        return None

    def make_executor_conninfo(self) -> Conninfo:
        """The conninfo for Spark's executors. Their environment may lack PGPASSWORD, and may have other service files."""
        with self.connect() as connection:
            return self._full_conninfo.complete_for_executors(connection)

    def check_ready(self) -> int:
        """Check that the server can be read. Return its version number, for example 170002.

        Raises SourceSettingError if the server cannot decode WAL, is a standby that the user did not allow, or is
        behind an unsuitable pooler.
        """
        with self.connect() as connection:
            version = connection.info.server_version
            row = connection.execute(
                f"select {_WAL_LEVEL_SQL}, pg_is_in_recovery(), pg_last_wal_receive_lsn() is not null"
            ).fetchone()
            assert row is not None
            level, is_in_recovery, is_streaming = row
            if is_in_recovery:
                self._check_standby(version, is_streaming=is_streaming)
            if level != "logical" and not (
                level == "replica" and version >= _SWITCHED_DECODING_VERSION and not is_in_recovery
            ):
                self._refuse_wal_level(level, version, is_in_recovery=is_in_recovery)
            if is_pooled(connection):
                self._check_pooler(connection)
        return version

    def _check_version(self, version: int) -> None:
        """Raise SourceError if the server's version may not be used.

        If the version is untested, but the user allows it, log a warning once.
        """
        major, oldest, newest = (number // 10000 for number in (version, OLDEST_SERVER, NEWEST_SERVER))
        subject = f'source "{self.name}": PostgreSQL {major} is'
        if major < oldest:
            raise SourceSettingError(f"{subject} too old", hint=f"use {oldest} or newer", sqlstate="0A000")
        if major <= newest:
            return
        message = f"{subject} newer than {newest}, the newest that this pgsieve was tested with"
        if not self.allow_untested_server:
            raise UntestedServerError(
                message,
                hint="install a pgsieve that was tested with it; or, if wrong rows do no harm, set"
                f" `allow_untested_server: true` in pgsieve.yaml, at `sources.{self.name}`",
                sqlstate="0A000",
            )
        _warn_once(f"{message}: replicas may differ from a built-in subscription's")

    def _check_standby(self, version: int, *, is_streaming: bool) -> None:
        """Raise SourceSettingError if the server is a standby that the user did not allow, or that cannot decode."""
        message = f'source "{self.name}": the server is a standby, recovery is in progress'
        if not self.standby:
            raise SourceSettingError(
                message,
                hint="name its primary; if conninfo has all hosts, target_session_attrs=read-write finds it; or read from"
                " the standby with `standby: true`",
                sqlstate="55000",
            )
        if version < 160000:
            raise SourceSettingError(
                f"{message}; standbys decode from PostgreSQL 16 on", hint="name its primary", sqlstate="0A000"
            )
        if not is_streaming:
            raise SourceSettingError(
                f"{message}, and it has received nothing by streaming replication",
                hint="set primary_conninfo there: a standby that only restores archived WAL cannot be read",
                sqlstate="55000",
            )

    def _refuse_wal_level(self, level: str, version: int, *, is_in_recovery: bool) -> None:
        """Raise SourceSettingError: with the server's wal_level, decoding is off, and stays off if a slot is created."""
        place, required_level = "in postgresql.conf", "logical"
        if version >= _SWITCHED_DECODING_VERSION:
            required_level = "logical" if is_in_recovery else "replica"
            place = "at its primary, or make a logical replication slot there" if is_in_recovery else place
        raise SourceSettingError(
            f'source "{self.name}": logical decoding requires "wal_level" >= "{required_level}", it is "{level}"',
            hint=f"set wal_level = logical {place}" + ("" if is_in_recovery else " and restart the server"),
            sqlstate="55000",
        )

    def _check_pooler(self, connection: psycopg.Connection[Any]) -> None:
        """Raise SourceSettingError if the pooler shares server processes among sessions, or does not support replication."""
        pooler, reason = name_pooler(self._full_conninfo.host), None
        if shares_server_processes(connection, self.connect):
            reason = "a session's locks and settings do not last there"
        else:
            try:
                with self.connect(replication="database", cursor_factory=psycopg.ClientCursor) as walsender:
                    walsender.execute("IDENTIFY_SYSTEM")
            except SourceError as error:
                reason = f"it does not let replication through ({error.message})"
        if reason is not None:
            raise SourceSettingError(
                f'source "{self.name}": the connection goes through {pooler.name}: {reason}',
                hint=pooler.hint,
                sqlstate="0A000",
            )


def _make_lock_name(activity: str) -> str:
    return f"pgsieve {activity}"


def is_decoding_switched(connection: psycopg.Connection[Any]) -> bool:
    """True if the first logical slot switches decoding on, and dropping the last one switches it off (from 19 on)."""
    if connection.info.server_version < _SWITCHED_DECODING_VERSION:
        return False
    row = connection.execute("select current_setting('wal_level') <> 'logical'").fetchone()
    return row == (True,)


@cache
def _warn_once(text: str) -> None:
    """Log a warning once per process."""
    _LOGGER.warning(text)


def fetch_batches(cursor: "Cursor") -> Iterator[pa.RecordBatch]:
    """The result of an ADBC cursor, as Arrow batches.

    The errors have their SQLSTATE. The errors of the cursor's own method `fetch_record_batch` have none.
    """
    assert cursor._results is not None  # noqa: SLF001 - only this reader's errors have their SQLSTATE
    yield from cursor._results.reader  # noqa: SLF001


def _choose_refusal_hint(message: str) -> str:
    """The hint for a message with which the server refused a session."""
    hints = (hint for text, hint in _REFUSAL_HINT_BY_TEXT.items() if text in message)
    return next(hints, _UNREACHABLE_HINT)
