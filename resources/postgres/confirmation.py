"""Confirms a slot: by a status update of the streaming protocol where an advance would decode much WAL.

In: a slot, the LSN up to which its changes were written, and a function that makes them durable. Out: the
slot, confirmed up to that LSN. Raises SlotInUseError, SourceError, and the errors of that function; after an
error the slot stays as it was.
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

#: An advance that decodes less WAL than this takes about as long as opening a session.
STREAMED_BYTES = 128 * 1024 * 1024


def confirm(
    connection: psycopg.Connection[Any],
    source: Source,
    slot: str,
    lsn: int,
    options: PgoutputOptions,
    make_durable: Callable[[], None],
) -> None:
    """Confirm everything that commits before `lsn`, once it is durable; the slot never moves back.

    An advance decodes from restart_lsn up to there. A status update moves confirmed_flush_lsn and decodes
    nothing (LogicalConfirmReceivedLocation() in src/backend/replication/logical/logical.c); restart_lsn
    stays, until `release_wal`. The slot is advanced where the server starts no walsender. A failover slot is
    advanced too, as only an advance waits for the standbys.
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
    advance(connection, source.name, slot, lsn)
