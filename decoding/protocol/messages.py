"""Decodes and encodes pgoutput's messages of protocol versions 1 to 4.

In: the bytes of one message. Out: its dataclass. `encode` does the reverse: `encode(decode(data)) == data` and
`decode(encode(message)) == message`. Every byte is checked. Wrong bytes raise ProtocolError and no other error.

The bytes of a message do not show two facts: whether the message lies between Stream Start and Stream Stop, and
whether the session requested streaming = parallel. So the caller of `decode` passes both. `Decoder` decodes the
messages of one session in order, and finds out the first fact from the messages themselves.

PostgreSQL documentation, Logical Replication Message Formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, get_args

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION, Cursor
from pgsieve.decoding.binary.writer import Writer
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.change_messages import (
    Delete,
    Insert,
    LogicalMessage,
    Relation,
    RelationColumn,
    Truncate,
    Type,
    Update,
)
from pgsieve.decoding.protocol.transaction_messages import (
    AbortInfo,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from pgsieve.decoding.protocol.tuple_data import (
    NULL,
    UNCHANGED,
    Binary,
    ColumnValue,
    Null,
    OldKey,
    OldRow,
    Text,
    TupleData,
    Unchanged,
)

__all__ = [
    "NULL",
    "UNCHANGED",
    "AbortInfo",
    "Begin",
    "BeginPrepare",
    "Binary",
    "ChangeMessage",
    "ColumnValue",
    "Commit",
    "CommitPrepared",
    "Decoder",
    "Delete",
    "Insert",
    "LogicalMessage",
    "Message",
    "Null",
    "OldKey",
    "OldRow",
    "Origin",
    "Prepare",
    "Relation",
    "RelationColumn",
    "RollbackPrepared",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Text",
    "TransactionMessage",
    "Truncate",
    "TupleData",
    "Type",
    "Unchanged",
    "Update",
    "decode",
    "encode",
    "timestamp_from_unix_micros",
    "timestamp_to_unix_micros",
]

ChangeMessage: TypeAlias = Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage
TransactionMessage: TypeAlias = (
    Begin
    | Commit
    | Origin
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
Message: TypeAlias = ChangeMessage | TransactionMessage

_CHANGE_READERS: dict[int, Callable[[Cursor, int | None], ChangeMessage]] = {
    Relation.tag: Relation.read,
    Type.tag: Type.read,
    Insert.tag: Insert.read,
    Update.tag: Update.read,
    Delete.tag: Delete.read,
    Truncate.tag: Truncate.read,
    LogicalMessage.tag: LogicalMessage.read,
}
_TRANSACTION_READERS: dict[int, Callable[[Cursor], TransactionMessage]] = {
    Begin.tag: Begin.read,
    Commit.tag: Commit.read,
    Origin.tag: Origin.read,
    StreamStart.tag: StreamStart.read,
    StreamStop.tag: StreamStop.read,
    StreamCommit.tag: StreamCommit.read,
    StreamAbort.tag: StreamAbort.read,
    BeginPrepare.tag: BeginPrepare.read,
    Prepare.tag: Prepare.read,
    CommitPrepared.tag: CommitPrepared.read,
    RollbackPrepared.tag: RollbackPrepared.read,
    StreamPrepare.tag: StreamPrepare.read,
}
_PARALLEL_TRANSACTION_READERS = _TRANSACTION_READERS | {StreamAbort.tag: StreamAbort.read_parallel}
_NAME_BY_TAG: dict[int, str] = {kind.tag: kind.__name__ for kind in get_args(Message)}

_POSTGRES_EPOCH_MICROS = 946_684_800_000_000
"""2000-01-01 00:00 UTC in Unix time: POSTGRES_EPOCH_JDATE, src/include/datatype/timestamp.h."""


def decode(
    data: bytes | bytearray | memoryview, *, streaming: bool = False, parallel: bool = False
) -> Message:
    """Decode one message.

    `streaming` says that the message lies between Stream Start and Stream Stop, where changes have a
    transaction id. `parallel` says that the session requested streaming = parallel, so Stream Abort has an
    LSN and a time.
    """
    octets = bytes(data)  # This copies the data only if it is not of type bytes.
    if not octets:
        raise ProtocolError(
            "malformed message at offset 0: expected a message type byte, but 0 bytes remain",
            sqlstate=PROTOCOL_VIOLATION,
        )
    tag = octets[0]
    cursor = Cursor(octets, _NAME_BY_TAG.get(tag, "pgoutput"), offset=1)
    message: Message
    if tag in _CHANGE_READERS:
        xid = cursor.valid_xid("xid of the streamed transaction") if streaming else None
        message = _CHANGE_READERS[tag](cursor, xid)
    elif tag in _TRANSACTION_READERS:
        message = (_PARALLEL_TRANSACTION_READERS if parallel else _TRANSACTION_READERS)[tag](cursor)
    else:
        cursor.fail(
            f"a message type byte of {bytes(sorted(_NAME_BY_TAG)).decode()}, not 0x{tag:02x}", bytes_before=1
        )
    cursor.expect_end()
    return message


def encode(message: Message) -> bytes:
    """Encode one message.

    A change with an `xid` is encoded as it is between Stream Start and Stream Stop: with the transaction id after
    the type byte.
    """
    writer = Writer(type(message).__name__)
    writer.u8(message.tag, "message type byte")
    if isinstance(message, ChangeMessage) and message.xid is not None:
        writer.valid_xid(message.xid, "xid of the streamed transaction")
    message.write(writer)
    return writer.getvalue()


class Decoder:
    """Decodes the messages of one session in order, and tracks whether a streamed block is open.

    After Stream Start, `decode` accepts only changes and an Origin until Stream Stop (PostgreSQL documentation,
    Logical Streaming Replication Protocol).
    """

    __slots__ = ("_parallel", "_streaming")

    def __init__(self, *, parallel: bool = False) -> None:
        self._parallel = parallel
        self._streaming = False

    @property
    def streaming(self) -> bool:
        """Whether the next message lies between Stream Start and Stream Stop."""
        return self._streaming

    def decode(self, data: bytes | bytearray | memoryview) -> Message:
        """Decode the session's next message."""
        message = decode(data, streaming=self._streaming, parallel=self._parallel)
        is_allowed_inside = isinstance(message, StreamStop | Origin | ChangeMessage)
        is_allowed_outside = not isinstance(message, StreamStop)
        if not (is_allowed_inside if self._streaming else is_allowed_outside):
            place = "inside" if self._streaming else "outside"
            raise ProtocolError(
                f"unexpected {type(message).__name__} message {place} a streamed block",
                sqlstate=PROTOCOL_VIOLATION,
            )
        if isinstance(message, StreamStart | StreamStop):
            self._streaming = isinstance(message, StreamStart)
        return message


def timestamp_to_unix_micros(timestamp: int) -> int:
    """Convert a time of a message, in microseconds since 2000-01-01 UTC, to microseconds since 1970-01-01 UTC."""
    return timestamp + _POSTGRES_EPOCH_MICROS


def timestamp_from_unix_micros(micros: int) -> int:
    """Convert microseconds since 1970-01-01 UTC to microseconds since 2000-01-01 UTC."""
    return micros - _POSTGRES_EPOCH_MICROS
