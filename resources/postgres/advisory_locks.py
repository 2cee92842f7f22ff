"""Takes and releases a named advisory lock of the database, and says which sessions hold it or wait for it.

PostgreSQL gives an advisory lock no meaning: a lock is only a number that one session can hold at a time
(PostgreSQL documentation, Advisory Locks). pgsieve uses advisory locks so that two processes do not do the same
work at the same time.

In: a session, and the name of the lock.
Out: the lock is held or released, or a text names the sessions that hold it.

Raises psycopg's errors.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgsieve.resources.postgres.errors import is_transient

#: The number of the lock: a hash of its name, because PostgreSQL identifies an advisory lock by a 64-bit number.
_LOCK_KEY = sql.SQL("hashtextextended({}, 0)")
#: The condition for the rows of the lock in the view pg_locks. The view shows the upper 32 bits of the lock's number
#: in the column classid, and the lower 32 bits in the column objid.
_HAS_LOCK_KEY = sql.SQL(
    "locktype = 'advisory' and objsubid = 1"
    " and pg_locks.database = (select oid from pg_database where datname = current_database())"
    " and (classid::bigint << 32) | objid::bigint = {}"
)
_HOLDERS_QUERY = sql.SQL(
    "select pid, application_name, coalesce(client_addr::text, 'a local socket'), date_trunc('second', backend_start)"
    " from pg_locks join pg_stat_activity using (pid) where granted and {}"
)
_IS_AWAITED_QUERY = sql.SQL("select exists (select from pg_locks where not granted and {})")


@dataclass(frozen=True)
class AdvisoryLock:
    """A named lock that a session can take.

    Sessions that wait for the lock get it in the order in which they requested it.
    """

    connection: psycopg.Connection[Any]
    name: str

    def take(self, timeout_seconds: float | None) -> None:
        """Wait for the lock, and take it. Raises LockNotAvailable after `timeout_seconds`; with None the wait has no limit."""
        # For PostgreSQL, 0 would be no limit.
        milliseconds = 0 if timeout_seconds is None else max(1, round(timeout_seconds * 1000))
        self.connection.execute(sql.SQL("set lock_timeout = {}").format(milliseconds))
        self.connection.execute(sql.SQL("select pg_advisory_lock({})").format(self._key))

    def take_if_free(self) -> bool:
        """Take the lock unless another session holds it or waits for it. Return True if this session now holds the lock."""
        row = self.connection.execute(sql.SQL("select pg_try_advisory_lock({})").format(self._key)).fetchone()
        return row == (True,)

    def release(self) -> None:
        """Release the lock. Does nothing if the session was lost, because the server released the lock with the session."""
        with suppress(psycopg.Error):
            self.connection.execute(sql.SQL("select pg_advisory_unlock({})").format(self._key))

    def describe_holders(self) -> str:
        """The sessions that hold the lock, as a text for messages."""
        return _format_holders(
            self.connection.execute(_HOLDERS_QUERY.format(_HAS_LOCK_KEY.format(self._key))).fetchall()
        )

    def is_awaited(self) -> bool:
        """True if another session waits for the lock.

        It is also true if the connection of this session was lost. The server has then released the lock. So the caller
        must take it again.
        """
        try:
            row = self.connection.execute(
                _IS_AWAITED_QUERY.format(_HAS_LOCK_KEY.format(self._key))
            ).fetchone()
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            return True
        return bool(row and row[0])

    @property
    def _key(self) -> sql.Composed:
        return _LOCK_KEY.format(self.name)


def _format_holders(holders: Sequence[tuple[Any, ...]]) -> str:
    descriptions = [
        f"{name} (server process {pid}, from {address}, since {start_time})"
        for pid, name, address, start_time in holders
    ]
    return f"held by {', '.join(descriptions)}" if descriptions else "its holder is about to end"
