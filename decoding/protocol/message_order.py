"""Checks the order of the messages of one session: messages in, nothing out.

Raises ProtocolError for a message that may not come at its place: a change outside a transaction, a
transaction within another, the end of a transaction that is not open, a block of a stream that has not begun.
The error names the message and the place where it may come. PostgreSQL documentation 54.5, Logical Streaming
Replication Protocol. The rules are those that the server's own subscriber checks in
src/backend/replication/logical/worker.c, and further rules that pgoutput always keeps.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)

_OfTransaction: TypeAlias = Begin | BeginPrepare | Prepare | StreamStart | CommitPrepared | RollbackPrepared


class MessageOrder:
    """Follows the messages of one session."""

    __slots__ = ("_before", "_open", "_prepared", "_streams")

    def __init__(self) -> None:
        self._open: Begin | BeginPrepare | StreamStart | None = None
        self._before: Message | None = None
        #: Transactions that have begun and not ended, by their ids.
        self._streams: set[int] = set()
        self._prepared: set[int] = set()

    @property
    def block(self) -> int | None:
        """The streamed transaction in whose block the last message is, or None."""
        return self._open.xid if isinstance(self._open, StreamStart) else None

    def check(self, message: Message) -> None:
        """Check the session's next message."""
        match message:
            case Begin() | BeginPrepare() | StreamStart():
                self._begin(message)
            case Commit() | Prepare() | StreamStop():
                self._end(message)
            case StreamCommit() | StreamAbort() | StreamPrepare():
                self._end_stream(message)
            case CommitPrepared() | RollbackPrepared():
                self._expect_none_open(message)
                self._expect_new(message, self._streams)
                self._prepared.discard(message.xid)
            case Origin():
                first = not isinstance(self._before, StreamStart) or self._before.first_segment
                if self._before is not self._open or self._open is None or not first:
                    self._fail(message, "directly after the begin of a transaction")
            case LogicalMessage(transactional=False):
                self._expect_none_open(message)
            case _:
                if self._open is None:
                    self._fail(message, "within a transaction")
        self._before = message

    def _begin(self, message: Begin | BeginPrepare | StreamStart) -> None:
        self._expect_none_open(message)
        self._expect_new(message, self._prepared)
        if not isinstance(message, StreamStart) or message.first_segment:
            self._expect_new(message, self._streams)
        elif message.xid not in self._streams:
            self._fail(message, f"after the first block: the stream of {message.xid} has not begun")
        if isinstance(message, StreamStart):
            self._streams.add(message.xid)
        self._open = message

    def _end(self, message: Commit | Prepare | StreamStop) -> None:
        match message, self._open:
            case Commit(commit_lsn=lsn), Begin() as begun:
                agree = lsn == begun.final_lsn
            case Prepare(), BeginPrepare() as begun:
                ended = (message.prepare_lsn, message.end_lsn, message.xid, message.gid)
                agree = ended == (begun.prepare_lsn, begun.end_lsn, begun.xid, begun.gid)
            case StreamStop(), StreamStart():
                agree = True
            case Prepare(), None:
                # PostgreSQL 18 sends no Begin Prepare for a transaction that changed nothing and locked rows.
                self._expect_new(message, self._prepared | self._streams)
                agree = True
            case _:
                self._fail(message, "at the end of a transaction or block of its kind")
        if not agree:
            self._fail(message, "with the LSN and the transaction that its begin names")
        if isinstance(message, Prepare):
            self._prepared.add(message.xid)
        self._open = None

    def _end_stream(self, message: StreamCommit | StreamAbort | StreamPrepare) -> None:
        self._expect_none_open(message)
        if isinstance(message, StreamAbort):
            # The server also sends it after an abort that it noticed before it sent a block.
            if message.subxid == message.xid:
                self._streams.discard(message.xid)
            return
        if message.xid not in self._streams:
            self._fail(message, f"after a block: the stream of {message.xid} has not begun")
        self._streams.remove(message.xid)
        if isinstance(message, StreamPrepare):
            self._prepared.add(message.xid)

    def _expect_new(self, message: _OfTransaction, begun: set[int]) -> None:
        if message.xid in begun:
            self._fail(message, f"after the end of transaction {message.xid}, which has begun before")

    def _expect_none_open(self, message: Message) -> None:
        if self._open is not None:
            self._fail(
                message, f"after the end of the transaction or block that {type(self._open).__name__} began"
            )

    def _fail(self, message: Message, expected: str) -> NoReturn:
        raise ProtocolError(
            f"unexpected {type(message).__name__} message: it comes {expected}", sqlstate=PROTOCOL_VIOLATION
        )
