"""Confirms a slot: tells the server that all changes up to an LSN are safely stored in the lake.

In: - a slot
    - the LSN up to which the changes of the slot were written to the lake
    - a function that makes these changes durable
Out: the slot is confirmed up to the LSN, and the server can remove WAL that the slot no longer needs.

A slot is confirmed by pg_replication_slot_advance(). If this function would have to decode much WAL, the slot is
confirmed by a status update of the streaming replication protocol instead.

Raises SlotInUseError, SourceError, and the errors of the given function. After an error the slot is unchanged, or
possibly confirmed if the connection was lost before the server's answer.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg

from pgsieve.resources.postgres.errors import SourceError
from pgsieve.resources.postgres.plugin_options import PgoutputOptions
from pgsieve.resources.postgres.receiver import encode_status_update, end_copy
from pgsieve.resources.postgres.slot import advance_slot, read_slot_state
from pgsieve.resources.postgres.source import Source
from pgsieve.resources.postgres.stream import start_replication

#: From this many bytes of WAL on, a status update is faster than an advance. An advance over less WAL takes about
#: as long as opening the new session that a status update needs.
STATUS_UPDATE_MIN_BYTES = 128 * 1024 * 1024


def confirm(
    connection: psycopg.Connection[Any],
    source: Source,
    slot: str,
    lsn: int,
    options: PgoutputOptions,
    make_durable: Callable[[], None],
) -> None:
    """Make all changes that commit before `lsn` durable, and confirm them. The slot never moves back.

    An advance decodes the WAL from the slot's restart_lsn to `lsn`. A status update decodes nothing. It moves only
    confirmed_flush_lsn (LogicalConfirmReceivedLocation() in src/backend/replication/logical/logical.c);
    `release_wal` moves restart_lsn at a later time. If the server starts no walsender (the server process that a status
    update needs), the slot is advanced. A failover slot is always advanced, because only an advance waits for the
    standbys.
    """
    state = read_slot_state(connection, slot)
    if state is None or state.confirmed_lsn >= lsn:
        return
    make_durable()
    if lsn - state.restart_lsn >= STATUS_UPDATE_MIN_BYTES and not state.has_failover:
        with (
            suppress(SourceError),
            source.connect(replication="database", cursor_factory=psycopg.ClientCursor) as walsender,
        ):
            start_replication(walsender, slot, lsn, options)
            walsender.pgconn.put_copy_data(encode_status_update(lsn, lsn))
            end_copy(walsender.pgconn)
        state = read_slot_state(connection, slot)
    if state is not None and state.confirmed_lsn < lsn:
        advance_slot(connection, source.name, slot, lsn)


def release_wal(connection: psycopg.Connection[Any], source_name: str, slot: str, confirmed_lsn: int) -> None:
    """Let the server remove as much WAL before `confirmed_lsn`, the slot's position, as possible.

    The first advance, in `confirm`, moves restart_lsn only to the first record of running transactions that it
    passes. A second advance to the same position, after this position is confirmed, moves restart_lsn to the last
    record of running transactions (LogicalIncreaseRestartDecodingForSlot in
    src/backend/replication/logical/logical.c). A third advance would change nothing.
    """
    advance_slot(connection, source_name, slot, confirmed_lsn)


#: True if the slot retains this many bytes of confirmed WAL, and the transaction of its catalog_xmin is no longer the
#: oldest one in progress.
_CAN_RELEASE_QUERY = """
select confirmed_flush_lsn - restart_lsn >= %s
   and catalog_xmin::text::bigint <> txid_snapshot_xmin(txid_current_snapshot()) %% 4294967296
  from pg_replication_slots where slot_name = %s and database = current_database()
"""


def can_release_wal(connection: psycopg.Connection[Any], slot: str, min_bytes: int) -> bool:
    """True if the slot retains at least `min_bytes` bytes of confirmed WAL that it may no longer need.

    The oldest transaction in progress when the WAL was decoded has the slot's catalog_xmin or a later xid. While it is in
    progress, the slot still needs the WAL.
    """
    return connection.execute(_CAN_RELEASE_QUERY, [min_bytes, slot]).fetchone() == (True,)
