"""An advisory lock of the database, its holders, and the queue of the processes that wait for it.

In: a session, and the name of the lock. Raises psycopg's errors. PostgreSQL documentation, Advisory Locks.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from pgsieve.resources.postgres.errors import is_transient

#: The key of an advisory lock, and the condition for its rows in the view pg_locks, which shows a key in two
#: halves.
_KEY = sql.SQL("hashtextextended({}, 0)")
_HAS_KEY = sql.SQL(
    "locktype = 'advisory' and objsubid = 1"
    " and pg_locks.database = (select oid from pg_database where datname = current_database())"
    " and (classid::bigint << 32) | objid::bigint = {}"
)
_HOLDERS = sql.SQL(
    "select pid, application_name, coalesce(client_addr::text, 'a local socket'), date_trunc('second', backend_start)"
    " from pg_locks join pg_stat_activity using (pid) where granted and {}"
)
_IS_AWAITED = sql.SQL("select exists (select from pg_locks where not granted and {})")


@dataclass(frozen=True)
class AdvisoryLock:
    """A named lock that a session may take; waiting sessions get it in the order of their requests."""

    connection: psycopg.Connection[Any]
    name: str

    def take(self, seconds: float) -> None:
        """Wait for the lock; raise LockNotAvailable after `seconds`. 0 seconds means no limit."""
        self.connection.execute(sql.SQL("set lock_timeout = {}").format(round(seconds * 1000)))
        self.connection.execute(sql.SQL("select pg_advisory_lock({})").format(self._key))

    def take_if_free(self) -> bool:
        """Take the lock unless another session has it, or waits for it; return whether it was taken."""
        row = self.connection.execute(sql.SQL("select pg_try_advisory_lock({})").format(self._key)).fetchone()
        return row == (True,)

    def release(self) -> None:
        """Release the lock. If the session was lost, the server has released it already."""
        with suppress(psycopg.Error):
            self.connection.execute(sql.SQL("select pg_advisory_unlock({})").format(self._key))

    def holders(self) -> str:
        """The sessions that hold the lock, as text."""
        return _holders_text(self.connection.execute(_HOLDERS.format(_HAS_KEY.format(self._key))).fetchall())

    def is_awaited(self) -> bool:
        """Whether another session waits for the lock.

        Also true if this session was lost, and the lock with it, so that the caller must take the lock again.
        """
        try:
            row = self.connection.execute(_IS_AWAITED.format(_HAS_KEY.format(self._key))).fetchone()
        except psycopg.Error as error:
            if not is_transient(error):
                raise
            return True
        return bool(row and row[0])

    @property
    def _key(self) -> sql.Composed:
        return _KEY.format(self.name)


def _holders_text(holders: Sequence[tuple[Any, ...]]) -> str:
    descriptions = [
        f"{name} (server process {pid}, from {address}, since {start_time})"
        for pid, name, address, start_time in holders
    ]
    return f"held by {', '.join(descriptions)}" if descriptions else "its holder is about to end"
