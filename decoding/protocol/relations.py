"""Keeps the descriptions of Relation and Type messages: ids in, relations with their types' names out.

A description that is sent within a streamed transaction is valid only for that transaction until it commits,
and is dropped if it aborts (PostgreSQL documentation 54.5). Raises ProtocolError for a relation that no
message has described.

A type that is not built in has the name of its Type message, with quotes if needed, and with its schema
unless that is pg_catalog, as format_type prints it with the empty search_path of pg_recvlogical. Type
messages say less than the catalog, so two kinds of names are not exact:

- a domain's message has the name of its base type, such as `int4`, not integer;
- an array's message has the name of the array type, `_mood` for mood[]. So a leading underscore is read as an
  array. This is wrong for another type whose name begins with an underscore, and for an array type whose name
  was cut or made unique.

A caller that can ask the server passes the server's names (`type_names`), which are preferred.
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
from pgsieve.decoding.wording import counted

_CATALOG = "pg_catalog"


@dataclass(frozen=True, slots=True)
class PublishedRelation:
    """A relation whose changes are sent: its Relation message, its columns' Type messages and type names."""

    message: Relation
    types: tuple[Type, ...]
    type_names: tuple[str, ...]

    @property
    def namespace(self) -> str:
        """The schema's name; messages leave out the name pg_catalog."""
        return self.message.namespace or _CATALOG

    def check(self, change: Insert | Update | Delete) -> None:
        """Raise ProtocolError unless the rows of a change have as many values as the relation has columns."""
        rows = [] if isinstance(change, Delete) else [change.new]
        if not isinstance(change, Insert) and change.old is not None:
            rows.append(change.old.columns)
        expected = len(self.message.columns)
        for row in rows:
            if len(row) != expected:
                raise ProtocolError(
                    f"a row of relation {self.message.relation_id} has {counted(len(row), 'value')} for {counted(expected, 'column')}",
                    sqlstate=PROTOCOL_VIOLATION,
                )


@dataclass(slots=True)
class _Scope:
    """The relations and types of the session, or of one streamed transaction."""

    relations: dict[int, PublishedRelation] = field(default_factory=dict)
    types: dict[int, Type] = field(default_factory=dict)


class RelationCache:
    """The relations of one session; `xid` is the streamed transaction of a message, None outside a stream."""

    def __init__(self, type_names: Mapping[int, str] = MappingProxyType({})) -> None:
        self._type_names = type_names
        self._session = _Scope()
        self._streams: dict[int, _Scope] = {}

    def add(self, message: Relation | Type, xid: int | None = None) -> None:
        """Add a description; it replaces an earlier one with the same id."""
        scope = self._session if xid is None else self._streams.setdefault(xid, _Scope())
        if isinstance(message, Type):
            scope.types[message.type_oid] = message
            return
        types = {**self._session.types, **scope.types}
        oids = [column.type_oid for column in message.columns]
        scope.relations[message.relation_id] = PublishedRelation(
            message,
            tuple(types[oid] for oid in dict.fromkeys(oids) if oid in types),
            tuple(self._type_name(oid, types.get(oid)) for oid in oids),
        )

    def get(self, relation_id: int, xid: int | None = None) -> PublishedRelation:
        """Return the last description of a relation."""
        streamed = self._streams.get(xid) if xid is not None else None
        relation = streamed.relations.get(relation_id) if streamed else None
        relation = relation or self._session.relations.get(relation_id)
        if relation is None:
            raise ProtocolError(
                f"no Relation message has described relation {relation_id} before its change",
                sqlstate=PROTOCOL_VIOLATION,
            )
        return relation

    def end_stream(self, xid: int, *, committed: bool) -> None:
        """Make a streamed transaction's descriptions the session's, or drop them."""
        streamed = self._streams.pop(xid, None)
        if streamed and committed:
            self._session.relations.update(streamed.relations)
            self._session.types.update(streamed.types)

    def _type_name(self, oid: int, described: Type | None) -> str:
        name = self._type_names.get(oid) or TYPE_NAMES.get(oid)
        if name is not None:
            return name
        if described is None:
            raise ProtocolError(
                f"no Type message has described type {oid} before its relation", sqlstate=PROTOCOL_VIOLATION
            )
        return _type_name(described)


def _type_name(described: Type) -> str:
    """The name of a type that is not built in; an array type has the element type's name with brackets."""
    name, brackets = described.name, ""
    if len(name) > 1 and name.startswith("_"):
        name, brackets = name[1:], "[]"
    if described.namespace in ("", _CATALOG):
        return quote_identifier(name) + brackets
    return quote_qualified(described.namespace, name) + brackets
