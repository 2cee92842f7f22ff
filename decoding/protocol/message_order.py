"""Checks the order of the messages of one session.

Raises ProtocolError for the messages below. The error says where a message of this type would be allowed.

- a change outside a transaction
- the beginning of a transaction inside another transaction
- the end of a transaction that is not open
- a later block of a streamed transaction whose first block has not come

PostgreSQL's subscriber checks some of these rules, too (src/backend/replication/logical/worker.c). It does not
check the others, but pgoutput always follows them.

PostgreSQL documentation, Logical Streaming Replication Protocol.
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

_TransactionMessage: TypeAlias = (
    Begin | BeginPrepare | Prepare | StreamStart | CommitPrepared | RollbackPrepared
)


class MessageOrder:
    """Checks the messages of one session, one after the other."""

    __slots__ = ("_open_message", "_prepared_xids", "_previous_message", "_stream_xids")

    def __init__(self) -> None:
        self._open_message: Begin | BeginPrepare | StreamStart | None = None
        self._previous_message: Message | None = None
        #: The xids of streamed transactions, and of prepared transactions, that have begun and not ended.
        self._stream_xids: set[int] = set()
        self._prepared_xids: set[int] = set()

    @property
    def block_xid(self) -> int | None:
        """The xid of the streamed transaction whose block is open, or None."""
        return self._open_message.xid if isinstance(self._open_message, StreamStart) else None

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
                self._expect_not_begun(message, self._stream_xids)
                self._prepared_xids.discard(message.xid)
            case Origin():
                is_first = (
                    not isinstance(self._previous_message, StreamStart)
                    or self._previous_message.first_segment
                )
                if (
                    self._previous_message is not self._open_message
                    or self._open_message is None
                    or not is_first
                ):
                    self._fail(message, "directly after the begin of a transaction")
            case LogicalMessage(transactional=False):
                self._expect_none_open(message)
            case _:
                if self._open_message is None:
                    self._fail(message, "within a transaction")
        self._previous_message = message

    def _begin(self, message: Begin | BeginPrepare | StreamStart) -> None:
        self._expect_none_open(message)
        self._expect_not_begun(message, self._prepared_xids)
        if not isinstance(message, StreamStart) or message.first_segment:
            self._expect_not_begun(message, self._stream_xids)
        elif message.xid not in self._stream_xids:
            self._fail(message, f"after the first block of transaction {message.xid}, which has not come")
        if isinstance(message, StreamStart):
            self._stream_xids.add(message.xid)
        self._open_message = message

    def _end(self, message: Commit | Prepare | StreamStop) -> None:
        match message, self._open_message:
            case Commit(commit_lsn=lsn), Begin() as begin_message:
                is_match = lsn == begin_message.final_lsn
            case Prepare(), BeginPrepare() as begin_message:
                prepare_fields = (message.prepare_lsn, message.end_lsn, message.xid, message.gid)
                is_match = prepare_fields == (
                    begin_message.prepare_lsn,
                    begin_message.end_lsn,
                    begin_message.xid,
                    begin_message.gid,
                )
            case StreamStop(), StreamStart():
                is_match = True
            case Prepare(), None:
                # PostgreSQL 18 sends no Begin Prepare for some transactions that changed nothing, for example one that
                # only locked rows.
                self._expect_not_begun(message, self._prepared_xids | self._stream_xids)
                is_match = True
            case _:
                self._fail(message, "to end an open transaction or block of its kind")
        if not is_match:
            self._fail(message, "with the LSN and the transaction of its begin message")
        if isinstance(message, Prepare):
            self._prepared_xids.add(message.xid)
        self._open_message = None

    def _end_stream(self, message: StreamCommit | StreamAbort | StreamPrepare) -> None:
        self._expect_none_open(message)
        if isinstance(message, StreamAbort):
            # The stream may be unknown: the server also sends Stream Abort for a transaction without any block.
            if message.subxid == message.xid:
                self._stream_xids.discard(message.xid)
            return
        if message.xid not in self._stream_xids:
            self._fail(message, f"after a block of transaction {message.xid}, and none has come")
        self._stream_xids.remove(message.xid)
        if isinstance(message, StreamPrepare):
            self._prepared_xids.add(message.xid)

    def _expect_not_begun(self, message: _TransactionMessage, begun_xids: set[int]) -> None:
        if message.xid in begun_xids:
            self._fail(message, f"after the end of transaction {message.xid}, which is still open")

    def _expect_none_open(self, message: Message) -> None:
        if self._open_message is not None:
            self._fail(
                message,
                f"after the end of the transaction or block that {type(self._open_message).__name__} began",
            )

    def _fail(self, message: Message, place: str) -> NoReturn:
        raise ProtocolError(
            f"unexpected {type(message).__name__} message: it may come only {place}",
            sqlstate=PROTOCOL_VIOLATION,
        )
