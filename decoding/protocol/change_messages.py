"""The messages that describe and change relations, and the logical decoding message.

Each class has the fields of one message, and reads and writes the bytes after the type byte. Between Stream
Start and Stream Stop a transaction id follows the type byte. `pgsieve.decoding.protocol.messages` reads this
id and passes it as `xid`. `xid` is None for messages that are not streamed. Wrong bytes raise ProtocolError.

PostgreSQL documentation, Logical Replication Message Formats; src/backend/replication/logical/proto.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pgsieve.decoding.binary.cursor import Cursor
from pgsieve.decoding.binary.writer import Writer
from pgsieve.decoding.protocol.tuple_data import (
    OldKey,
    OldRow,
    TupleData,
    read_new,
    read_old,
    read_old_and_new,
    write_new,
    write_old,
)

REPLICA_IDENTITIES = "dnfi"
"""The values of pg_class.relreplident: default, nothing, full and index."""

_PART_OF_KEY = 1
_CASCADE = 1
_RESTART_IDENTITY = 2
_TRANSACTIONAL = 1
_MIN_COLUMN_BYTES = (
    10  # A column has at least this number of bytes: flags, an empty name, type oid, type modifier.
)


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A published column; `is_key` says whether it is part of the replica identity."""

    is_key: bool
    name: str
    type_oid: int
    type_modifier: int

    @classmethod
    def read(cls, cursor: Cursor) -> RelationColumn:
        """Read one column of a Relation message."""
        return cls(
            is_key=bool(cursor.flags("column flags", allowed=_PART_OF_KEY)),
            name=cursor.cstr("column name"),
            type_oid=cursor.u32("column type"),
            type_modifier=cursor.i32("type modifier"),
        )

    def write(self, writer: Writer) -> None:
        """Write one column of a Relation message."""
        writer.u8(_PART_OF_KEY if self.is_key else 0, "column flags")
        writer.cstr(self.name, "column name")
        writer.u32(self.type_oid, "column type")
        writer.i32(self.type_modifier, "type modifier")


@dataclass(frozen=True, slots=True)
class Relation:
    """The description of a relation, which replaces its earlier descriptions.

    The namespace '' means pg_catalog.
    """

    tag: ClassVar[int] = ord("R")

    relation_id: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> Relation:
        """Read the bytes after the type byte."""
        relation_id = cursor.u32("relation id")
        namespace = cursor.cstr("namespace")
        name = cursor.cstr("relation name")
        identity = chr(cursor.u8("replica identity"))
        if identity not in REPLICA_IDENTITIES:
            cursor.fail(f"a replica identity of {list(REPLICA_IDENTITIES)}", bytes_before=1)
        count = cursor.check_count(cursor.i16("number of columns"), "columns", item_size=_MIN_COLUMN_BYTES)
        columns = tuple([RelationColumn.read(cursor) for _ in range(count)])
        return cls(relation_id, namespace, name, identity, columns, xid)

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.relation_id, "relation id")
        writer.cstr(self.namespace, "namespace")
        writer.cstr(self.name, "relation name")
        if len(self.replica_identity) != 1 or self.replica_identity not in REPLICA_IDENTITIES:
            writer.fail(f"a replica identity of {list(REPLICA_IDENTITIES)}")
        writer.u8(ord(self.replica_identity), "replica identity")
        writer.i16(len(self.columns), "number of columns")
        for column in self.columns:
            column.write(writer)


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in.

    The message for a domain has the oid of the domain, but the name of its base type.
    """

    tag: ClassVar[int] = ord("Y")

    type_oid: int
    namespace: str
    name: str
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> Type:
        """Read the bytes after the type byte."""
        return cls(cursor.u32("type oid"), cursor.cstr("namespace"), cursor.cstr("type name"), xid)

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.type_oid, "type oid")
        writer.cstr(self.namespace, "namespace")
        writer.cstr(self.name, "type name")


@dataclass(frozen=True, slots=True)
class Insert:
    """An inserted row."""

    tag: ClassVar[int] = ord("I")

    relation_id: int
    new: TupleData
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> Insert:
        """Read the bytes after the type byte."""
        return cls(cursor.u32("relation id"), read_new(cursor), xid)

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.relation_id, "relation id")
        write_new(writer, self.new)


@dataclass(frozen=True, slots=True)
class Update:
    """An updated row.

    `old` is None if the replica identity is not FULL, and the UPDATE changed none of its columns. Then `new` has the
    values of these columns.
    """

    tag: ClassVar[int] = ord("U")

    relation_id: int
    old: OldKey | OldRow | None
    new: TupleData
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> Update:
        """Read the bytes after the type byte."""
        return cls(cursor.u32("relation id"), *read_old_and_new(cursor), xid)

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.relation_id, "relation id")
        if self.old is not None:
            write_old(writer, self.old)
        write_new(writer, self.new)


@dataclass(frozen=True, slots=True)
class Delete:
    """A deleted row."""

    tag: ClassVar[int] = ord("D")

    relation_id: int
    old: OldKey | OldRow
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> Delete:
        """Read the bytes after the type byte."""
        return cls(cursor.u32("relation id"), read_old(cursor), xid)

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u32(self.relation_id, "relation id")
        write_old(writer, self.old)


@dataclass(frozen=True, slots=True)
class Truncate:
    """A TRUNCATE, with the ids of the published relations that it emptied."""

    tag: ClassVar[int] = ord("T")

    relation_ids: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> Truncate:
        """Read the bytes after the type byte."""
        count = cursor.i32("number of relations")
        options = cursor.flags("truncate options", allowed=_CASCADE | _RESTART_IDENTITY)
        cursor.check_count(count, "relations", item_size=4)
        relation_ids = tuple([cursor.u32("relation id") for _ in range(count)])
        return cls(relation_ids, bool(options & _CASCADE), bool(options & _RESTART_IDENTITY), xid)

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.i32(len(self.relation_ids), "number of relations")
        cascade = _CASCADE if self.cascade else 0
        restart_identity = _RESTART_IDENTITY if self.restart_identity else 0
        writer.u8(cascade | restart_identity, "truncate options")
        for relation_id in self.relation_ids:
            writer.u32(relation_id, "relation id")


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of pg_logical_emit_message().

    If the message is not transactional, the server sends it outside of transactions.
    """

    tag: ClassVar[int] = ord("M")

    transactional: bool
    lsn: int
    prefix: str
    content: bytes
    xid: int | None = None

    @classmethod
    def read(cls, cursor: Cursor, xid: int | None) -> LogicalMessage:
        """Read the bytes after the type byte."""
        return cls(
            transactional=bool(cursor.flags("message flags", allowed=_TRANSACTIONAL)),
            lsn=cursor.u64("message LSN"),
            prefix=cursor.cstr("message prefix"),
            content=cursor.length_prefixed("message content"),
            xid=xid,
        )

    def write(self, writer: Writer) -> None:
        """Write the bytes after the type byte."""
        writer.u8(_TRANSACTIONAL if self.transactional else 0, "message flags")
        writer.u64(self.lsn, "message LSN")
        writer.cstr(self.prefix, "message prefix")
        writer.length_prefixed(self.content, "length of the message content")
