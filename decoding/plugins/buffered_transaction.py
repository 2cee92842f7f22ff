"""A transaction that is buffered until it commits or is prepared.

In: its changes. Out: the changes in order. It is for output plugins that do not stream, or do not decode
prepared transactions, like the server's reorder buffer (src/backend/replication/logical/reorderbuffer.c). It
keeps the bytes of each message in memory, with the descriptions of the relations at that time. Raises only
errors of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from pgsieve.decoding.protocol.messages import Delete, Insert, LogicalMessage, Truncate, Update, decode
from pgsieve.decoding.protocol.relations import PublishedRelation

BufferedChange: TypeAlias = Insert | Update | Delete | Truncate | LogicalMessage


@dataclass(slots=True)
class BufferedTransaction:
    """The changes of one transaction.

    Changes of a `streamed` one have the transaction id of their subtransaction.
    """

    streamed: bool
    origin: str | None = None
    origin_lsn: int = 0
    _changes: list[tuple[bytes, tuple[PublishedRelation, ...]]] = field(default_factory=list)
    #: The index of each subtransaction's first change, in the order of the changes.
    _first: dict[int, int] = field(default_factory=dict)

    def add(self, message: BufferedChange, data: bytes, relations: tuple[PublishedRelation, ...]) -> None:
        """Add the next change."""
        if message.xid is not None:
            self._first.setdefault(message.xid, len(self._changes))
        self._changes.append((data, relations))

    def abort(self, subxid: int) -> None:
        """Drop the changes of a subtransaction and of those within it: all changes since its first one.

        Nothing is dropped for a subtransaction without changes (stream_abort_internal in worker.c).
        """
        start = self._first.get(subxid)
        if start is None:
            return
        del self._changes[start:]
        while self._first and next(reversed(self._first.values())) >= start:
            self._first.popitem()

    def changes(self) -> Iterator[tuple[BufferedChange, tuple[PublishedRelation, ...]]]:
        """The remaining changes."""
        for data, relations in self._changes:
            message = decode(data, streaming=self.streamed)
            assert isinstance(message, BufferedChange)
            yield message, relations
