"""Envelopes: the contents of the CopyData messages in which a replication connection carries pgoutput's messages.

In: the bytes of one envelope. Out: XLogData, PrimaryKeepalive, StandbyStatusUpdate or OtherEnvelope.
`encode_envelope` does the reverse. `xlog_data_columns` turns many XLogData into columns. Raises ProtocolError.

The type bytes of envelopes and of pgoutput's messages are independent. For example 'r' is a StandbyStatusUpdate
here, and a Rollback Prepared among pgoutput's messages.

PostgreSQL documentation, Streaming Replication Protocol, START_REPLICATION;
src/backend/replication/walreceiver.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION, Cursor
from pgsieve.decoding.binary.octets import Octets
from pgsieve.decoding.binary.writer import Writer
from pgsieve.decoding.errors import ProtocolError

_REPLY_REQUESTED = 1

XLOG_DATA_HEADER_BYTES = 25
"""The number of bytes before pgoutput's message in XLogData. All other envelopes from a server are shorter."""


@dataclass(frozen=True, slots=True)
class XLogData:
    """An envelope from the server with one message of the output plugin.

    `data_start` and `wal_end` are both the position of this message in the WAL.
    """

    tag: ClassVar[int] = ord("w")

    data_start: int
    wal_end: int
    send_time: int
    data: bytes

    @classmethod
    def read(cls, cursor: Cursor) -> XLogData:
        """Read the bytes after the type byte."""
        data_start, wal_end = cursor.u64("start of the data"), cursor.u64("end of WAL")
        send_time = cursor.i64("send time")
        return cls(data_start, wal_end, send_time, cursor.byten(cursor.remaining, "data"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u64(self.data_start, "start of the data")
        writer.u64(self.wal_end, "end of WAL")
        writer.i64(self.send_time, "send time")
        writer.byten(self.data)


@dataclass(frozen=True, slots=True)
class PrimaryKeepalive:
    """An envelope from the server with its position in the WAL.

    `reply_requested` says that the server wants a StandbyStatusUpdate immediately.
    """

    tag: ClassVar[int] = ord("k")

    wal_end: int
    send_time: int
    reply_requested: bool

    @classmethod
    def read(cls, cursor: Cursor) -> PrimaryKeepalive:
        """Read the bytes after the type byte."""
        wal_end, send_time = cursor.u64("end of WAL"), cursor.i64("send time")
        return cls(wal_end, send_time, bool(cursor.flags("reply request", allowed=_REPLY_REQUESTED)))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u64(self.wal_end, "end of WAL")
        writer.i64(self.send_time, "send time")
        writer.u8(_REPLY_REQUESTED if self.reply_requested else 0, "reply request")


@dataclass(frozen=True, slots=True)
class StandbyStatusUpdate:
    """An envelope from the client: up to which LSNs it has written, flushed and applied the WAL.

    `flushed_lsn` is the end LSN of the last commit that the client has stored durably. The slot does not send it again.
    """

    tag: ClassVar[int] = ord("r")

    written_lsn: int
    flushed_lsn: int
    applied_lsn: int
    client_time: int
    reply_requested: bool

    @classmethod
    def read(cls, cursor: Cursor) -> StandbyStatusUpdate:
        """Read the bytes after the type byte."""
        return cls(
            written_lsn=cursor.u64("written LSN"),
            flushed_lsn=cursor.u64("flushed LSN"),
            applied_lsn=cursor.u64("applied LSN"),
            client_time=cursor.i64("client time"),
            reply_requested=bool(cursor.flags("reply request", allowed=_REPLY_REQUESTED)),
        )

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u64(self.written_lsn, "written LSN")
        writer.u64(self.flushed_lsn, "flushed LSN")
        writer.u64(self.applied_lsn, "applied LSN")
        writer.i64(self.client_time, "client time")
        writer.u8(_REPLY_REQUESTED if self.reply_requested else 0, "reply request")


@dataclass(frozen=True, slots=True)
class OtherEnvelope:
    """An envelope of an unknown type, which a receiver ignores."""

    tag: int
    content: bytes

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        if self.tag in _READER_BY_TAG:
            writer.fail("a type byte of an unknown envelope")
        writer.byten(self.content)


KnownEnvelope: TypeAlias = XLogData | PrimaryKeepalive | StandbyStatusUpdate
Envelope: TypeAlias = KnownEnvelope | OtherEnvelope

_READER_BY_TAG: dict[int, Callable[[Cursor], KnownEnvelope]] = {
    XLogData.tag: XLogData.read,
    PrimaryKeepalive.tag: PrimaryKeepalive.read,
    StandbyStatusUpdate.tag: StandbyStatusUpdate.read,
}
_NAME_BY_TAG: dict[int, str] = {kind.tag: kind.__name__ for kind in get_args(KnownEnvelope)}


def decode_envelope(data: bytes | bytearray | memoryview) -> Envelope:
    """Decode the content of one CopyData message."""
    octets = bytes(data)  # This copies the data only if it is not of type bytes.
    if not octets:
        raise ProtocolError(
            "malformed CopyData message at offset 0: expected a type byte, but 0 bytes remain",
            sqlstate=PROTOCOL_VIOLATION,
        )
    tag = octets[0]
    if tag not in _READER_BY_TAG:
        return OtherEnvelope(tag, octets[1:])
    cursor = Cursor(octets, _NAME_BY_TAG[tag], offset=1)
    envelope = _READER_BY_TAG[tag](cursor)
    cursor.expect_end()
    return envelope


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode the content of one CopyData message."""
    writer = Writer(type(envelope).__name__)
    writer.u8(envelope.tag, "type byte")
    envelope.write(writer)
    return writer.getvalue()


def xlog_data_columns(
    octets: bytes | bytearray, lengths: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], pa.BinaryArray]:
    """Return `data_start` and `data` of the XLogData among many envelopes.

    `octets` has the bytes of the envelopes, one after the other, and `lengths` the number of bytes of each. Each
    envelope must be longer than XLOG_DATA_HEADER_BYTES. Envelopes of other types are left out. No Python code runs
    per envelope.
    """
    count = len(lengths)
    # These offsets make the bytes a binary array with the elements header, message, header, message, …
    offsets = np.zeros(2 * count + 1, np.int32)
    np.cumsum(lengths, out=offsets[2::2])
    offsets[1::2] = offsets[:-1:2] + XLOG_DATA_HEADER_BYTES
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(octets)]
    parts = pa.BinaryArray.from_buffers(pa.binary(), 2 * count, buffers)
    part_octets = Octets(parts)
    header_starts = part_octets.starts[::2]
    is_xlog_data = part_octets.read_integers(header_starts) >> 56 == XLogData.tag
    return part_octets.read_integers(header_starts[is_xlog_data] + 1).view(np.int64), parts.take(
        pa.array(np.flatnonzero(is_xlog_data) * 2 + 1)
    )
