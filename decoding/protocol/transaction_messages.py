"""The messages of transactions, streamed blocks, two-phase commit and origins.

Each class has the fields of one message, and reads and writes the bytes after the type byte. Times are
microseconds since 2000-01-01. LSNs are unsigned numbers. Wrong bytes and unknown flags raise ProtocolError. An LSN
or a transaction id of zero raises ProtocolError, too, if PostgreSQL's subscriber refuses it in this message.

PostgreSQL documentation, Logical Replication Message Formats; src/backend/replication/logical/proto.c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.binary.writer import Writer

_NO_FLAGS = 0
_FIRST_SEGMENT = 1

_PreparedFields: TypeAlias = tuple[int, int, int, int, str]
"""The LSN, the end LSN and the time of a PREPARE or COMMIT PREPARED, then the transaction's xid and gid."""


@dataclass(frozen=True, slots=True)
class Begin:
    """A transaction begins.

    `final_lsn` is the position of the transaction's commit record. The Commit message repeats it as `commit_lsn`.
    """

    tag: ClassVar[int] = ord("B")

    final_lsn: int
    commit_time: int
    xid: int

    @classmethod
    def read(cls, cursor: Cursor) -> Begin:
        """Read the bytes after the type byte."""
        return cls(cursor.valid_lsn("final LSN"), cursor.i64("commit time"), cursor.u32("xid"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.valid_lsn(self.final_lsn, "final LSN")
        writer.i64(self.commit_time, "commit time")
        writer.u32(self.xid, "xid")


@dataclass(frozen=True, slots=True)
class Commit:
    """A transaction ends; a subscriber confirms `end_lsn` once it has stored the transaction."""

    tag: ClassVar[int] = ord("C")

    commit_lsn: int
    end_lsn: int
    commit_time: int

    @classmethod
    def read(cls, cursor: Cursor) -> Commit:
        """Read the bytes after the type byte."""
        cursor.flags("flags", allowed=_NO_FLAGS)
        return cls(cursor.u64("commit LSN"), cursor.u64("end LSN"), cursor.i64("commit time"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u8(_NO_FLAGS, "flags")
        writer.u64(self.commit_lsn, "commit LSN")
        writer.u64(self.end_lsn, "end LSN")
        writer.i64(self.commit_time, "commit time")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a transaction that reached the publisher by replication."""

    tag: ClassVar[int] = ord("O")

    commit_lsn: int
    name: str

    @classmethod
    def read(cls, cursor: Cursor) -> Origin:
        """Read the bytes after the type byte; the LSN may be zero, as it is in a streamed transaction."""
        return cls(cursor.u64("origin commit LSN"), cursor.cstr("origin name"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u64(self.commit_lsn, "origin commit LSN")
        writer.cstr(self.name, "origin name")


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A block of a transaction in progress begins."""

    tag: ClassVar[int] = ord("S")

    xid: int
    first_segment: bool

    @classmethod
    def read(cls, cursor: Cursor) -> StreamStart:
        """Read the bytes after the type byte."""
        xid = cursor.valid_xid("xid")
        return cls(xid, bool(cursor.flags("first segment", allowed=_FIRST_SEGMENT)))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.valid_xid(self.xid, "xid")
        writer.u8(_FIRST_SEGMENT if self.first_segment else 0, "first segment")


@dataclass(frozen=True, slots=True)
class StreamStop:
    """A block of a transaction in progress ends."""

    tag: ClassVar[int] = ord("E")

    @classmethod
    def read(cls, _cursor: Cursor) -> StreamStop:
        """Read nothing: the type byte is the message."""
        return cls()

    def write(self, writer: Writer) -> None:
        """Write nothing."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A streamed transaction committed."""

    tag: ClassVar[int] = ord("c")

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time: int

    @classmethod
    def read(cls, cursor: Cursor) -> StreamCommit:
        """Read the bytes after the type byte."""
        xid = cursor.u32("xid")
        cursor.flags("flags", allowed=_NO_FLAGS)
        return cls(xid, cursor.u64("commit LSN"), cursor.u64("end LSN"), cursor.i64("commit time"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.xid, "xid")
        writer.u8(_NO_FLAGS, "flags")
        writer.u64(self.commit_lsn, "commit LSN")
        writer.u64(self.end_lsn, "end LSN")
        writer.i64(self.commit_time, "commit time")


@dataclass(frozen=True, slots=True)
class AbortInfo:
    """The LSN and the time of an abort, which are sent only with streaming = parallel."""

    lsn: int
    time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A streamed transaction aborted, or only its subtransaction `subxid` if `subxid` differs from `xid`."""

    tag: ClassVar[int] = ord("A")

    xid: int
    subxid: int
    abort: AbortInfo | None = None

    @classmethod
    def read(cls, cursor: Cursor) -> StreamAbort:
        """Read the bytes after the type byte in a session with streaming = on."""
        return cls(cursor.u32("xid"), cursor.u32("subtransaction xid"))

    @classmethod
    def read_parallel(cls, cursor: Cursor) -> StreamAbort:
        """Read the bytes after the type byte in a session with streaming = parallel."""
        xid, subxid = cursor.u32("xid"), cursor.u32("subtransaction xid")
        return cls(xid, subxid, AbortInfo(cursor.u64("abort LSN"), cursor.i64("abort time")))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.xid, "xid")
        writer.u32(self.subxid, "subtransaction xid")
        if self.abort is not None:
            writer.u64(self.abort.lsn, "abort LSN")
            writer.i64(self.abort.time, "abort time")


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """A transaction begins that ends with PREPARE TRANSACTION."""

    tag: ClassVar[int] = ord("b")

    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str

    @classmethod
    def read(cls, cursor: Cursor) -> BeginPrepare:
        """Read the bytes after the type byte; unlike other two-phase messages, this one has no flags."""
        return cls(*_read_prepared(cursor, "prepare"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        fields = (self.prepare_lsn, self.end_lsn, self.prepare_time, self.xid, self.gid)
        _write_prepared(writer, "prepare", fields)


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE TRANSACTION: the changes since Begin Prepare await COMMIT PREPARED or ROLLBACK PREPARED."""

    tag: ClassVar[int] = ord("P")

    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str

    @classmethod
    def read(cls, cursor: Cursor) -> Prepare:
        """Read the bytes after the type byte."""
        cursor.flags("flags", allowed=_NO_FLAGS)
        return cls(*_read_prepared(cursor, "prepare", Cursor.valid_xid))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u8(_NO_FLAGS, "flags")
        fields = (self.prepare_lsn, self.end_lsn, self.prepare_time, self.xid, self.gid)
        _write_prepared(writer, "prepare", fields, Writer.valid_xid)


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED: a prepared transaction committed."""

    tag: ClassVar[int] = ord("K")

    commit_lsn: int
    end_lsn: int
    commit_time: int
    xid: int
    gid: str

    @classmethod
    def read(cls, cursor: Cursor) -> CommitPrepared:
        """Read the bytes after the type byte."""
        cursor.flags("flags", allowed=_NO_FLAGS)
        return cls(*_read_prepared(cursor, "commit"))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u8(_NO_FLAGS, "flags")
        fields = (self.commit_lsn, self.end_lsn, self.commit_time, self.xid, self.gid)
        _write_prepared(writer, "commit", fields)


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED: a prepared transaction was rolled back.

    Another transaction can have the same gid later. So the message also has the end LSN and the time of the
    PREPARE.
    """

    tag: ClassVar[int] = ord("r")

    prepare_end_lsn: int
    rollback_end_lsn: int
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str

    @classmethod
    def read(cls, cursor: Cursor) -> RollbackPrepared:
        """Read the bytes after the type byte."""
        cursor.flags("flags", allowed=_NO_FLAGS)
        return cls(
            prepare_end_lsn=cursor.valid_lsn("prepare end LSN"),
            rollback_end_lsn=cursor.valid_lsn("rollback end LSN"),
            prepare_time=cursor.i64("prepare time"),
            rollback_time=cursor.i64("rollback time"),
            xid=cursor.u32("xid"),
            gid=cursor.cstr("gid"),
        )

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u8(_NO_FLAGS, "flags")
        writer.valid_lsn(self.prepare_end_lsn, "prepare end LSN")
        writer.valid_lsn(self.rollback_end_lsn, "rollback end LSN")
        writer.i64(self.prepare_time, "prepare time")
        writer.i64(self.rollback_time, "rollback time")
        writer.u32(self.xid, "xid")
        writer.cstr(self.gid, "gid")


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """PREPARE TRANSACTION of a streamed transaction."""

    tag: ClassVar[int] = ord("p")

    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str

    @classmethod
    def read(cls, cursor: Cursor) -> StreamPrepare:
        """Read the bytes after the type byte."""
        cursor.flags("flags", allowed=_NO_FLAGS)
        return cls(*_read_prepared(cursor, "prepare", Cursor.valid_xid))

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u8(_NO_FLAGS, "flags")
        fields = (self.prepare_lsn, self.end_lsn, self.prepare_time, self.xid, self.gid)
        _write_prepared(writer, "prepare", fields, Writer.valid_xid)


def _read_prepared(
    cursor: Cursor, event: str, read_xid: Callable[[Cursor, str], int] = Cursor.u32
) -> _PreparedFields:
    """Read the fields of a two-phase message. Rollback Prepared has other fields, and is read elsewhere.

    `event` is "prepare" or "commit". Prepare and Stream Prepare pass a `read_xid` that refuses the transaction id
    zero, as logicalrep_read_prepare_common() does.
    """
    return (
        cursor.valid_lsn(f"{event} LSN"),
        cursor.valid_lsn("end LSN"),
        cursor.i64(f"{event} time"),
        read_xid(cursor, "xid"),
        cursor.cstr("gid"),
    )


def _write_prepared(
    writer: Writer,
    event: str,
    fields: _PreparedFields,
    write_xid: Callable[[Writer, int, str], None] = Writer.u32,
) -> None:
    event_lsn, end_lsn, event_time, xid, gid = fields
    writer.valid_lsn(event_lsn, f"{event} LSN")
    writer.valid_lsn(end_lsn, "end LSN")
    writer.i64(event_time, f"{event} time")
    write_xid(writer, xid, "xid")
    writer.cstr(gid, "gid")
