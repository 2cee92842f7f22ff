"""A temporary copy of a slot: a second session reads the later part of what the slot holds, beside the first.

In: a slot that nobody moves meanwhile, an LSN, and a peek. Out: the messages of what commits from there on. A slot is read by one
session at a time, which decodes on one core. A copy of it begins where the slot is (pg_copy_logical_replication_slot, section 9.28.6).
Moved to the LSN, for which the server decodes without output, it is read like any slot.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import adbc_driver_manager
import psycopg
import pyarrow as pa

from pgsieve.decoding.lsn import format_lsn
from pgsieve.resources.postgres.sessions import Conninfo
from pgsieve.resources.postgres.slot import batches_of
from pgsieve.resources.postgres.source import literal

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor

#: With fewer slots to spare none is copied: somebody else's, or the snapshot of a table, would be refused for it.
_SPARE_SLOTS = 2


class CopyRefusedError(Exception):
    """The server has no session to spare, makes no copy of the slot, or cannot move it: all has to be read from the slot itself."""


def has_spare_slots(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has slots to spare (max_replication_slots, section 19.6.1)."""
    row = connection.execute(
        "select current_setting('max_replication_slots')::int - count(*) from pg_replication_slots"
    ).fetchone()
    assert row is not None
    return int(row[0]) >= _SPARE_SLOTS


class SlotCopy:
    """What a slot holds from an LSN on, read by a session of its own, which another thread may stop."""

    def __init__(self, conninfo: Conninfo, slot: str, begin: int) -> None:
        self._conninfo, self._slot, self._begin = conninfo, slot, begin
        self._name = f"pgsieve_copy_{uuid.uuid4().hex[:16]}"
        self._cursor: Cursor | None = None

    def read(self, query: Callable[[str], str]) -> Iterator[pa.RecordBatch]:
        """The batches (data) of a peek, which `query` makes of a slot's name.

        Raises CopyRefusedError before the first batch, afterwards what ADBC raises. With the session the copy ends, too.
        """
        made = f"pg_copy_logical_replication_slot({literal(self._slot)}, {literal(self._name)}, true)"
        moved = f"pg_replication_slot_advance({literal(self._name)}, {literal(format_lsn(self._begin))})"
        # In one transaction: a pooler does not keep a session that is left within one, and the copy with it.
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(self._conninfo.adbc())
                self._cursor = cursor = stack.enter_context(connection.cursor())
                for function in (made, moved):
                    cursor.execute(f"select {function}::text")
            except adbc_driver_manager.Error as error:
                raise CopyRefusedError(str(error)) from None
            yield from batches_of(cursor, query(self._name))

    def stop(self) -> None:
        """Cancel the query that runs, if one does: `read` raises then."""
        if self._cursor is not None:
            with suppress(adbc_driver_manager.Error):
                self._cursor.adbc_cancel()
