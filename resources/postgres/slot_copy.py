"""A temporary copy of a slot: a second session reads the later part of the slot in parallel with the first.

In: a slot that no process moves meanwhile, an LSN, and a peek. Out: the messages of what commits from there
on. One session at a time reads a slot, and decodes on one core. A copy begins where the slot is
(pg_copy_logical_replication_slot, section 9.28.6). It is advanced to the LSN, for which the server decodes
without output, and then read like any slot. It ends with its session.
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
from pgsieve.resources.postgres.slot import batches_of
from pgsieve.resources.postgres.source import literal

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Cursor

#: With fewer spare slots none is copied: another client's slot, or a table's snapshot, would be refused
#: instead.
_SPARE_SLOTS = 2


class CopyRefusedError(Exception):
    """The server does not advance the copy: its changes have to be read from the slot itself."""


def has_spare_slots(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has spare slots (max_replication_slots, section 19.6.1).

    Those of REPACK are counted apart.
    """
    row = connection.execute(
        "select current_setting('max_replication_slots')::int - count(*) from pg_replication_slots"
        " where plugin is distinct from 'pgrepack'"
    ).fetchone()
    assert row is not None
    return int(row[0]) >= _SPARE_SLOTS


class SlotCopy:
    """A copy of a slot in a session of its own: one thread reads it, and another one may stop it."""

    def __init__(self, cursor: "Cursor", name: str) -> None:
        self._cursor, self._name = cursor, name

    def read(self, begin: int, query: Callable[[str], str]) -> Iterator[pa.RecordBatch]:
        """The batches (data) of a peek from `begin` on; `query` makes the peek from a slot's name.

        Raises CopyRefusedError before the first batch, later ADBC's errors.
        """
        try:
            _call(
                self._cursor,
                f"pg_replication_slot_advance({literal(self._name)}, {literal(format_lsn(begin))})",
            )
        except adbc_driver_manager.Error as error:
            raise CopyRefusedError(str(error)) from None
        yield from batches_of(self._cursor, query(self._name))

    def stop(self) -> None:
        """Cancel the running query, if there is one: `read` raises then."""
        with suppress(adbc_driver_manager.Error):
            self._cursor.adbc_cancel()


@contextmanager
def copied_slot(conninfo: Conninfo, slot: str) -> Iterator[SlotCopy | None]:
    """A copy of a slot for the block; None where there is no session for it, or the server creates none."""
    name = f"pgsieve_copy_{uuid.uuid4().hex[:16]}"
    with ExitStack() as stack:
        copy = None
        try:
            # Its transaction stays open: a pooler ends a session that is left within one, and the copy with
            # it.
            cursor = stack.enter_context(stack.enter_context(conninfo.adbc()).cursor())
            _call(cursor, f"pg_copy_logical_replication_slot({literal(slot)}, {literal(name)}, true)")
            copy = SlotCopy(cursor, name)
        except (adbc_driver_manager.Error, PasswordCommandError):
            stack.close()
        yield copy


def _call(cursor: "Cursor", function: str) -> None:
    """Call a function; the result has to be fetched, as an error comes with it."""
    cursor.execute(f"select {function}::text")
    cursor.fetchall()
