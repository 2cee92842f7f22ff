"""Confirms a slot: by an advance, or by a status update of the streaming protocol if an advance would decode much WAL.

In: a slot, the LSN up to which its changes were written, and a function that makes these changes durable. Out:
the slot is confirmed up to the LSN, and releases WAL that it no longer needs. Raises SlotInUseError, SourceError,
and the errors of the function. After an error the slot stays as it was.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import end_copy, status_update
from pgsieve.resources.postgres.slot import advance, slot_state
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.stream import start_replication

#: An advance over less WAL than this takes about as long as a new session.
STREAMED_BYTES = 128 * 1024 * 1024


def confirm(
    connection: psycopg.Connection[Any],
    source: Source,
    slot: str,
    lsn: int,
    options: PgoutputOptions,
    make_durable: Callable[[], None],
) -> None:
    """Make all changes that commit before `lsn` durable, and confirm them; the slot never moves back.

    An advance decodes the WAL from restart_lsn to `lsn`. A status update decodes nothing: it moves
    confirmed_flush_lsn (LogicalConfirmReceivedLocation() in src/backend/replication/logical/logical.c), and
    restart_lsn stays until `release_wal`. If the server starts no walsender, the slot is advanced. A failover
    slot is always advanced, as only an advance waits for the standbys.
    """
    state = slot_state(connection, slot)
    if state is None or state.confirmed_lsn >= lsn:
        return
    make_durable()
    if lsn - state.restart_lsn >= STREAMED_BYTES and not state.failover:
        with (
            suppress(SourceError),
            source.connect(replication="database", cursor_factory=psycopg.ClientCursor) as walsender,
        ):
            start_replication(walsender, slot, lsn, options)
            walsender.pgconn.put_copy_data(status_update(lsn, lsn))
            end_copy(walsender.pgconn)
        state = slot_state(connection, slot)
    if state is not None and state.confirmed_lsn < lsn:
        advance(connection, source.name, slot, lsn)


def release_wal(connection: psycopg.Connection[Any], source: str, slot: str, confirmed: int) -> None:
    """Let the server remove as much as possible of the WAL before `confirmed`, the slot's position.

    The first advance moves restart_lsn only to the first record of running transactions that it passes. After
    the position is confirmed, a second advance to the same position moves restart_lsn to the last such record
    (LogicalIncreaseRestartDecodingForSlot in src/backend/replication/logical/logical.c). A third advance would
    change nothing.
    """
    advance(connection, source, slot, confirmed)


_RELEASABLE = """
select confirmed_flush_lsn - restart_lsn >= %s
   and catalog_xmin::text::bigint <> txid_snapshot_xmin(txid_current_snapshot()) %% 4294967296
  from pg_replication_slots where slot_name = %s and database = current_database()
"""


def can_release_wal(connection: psycopg.Connection[Any], slot: str, size: int) -> bool:
    """Whether the slot retains at least `size` bytes of confirmed WAL that it may no longer need.

    The slot's catalog_xmin is at most the oldest transaction that was in progress when the WAL was decoded. As
    long as this transaction is in progress, the slot needs the WAL.
    """
    return connection.execute(_RELEASABLE, [size, slot]).fetchone() == (True,)
