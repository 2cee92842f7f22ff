"""The transactions that a new slot, and the snapshot that it exports, wait for; and for how long one may.

In: the session that waits. Out: who it is that it waits for. A slot begins once every transaction that was running has ended, in whatever
database of the cluster, prepared ones too (SnapBuildWaitSnapshot() in src/backend/replication/logical/snapbuild.c).
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

#: How long a copy waits where other work waits with it, and how long once that has had its turn.
BRIEF_SECONDS, PATIENT_SECONDS = 3.0, 20.0
#: So often it is looked for whom a session waits; and after so long a line says so.
LOOK_SECONDS, TOLD_SECONDS = 1.0, 5.0

_LOGGER = logging.getLogger(__name__)

_HOLDERS = """
select held.transactionid::text, a.pid, coalesce(a.datname, p.database), a.application_name, p.gid,
       date_trunc('second', coalesce(a.xact_start, p.prepared))
  from pg_locks waiting
  join pg_locks held on held.locktype = waiting.locktype and held.transactionid = waiting.transactionid and held.granted
  left join pg_stat_activity a on a.pid = held.pid
  left join pg_prepared_xacts p on p.transaction = held.transactionid and held.pid is null
 where waiting.pid = %s and not waiting.granted and waiting.locktype = 'transactionid'
"""
_HELD = "select exists (select from pg_locks where locktype = 'transactionid' and granted and transactionid::text = any(%s))"


class SnapshotAwaitedError(PassingFaultError):
    """A snapshot is to be had only once transactions have ended; `transactions` are their ids."""

    def __init__(self, message: str, transactions: Sequence[str]) -> None:
        super().__init__(message, hint="end the transaction, or wait until it has ended")
        self.transactions = tuple(transactions)


@contextmanager
def awaiting(source: "Source", session: psycopg.Connection[Any], seconds: float | None) -> Iterator[None]:
    """Within the block, let the session's statement wait for transactions for this many seconds at most, None for ever.

    After a while the log names what it waits for. After the time limit it raises SnapshotAwaitedError: a
    server process that is only abandoned would go on waiting, and keep its slot.
    """
    over, given_up = Event(), list[SnapshotAwaitedError]()

    def look() -> None:
        told, since = False, time.monotonic()
        while not over.wait(LOOK_SECONDS):
            message, transactions = "", list[str]()
            with suppress(SourceError):  # Without a second session it goes on waiting.
                message, transactions = _awaited(source, session)
            if not transactions:
                continue
            if seconds is not None and time.monotonic() - since >= seconds:
                given_up.append(SnapshotAwaitedError(message, transactions))
                session.cancel_safe()
                return
            if not told and time.monotonic() - since >= TOLD_SECONDS:
                _LOGGER.warning("%s", message)
                told = True

    looking = Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    except SourceError:
        if given_up:
            raise given_up[0] from None
        raise
    finally:
        over.set()
        looking.join()


def _awaited(source: "Source", session: psycopg.Connection[Any]) -> tuple[str, list[str]]:
    """For whom a session waits, in words, and the ids of the transactions."""
    with source.connect() as connection:
        rows = connection.execute(_HOLDERS, [session.info.backend_pid]).fetchall()
    holders = [
        f'prepared transaction "{gid}" of database "{database}", since {since}'
        if gid is not None
        else f'server process {pid} ("{application or ""}" in database "{database}", since {since or "unknown"})'
        for _, pid, database, application, gid, since in rows
    ]
    return f'source "{source.name}": waits for open transactions: {", ".join(holders)}', [
        row[0] for row in rows
    ]


def are_open(source: "Source", transactions: Collection[str]) -> bool:
    """Whether some of these transactions are still open."""
    with source.connect() as connection:
        row = connection.execute(_HELD, [list(transactions)]).fetchone()
    return bool(row and row[0])
