"""Buffers a transaction in memory until it commits or is prepared.

In: the messages of the transaction's changes. Each comes with its relations as they were last described before the
change. Out: the changes that were not aborted, in order. Raises the errors of
`pgsieve.decoding.protocol.messages.decode`.

For output plugins without streaming or two-phase commit, the class does what the server's reorder buffer does
(src/backend/replication/logical/reorderbuffer.c).
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
    """The changes of one transaction. In a streamed transaction each change has the xid of its subtransaction."""

    is_streamed: bool
    origin: str | None = None
    origin_lsn: int = 0
    _changes: list[tuple[bytes, tuple[PublishedRelation, ...]]] = field(default_factory=list)
    #: Maps the xid of a subtransaction to the index of its first change. The indexes ascend.
    _first_change_index_by_xid: dict[int, int] = field(default_factory=dict)

    def add(self, message: BufferedChange, data: bytes, relations: tuple[PublishedRelation, ...]) -> None:
        """Add the next change."""
        if message.xid is not None:
            self._first_change_index_by_xid.setdefault(message.xid, len(self._changes))
        self._changes.append((data, relations))

    def abort(self, subxid: int) -> None:
        """Drop all changes since the first one of a subtransaction (stream_abort_internal in worker.c)."""
        first_index = self._first_change_index_by_xid.get(subxid)
        if first_index is None:
            return
        del self._changes[first_index:]
        while (
            self._first_change_index_by_xid
            and next(reversed(self._first_change_index_by_xid.values())) >= first_index
        ):
            self._first_change_index_by_xid.popitem()

    def decode_changes(self) -> Iterator[tuple[BufferedChange, tuple[PublishedRelation, ...]]]:
        """Decode and yield the remaining changes."""
        for data, relations in self._changes:
            message = decode(data, streaming=self.is_streamed)
            assert isinstance(message, BufferedChange)
            yield message, relations
