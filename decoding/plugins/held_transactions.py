"""A transaction that is kept until it commits or is prepared: its changes in, in their order out.

It serves output plugins that do not stream, or do not decode prepared transactions, as the server's own
reorder buffer does (src/backend/replication/logical/reorderbuffer.c). It keeps the bytes of each message in
memory, with the descriptions of its relations at that time. Raises only errors of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from pgsieve.decoding.protocol.messages import Delete, Insert, LogicalMessage, Truncate, Update, decode
from pgsieve.decoding.protocol.relations import PublishedRelation

HeldChange: TypeAlias = Insert | Update | Delete | Truncate | LogicalMessage


@dataclass(slots=True)
class HeldTransaction:
    """The changes of one transaction; `streamed` ones carry the transaction id of their subtransaction."""

    streamed: bool
    origin: str | None = None
    origin_lsn: int = 0
    _changes: list[tuple[bytes, tuple[PublishedRelation, ...]]] = field(default_factory=list)
    #: Where each subtransaction's changes begin; in the order of the changes.
    _first: dict[int, int] = field(default_factory=dict)

    def add(self, message: HeldChange, data: bytes, relations: tuple[PublishedRelation, ...]) -> None:
        """Keep the next change."""
        if message.xid is not None:
            self._first.setdefault(message.xid, len(self._changes))
        self._changes.append((data, relations))

    def abort(self, subxid: int) -> None:
        """Drop the changes of a subtransaction and of those within it: everything since its first change.

        A subtransaction without changes has nothing to drop (stream_abort_internal in worker.c).
        """
        start = self._first.get(subxid)
        if start is None:
            return
        del self._changes[start:]
        while self._first and next(reversed(self._first.values())) >= start:
            self._first.popitem()

    def changes(self) -> Iterator[tuple[HeldChange, tuple[PublishedRelation, ...]]]:
        """The remaining changes."""
        for data, relations in self._changes:
            message = decode(data, streaming=self.streamed)
            assert isinstance(message, HeldChange)
            yield message, relations
