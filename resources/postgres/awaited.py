"""The transactions that a new slot, its exported snapshot, or a table's lock waits for, and how long it may wait.

In: a session that waits. Out: the transactions that it waits for. A new slot waits for all transactions that
run in any database of the cluster, including prepared ones (SnapBuildWaitSnapshot() in
src/backend/replication/logical/snapbuild.c). Adding a table to a capture publication waits for every
conflicting lock, reading a table only for ACCESS EXCLUSIVE (section 13.3.1).
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psycopg

from pgsieve.resources.postgres.errors import PassingFaultError, SourceError

if TYPE_CHECKING:
    from pgsieve.resources.postgres.source import Source

#: How long a copy waits while other work waits for it, and how long when no other work is left.
BRIEF_SECONDS, PATIENT_SECONDS = 3.0, 20.0
#: How long the reading of a table's expressions waits for a lock.
LOCK_SECONDS = 1.0
#: How often a query asks for the cause of a wait, and after how long the log names it.
LOOK_SECONDS, LOG_SECONDS = 1.0, 5.0

_LOGGER = logging.getLogger(__name__)

_HOLDERS = """
select distinct held.relation::bigint, held.virtualtransaction, a.pid, coalesce(a.datname, p.database), a.application_name,
       p.gid, date_trunc('second', coalesce(a.xact_start, p.prepared))
  from {held}
  left join pg_stat_activity a on a.pid = held.pid
  left join pg_locks own on held.pid is null and own.pid is null and own.locktype = 'transactionid'
   and own.virtualtransaction = held.virtualtransaction
  left join pg_prepared_xacts p on p.transaction = own.transactionid
"""
_AWAITED = _HOLDERS.format(
    held="""pg_locks held join pg_locks waiting on held.locktype = waiting.locktype and held.granted and waiting.pid = %s
   and not waiting.granted and waiting.locktype in ('transactionid', 'relation')
   and (held.transactionid = waiting.transactionid
        or (held.database, held.relation) = (waiting.database, waiting.relation)
        and coalesce(held.pid, 0) = any(pg_blocking_pids(waiting.pid)))"""
)
#: The locks that forbid reading, granted or not: a later request waits behind one that is not granted.
_EXCLUSIVE = """select * from pg_locks where locktype = 'relation' and mode = 'AccessExclusiveLock' and relation >= 16384
   and database = (select oid from pg_database where datname = current_database())"""
_LOCKING = _HOLDERS.format(held=f"({_EXCLUSIVE}) held")
#: The relations with such a lock, for a query that would wait for them.
LOCKED = f"select relation from ({_EXCLUSIVE}) held"
_ARE_OPEN = "select exists (select from pg_locks where granted and virtualtransaction = any(%s))"


class SnapshotAwaitedError(PassingFaultError):
    """A snapshot or a lock waits for other transactions to end; `transactions` are their virtual ids."""

    def __init__(self, message: str, transactions: Sequence[str]) -> None:
        super().__init__(message, hint="end the transaction, or wait until it has ended")
        self.transactions = tuple(transactions)


@contextmanager
def awaiting(source: "Source", session: psycopg.Connection[Any], seconds: float | None) -> Iterator[None]:
    """Let the session's statement in the block wait for transactions up to `seconds`, or without limit (None).

    After a while the log names the transactions. At the time limit the statement is cancelled, because the
    server process would otherwise keep waiting, and keep its slot. Then the block raises
    SnapshotAwaitedError.
    """
    over, given_up = Event(), list[SnapshotAwaitedError]()

    def look() -> None:
        is_logged, since = False, time.monotonic()
        while not over.wait(LOOK_SECONDS):
            message, transactions = "", list[str]()
            with suppress(SourceError):  # Without a second session nothing ends the wait.
                message, transactions = _awaited(source, session)
            if not transactions:
                continue
            if seconds is not None and time.monotonic() - since >= seconds:
                given_up.append(SnapshotAwaitedError(message, transactions))
                session.cancel_safe()
                return
            if not is_logged and time.monotonic() - since >= LOG_SECONDS:
                _LOGGER.warning("%s", message)
                is_logged = True

    looking = Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    except (SourceError, psycopg.Error):
        if given_up:
            raise given_up[0] from None
        raise
    finally:
        over.set()
        looking.join()


def _awaited(source: "Source", session: psycopg.Connection[Any]) -> tuple[str, list[str]]:
    """The transactions that a session waits for: a message, and their virtual ids."""
    with source.connect() as connection:
        rows = connection.execute(_AWAITED, [session.info.backend_pid]).fetchall()
    return _waiting_for(source, rows), [row[1] for row in rows]


def _waiting_for(source: "Source", rows: Sequence[tuple[Any, ...]]) -> str:
    holders = ", ".join(dict.fromkeys(map(_described, rows)))
    return f'source "{source.name}": waits for open transactions: {holders}'


def _described(row: tuple[Any, ...]) -> str:
    _, _, pid, database, application, gid, since = row
    if gid is not None:
        return f'prepared transaction "{gid}" of database "{database}", since {since}'
    return (
        f'server process {pid} ("{application or ""}" in database "{database}", since {since or "unknown"})'
    )


def locked_exclusively(connection: psycopg.Connection[Any]) -> dict[int, str]:
    """The tables of the database that cannot be read now, each with a text that names the holders of its lock."""
    locked: dict[int, list[str]] = {}
    for row in connection.execute(_LOCKING).fetchall():
        locked.setdefault(row[0], []).append(_described(row))
    return {relation: ", ".join(holders) for relation, holders in locked.items()}


def lock_awaited(source: "Source", relations: Collection[int]) -> SnapshotAwaitedError | None:
    """The error of a copy that a lock on some relations prevents; None if they are no longer locked."""
    with source.connect() as connection:
        rows = [row for row in connection.execute(_LOCKING).fetchall() if row[0] in relations]
    return SnapshotAwaitedError(_waiting_for(source, rows), [row[1] for row in rows]) if rows else None


def are_open(source: "Source", transactions: Collection[str]) -> bool:
    """Whether some of these transactions are still open."""
    with source.connect() as connection:
        row = connection.execute(_ARE_OPEN, [list(transactions)]).fetchone()
    return bool(row and row[0])
