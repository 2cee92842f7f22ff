"""Makes a temporary copy of a slot, so that a second session can read the later part of the slot's changes.

A slot can be read by only one session at a time, which decodes on one core. With a copy of the slot, two sessions read
at the same time. A copy begins at the position of its slot (pg_copy_logical_replication_slot; PostgreSQL documentation,
Replication Management Functions). An advance moves the copy to the LSN where the later part begins. For this the server
decodes the WAL before the LSN, but produces no messages, which is faster. After the advance the copy is read like any
slot. It ends with its session.

In: - a slot, which no other process may move meanwhile
    - an LSN
    - a peek (a query that reads a slot without confirming anything)
Out: the messages of the transactions that commit from this LSN on.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import adbc_driver_manager
import psycopg
import pyarrow as pa

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.password_command import PasswordCommandError
from pgsieve.resources.postgres.peeks import fetch_message_batches
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.source import quote_literal

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor

#: The number of free slots that the server must have before a copy is made: one for the copy, and one that another
#: client may need, for example for an exported snapshot.
_SPARE_SLOTS = 2


class CopyRefusedError(Exception):
    """The server does not advance the copy, so the changes must be read from the slot itself."""


def has_spare_slots(connection: psycopg.Connection[Any]) -> bool:
    """True if the server has enough free slots (setting max_replication_slots).

    Slots of REPACK have a limit of their own, so they are not counted.
    """
    row = connection.execute(
        "select current_setting('max_replication_slots')::int - count(*) from pg_replication_slots"
        " where plugin is distinct from 'pgrepack'"
    ).fetchone()
    assert row is not None
    return int(row[0]) >= _SPARE_SLOTS


class SlotCopy:
    """A copy of a slot, with its own session. One thread reads the copy; another thread may stop that thread."""

    def __init__(self, cursor: "Cursor", name: str) -> None:
        self._cursor, self._name = cursor, name

    def read_batches(self, begin_lsn: int, build_query: Callable[[str], str]) -> Iterator[pa.RecordBatch]:
        """Advance the copy to `begin_lsn`, and yield the batches (column `data`) of a peek from there.

        `build_query` takes the name of a slot, and returns the peek of this slot. Raises CopyRefusedError before the
        first batch, and ADBC's errors later.
        """
        try:
            _call_function(
                self._cursor,
                f"pg_replication_slot_advance({quote_literal(self._name)}, {quote_literal(format_lsn(begin_lsn))})",
            )
        except adbc_driver_manager.Error as error:
            raise CopyRefusedError(str(error)) from None
        yield from fetch_message_batches(self._cursor, build_query(self._name))

    def cancel_query(self) -> None:
        """Cancel the query that is running. `read_batches` then raises an error. Does nothing if no query is running."""
        with suppress(adbc_driver_manager.Error):
            self._cursor.adbc_cancel()


@contextmanager
def copy_slot(conninfo: Conninfo, slot: str) -> Iterator[SlotCopy | None]:
    """Yield a copy of a slot for the block; None if no session can be opened, or the server refuses to copy."""
    name = f"pgsieve_copy_{uuid.uuid4().hex[:16]}"
    with ExitStack() as stack:
        copy = None
        try:
            # The transaction stays open. If this process dies, a pooler then ends the session, and with it the copy of
            # the slot. Without a transaction, a pooler would keep the session.
            cursor = stack.enter_context(stack.enter_context(conninfo.connect_adbc()).cursor())
            _call_function(
                cursor,
                f"pg_copy_logical_replication_slot({quote_literal(slot)}, {quote_literal(name)}, true)",
            )
            copy = SlotCopy(cursor, name)
        except (adbc_driver_manager.Error, PasswordCommandError):
            stack.close()
        yield copy


def _call_function(cursor: "Cursor", function: str) -> None:
    """Call a function, and fetch its result. ADBC raises an error of the function only when the result is fetched."""
    cursor.execute(f"select {function}::text")
    cursor.fetchall()
