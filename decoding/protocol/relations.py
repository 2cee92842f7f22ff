"""Stores the Relation and Type messages of a session.

In: Relation and Type messages, and the id of the relation that a caller asks for. Out: this relation's last Relation
message, with the names of its columns' types. Raises ProtocolError for a relation without a Relation message, and for
a type whose name is unknown.

Until a streamed transaction commits, the messages in it are valid only for this transaction. If the transaction
aborts, they are dropped.

The name of a type that is not built in comes from its Type message. The name is quoted if needed, and includes the
schema unless the schema is pg_catalog. The server's format_type() returns the same name if the search_path is empty. Type
messages contain less than the catalog, so two kinds of names are not exact:

- The message for a domain has the name of the base type, such as `int4` instead of integer.
- The message for an array has the name of the array type, such as `_mood` instead of mood[]. So a type with a
  leading underscore counts as an array. This is wrong for other types with such a name. It is also wrong for an
  array type if PostgreSQL shortened its name or made it unique.

A caller with a connection can pass the server's names of types as `type_names`. These take precedence.

PostgreSQL documentation, Logical Streaming Replication Protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pgsieve.decoding.binary.cursor import PROTOCOL_VIOLATION
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.messages import Delete, Insert, Relation, Type, Update
from pgsieve.decoding.values.catalog_names import TYPE_NAMES
from pgsieve.decoding.values.quoting import quote_identifier, quote_qualified
from pgsieve.decoding.wording import quantity

_CATALOG_SCHEMA = "pg_catalog"


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """A published relation: its Relation message, and its columns' Type messages and type names."""

    message: Relation
    type_messages: tuple[Type, ...]
    type_names: tuple[str, ...]

    @property
    def namespace(self) -> str:
        """The name of the schema; messages have an empty name instead of pg_catalog."""
        return self.message.namespace or _CATALOG_SCHEMA

    def check_row_widths(self, change: Insert | Update | Delete) -> None:
        """Raise ProtocolError if a row of a change has more or fewer values than the relation has columns."""
        rows = [] if isinstance(change, Delete) else [change.new]
        if not isinstance(change, Insert) and change.old is not None:
            rows.append(change.old.columns)
        column_count = len(self.message.columns)
        for row in rows:
            if len(row) != column_count:
                raise ProtocolError(
                    f"a row of relation {self.message.relation_id} has {quantity(len(row), 'value')} for {quantity(column_count, 'column')}",
                    sqlstate=PROTOCOL_VIOLATION,
                )


@dataclass(slots=True)
class _Scope:
    """The relations and types that a session describes outside of streams, or within one streamed transaction."""

    relation_by_id: dict[int, PublishedRelation] = field(default_factory=dict)
    type_by_oid: dict[int, Type] = field(default_factory=dict)


class RelationCache:
    """The relations that one session has described.

    The parameter `xid` of the methods is the id of the streamed transaction that a message belongs to, or None
    for a message that is not streamed.
    """

    def __init__(self, type_names: Mapping[int, str] = MappingProxyType({})) -> None:
        self._type_names = type_names
        self._session_scope = _Scope()
        self._scope_by_stream_xid: dict[int, _Scope] = {}

    def add(self, message: Relation | Type, xid: int | None = None) -> None:
        """Add a Relation or Type message; it replaces an earlier message about the same relation or type."""
        scope = self._session_scope if xid is None else self._scope_by_stream_xid.setdefault(xid, _Scope())
        if isinstance(message, Type):
            scope.type_by_oid[message.type_oid] = message
            return
        type_messages = {**self._session_scope.type_by_oid, **scope.type_by_oid}
        type_oids = [column.type_oid for column in message.columns]
        scope.relation_by_id[message.relation_id] = PublishedRelation(
            message,
            tuple(type_messages[oid] for oid in dict.fromkeys(type_oids) if oid in type_messages),
            tuple(self._find_type_name(oid, type_messages.get(oid)) for oid in type_oids),
        )

    def get(self, relation_id: int, xid: int | None = None) -> PublishedRelation:
        """Return a relation as its last Relation message describes it."""
        scope = self._scope_by_stream_xid.get(xid) if xid is not None else None
        relation = scope.relation_by_id.get(relation_id) if scope else None
        relation = relation or self._session_scope.relation_by_id.get(relation_id)
        if relation is None:
            raise ProtocolError(
                f"no Relation message has described relation {relation_id} before its change",
                sqlstate=PROTOCOL_VIOLATION,
            )
        return relation

    def end_stream(self, xid: int, *, committed: bool) -> None:
        """End a streamed transaction.

        If the transaction committed, its Relation and Type messages become valid for the session. Otherwise they
        are dropped.
        """
        scope = self._scope_by_stream_xid.pop(xid, None)
        if scope and committed:
            self._session_scope.relation_by_id.update(scope.relation_by_id)
            self._session_scope.type_by_oid.update(scope.type_by_oid)

    def _find_type_name(self, oid: int, type_message: Type | None) -> str:
        name = self._type_names.get(oid) or TYPE_NAMES.get(oid)
        if name is not None:
            return name
        if type_message is None:
            raise ProtocolError(
                f"no Type message has described type {oid} before its relation", sqlstate=PROTOCOL_VIOLATION
            )
        return _format_type_name(type_message)


def _format_type_name(type_message: Type) -> str:
    """Return a type's name from its Type message; an array has the name of its element type with `[]` after it."""
    name, brackets = type_message.name, ""
    if len(name) > 1 and name.startswith("_"):
        name, brackets = name[1:], "[]"
    if type_message.namespace in ("", _CATALOG_SCHEMA):
        return quote_identifier(name) + brackets
    return quote_qualified(type_message.namespace, name) + brackets
