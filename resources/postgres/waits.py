"""Limits how long a session waits for other transactions, and names these transactions.

In: a session that creates a slot, exports a snapshot, or locks a table.
Out: the transactions that the session waits for.

A new slot waits for all transactions that are running in any database of the cluster, including prepared transactions
(SnapBuildWaitSnapshot() in src/backend/replication/logical/snapbuild.c). A session that adds a table to a publication
waits for each conflicting lock on the table, and on the publication. A session that reads a table waits only for
ACCESS EXCLUSIVE locks (PostgreSQL documentation, Table-Level Locks).
"""

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import psycopg

from pgsieve.resources.postgres.errors import SourceError, TransientError

if TYPE_CHECKING:
    from pgsieve.resources.postgres.source import Source

#: How long the initial copy of tables may wait for open transactions: `BRIEF_SECONDS` if other work has to wait for the
#: copy, otherwise `PATIENT_SECONDS`.
BRIEF_SECONDS, PATIENT_SECONDS = 3.0, 20.0
#: The lock timeout of catalog queries and other brief statements.
LOCK_SECONDS = 1.0
#: The time between two queries for the cause of a wait, and the time after which the log names the cause.
POLL_SECONDS, LOG_SECONDS = 1.0, 5.0

_LOGGER = logging.getLogger(__name__)

#: Finds the holders of the locks that `{held}` selects: server processes, or prepared transactions, which have no process.
#: pg_locks does not say which prepared transaction holds a lock. But each transaction also holds a lock on its own id
#: (`own` in the query), and both locks have the same virtual transaction.
_HOLDERS_TEMPLATE = """
select distinct held.relation::bigint, held.virtualtransaction, a.pid, coalesce(a.datname, p.database), a.application_name,
       p.gid, date_trunc('second', coalesce(a.xact_start, p.prepared))
  from {held}
  left join pg_stat_activity a on a.pid = held.pid
  left join pg_locks own on held.pid is null and own.pid is null and own.locktype = 'transactionid'
   and own.virtualtransaction = held.virtualtransaction
  left join pg_prepared_xacts p on p.transaction = own.transactionid
"""
_AWAITED_TRANSACTIONS_QUERY = _HOLDERS_TEMPLATE.format(
    held="""pg_locks held join pg_locks waiting on held.locktype = waiting.locktype and held.granted and waiting.pid = %s
   and not waiting.granted and waiting.locktype in ('transactionid', 'relation', 'object')
   and (held.transactionid = waiting.transactionid
        or ((held.database, held.relation) = (waiting.database, waiting.relation)
            or (held.database, held.classid, held.objid) = (waiting.database, waiting.classid, waiting.objid))
        and coalesce(held.pid, 0) = any(pg_blocking_pids(waiting.pid)))"""
)
#: The locks that keep other sessions from reading a table. A lock that is only requested is included, because readers
#: have to wait behind the request, too.
_EXCLUSIVE_LOCKS_QUERY = """select * from pg_locks where locktype = 'relation' and mode = 'AccessExclusiveLock' and relation >= 16384
   and database = (select oid from pg_database where datname = current_database())"""
_EXCLUSIVE_HOLDERS_QUERY = _HOLDERS_TEMPLATE.format(held=f"({_EXCLUSIVE_LOCKS_QUERY}) held")
#: A query of the relations with a lock that keeps other sessions from reading, so that another query can leave
#: them out.
LOCKED_RELATIONS_QUERY = f"select relation from ({_EXCLUSIVE_LOCKS_QUERY}) held"
_ARE_OPEN_QUERY = "select exists (select from pg_locks where granted and virtualtransaction = any(%s))"


class OpenTransactionsError(TransientError):
    """A snapshot or a lock has to wait for open transactions. `transactions` are their virtual transaction ids."""

    def __init__(self, message: str, transactions: Sequence[str]) -> None:
        super().__init__(message, hint="end the transaction, or wait until it has ended")
        self.transactions = tuple(transactions)


@contextmanager
def limit_wait(
    source: "Source", session: psycopg.Connection[Any], max_wait_seconds: float | None
) -> Iterator[None]:
    """Limit how long the session's statement in the block may wait for transactions. None means no limit.

    The log names the transactions after `LOG_SECONDS`. At the limit the statement is cancelled, and the block
    raises OpenTransactionsError. The statement must be cancelled, because otherwise the server process would go on
    waiting, and keep its slot.
    """
    block_end, timeout_errors = Event(), list[OpenTransactionsError]()

    def watch() -> None:
        is_logged, start_time = False, time.monotonic()
        while not block_end.wait(POLL_SECONDS):
            message, transactions = "", list[str]()
            with suppress(SourceError):  # If no second session can be opened, the statement goes on waiting.
                message, transactions = _find_awaited_transactions(source, session)
            if not transactions:
                continue
            if max_wait_seconds is not None and time.monotonic() - start_time >= max_wait_seconds:
                timeout_errors.append(OpenTransactionsError(message, transactions))
                session.cancel_safe()
                return
            if not is_logged and time.monotonic() - start_time >= LOG_SECONDS:
                _LOGGER.warning("%s", message)
                is_logged = True

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except (SourceError, psycopg.Error):
        if timeout_errors:
            raise timeout_errors[0] from None
        raise
    finally:
        block_end.set()
        watcher.join()


def _find_awaited_transactions(source: "Source", session: psycopg.Connection[Any]) -> tuple[str, list[str]]:
    """A message about the transactions that a session waits for, and their virtual transaction ids."""
    with source.connect() as connection:
        rows = connection.execute(_AWAITED_TRANSACTIONS_QUERY, [session.info.backend_pid]).fetchall()
    return _format_wait_message(source, rows), [row[1] for row in rows]


def _format_wait_message(source: "Source", rows: Sequence[tuple[Any, ...]]) -> str:
    holders = ", ".join(dict.fromkeys(map(_format_holder, rows)))
    return f'source "{source.name}": waits for open transactions: {holders}'


def _format_holder(row: tuple[Any, ...]) -> str:
    _, _, pid, database, application, gid, start_time = row
    if gid is not None:
        return f'prepared transaction "{gid}" of database "{database}", since {start_time}'
    return f'server process {pid} ("{application or ""}" in database "{database}", since {start_time or "unknown"})'


def find_exclusively_locked_tables(connection: psycopg.Connection[Any]) -> dict[int, str]:
    """Find the tables of the database that cannot be read now. Maps the oid of each to a text for messages.

    The text names the sessions and prepared transactions that lock the table exclusively, or wait to do so.
    """
    holders_by_table: dict[int, list[str]] = {}
    for row in connection.execute(_EXCLUSIVE_HOLDERS_QUERY).fetchall():
        holders_by_table.setdefault(row[0], []).append(_format_holder(row))
    return {relation: ", ".join(holders) for relation, holders in holders_by_table.items()}


def find_lock_error(source: "Source", relations: Collection[int]) -> OpenTransactionsError | None:
    """The error that names the sessions with exclusive locks on these relations (oids). None if none of them is locked."""
    with source.connect() as connection:
        rows = [row for row in connection.execute(_EXCLUSIVE_HOLDERS_QUERY).fetchall() if row[0] in relations]
    return (
        OpenTransactionsError(_format_wait_message(source, rows), [row[1] for row in rows]) if rows else None
    )


def are_transactions_open(source: "Source", transactions: Collection[str]) -> bool:
    """True if at least one of these transactions (virtual transaction ids) is still open."""
    with source.connect() as connection:
        row = connection.execute(_ARE_OPEN_QUERY, [list(transactions)]).fetchone()
    return bool(row and row[0])
