"""A temporary copy of a slot, so that a second session reads the later part of the slot in parallel with the first.

In: a slot that no process moves meanwhile, an LSN, and a peek. Out: the messages of the transactions that
commit from that LSN on. Only one session at a time can read a slot, and it decodes on one core. A copy begins
at the slot's position (pg_copy_logical_replication_slot; PostgreSQL documentation, Replication Management
Functions). An advance moves the copy to the LSN, for which the server decodes the WAL without output. After the
advance the copy is read like any slot. It ends with its session.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import adbc_driver_manager
import psycopg
import pyarrow as pa

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.sessions import Conninfo, PasswordCommandError
from pgsieve.resources.postgres.slot import message_batches
from pgsieve.resources.postgres.source import literal

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor

#: With fewer spare slots no copy is made, since the server might then refuse another client's slot, or the
#: slot of an exported snapshot.
_SPARE_SLOTS = 2


class CopyRefusedError(Exception):
    """The server does not advance the copy, so the changes have to be read from the slot itself."""


def has_spare_slots(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has spare slots (max_replication_slots). Slots of REPACK have their own limit, and do not count."""
    row = connection.execute(
        "select current_setting('max_replication_slots')::int - count(*) from pg_replication_slots"
        " where plugin is distinct from 'pgrepack'"
    ).fetchone()
    assert row is not None
    return int(row[0]) >= _SPARE_SLOTS


class SlotCopy:
    """A copy of a slot in its own session. One thread reads it, and another thread may stop the reader."""

    def __init__(self, cursor: "Cursor", name: str) -> None:
        self._cursor, self._name = cursor, name

    def read(self, begin: int, query: Callable[[str], str]) -> Iterator[pa.RecordBatch]:
        """The batches (column data) of a peek from `begin` on; `query` returns the peek of the slot with a given name.

        Raises CopyRefusedError before the first batch, and ADBC's errors later.
        """
        try:
            _call(
                self._cursor,
                f"pg_replication_slot_advance({literal(self._name)}, {literal(format_lsn(begin))})",
            )
        except adbc_driver_manager.Error as error:
            raise CopyRefusedError(str(error)) from None
        yield from message_batches(self._cursor, query(self._name))

    def stop(self) -> None:
        """Cancel the running query, if there is one; then `read` raises."""
        with suppress(adbc_driver_manager.Error):
            self._cursor.adbc_cancel()


@contextmanager
def copy_slot(conninfo: Conninfo, slot: str) -> Iterator[SlotCopy | None]:
    """Yield a copy of a slot for the block; None if no session can be opened, or the server refuses to copy."""
    name = f"pgsieve_copy_{uuid.uuid4().hex[:16]}"
    with ExitStack() as stack:
        copy = None
        try:
            # The transaction stays open: if this process dies, a pooler ends a session only in a transaction. The
            # copy ends with the session.
            cursor = stack.enter_context(stack.enter_context(conninfo.connect_adbc()).cursor())
            _call(cursor, f"pg_copy_logical_replication_slot({literal(slot)}, {literal(name)}, true)")
            copy = SlotCopy(cursor, name)
        except (adbc_driver_manager.Error, PasswordCommandError):
            stack.close()
        yield copy


def _call(cursor: "Cursor", function: str) -> None:
    """Call a function, and fetch its result: only then does ADBC raise the function's error."""
    cursor.execute(f"select {function}::text")
    cursor.fetchall()
