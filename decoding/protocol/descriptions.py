"""Inserts missing Relation messages: messages of one session in, messages with all descriptions out.

A publisher describes a relation once per session. But pgsieve divides a session into slices, which are read
separately, and moves streamed and prepared transactions to their commits. So pgsieve must repeat descriptions.
`RelationDescriptions` inserts a Relation message, with the Type messages of its columns, before the first
change that would otherwise follow no description or a wrong one. Raises ProtocolError.

PostgreSQL documentation, Logical Streaming Replication Protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pgsieve.decoding.binary.octets import Octets, Positions
from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.change_messages import Relation, Truncate, Type
from pgsieve.decoding.protocol.messages import decode

_RELATION, _TYPE, _TRUNCATE = b"RYT"
_CHANGES = np.frombuffer(b"IUD", np.uint8)
_SHORTEST_CHANGE = 5  # bytes: type byte, relation id

Marks: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Description:
    """A Relation message after the Type messages of its columns; `arrival` numbers descriptions in order."""

    arrival: int
    messages: tuple[bytes, ...]


@dataclass(slots=True)
class RelationDescriptions:
    """The publisher's descriptions of relations, and the stale relations, whose description must be repeated.

    A relation is stale if the output of this slice lacks its valid description, or has another description of the
    relation after it.
    """

    _descriptions: dict[int, Description] = field(default_factory=dict)
    _types: dict[int, bytes] = field(default_factory=dict)
    _stale: set[int] = field(default_factory=set)
    _arrivals: int = 0

    def begin_slice(self) -> None:
        """Mark all relations as stale, so that each is described again before its next change."""
        self._stale = set(self._descriptions)

    def read_descriptions(self, data: pa.Array) -> dict[int, Description]:
        """Store the Type messages of a binary array, and return its descriptions by relation id."""
        kind = Octets(data).kinds()
        descriptions: dict[int, Description] = {}
        for index in np.flatnonzero((kind == _RELATION) | (kind == _TYPE)):
            self._read_description(data[int(index)].as_py(), descriptions)
        return descriptions

    def _read_description(self, raw: bytes, descriptions: dict[int, Description]) -> None:
        message = decode(raw)
        if isinstance(message, Type):
            self._types[message.type_oid] = raw
        elif isinstance(message, Relation):
            oids = dict.fromkeys(c.type_oid for c in message.columns)
            types = (self._types[oid] for oid in oids if oid in self._types)
            self._arrivals += 1
            descriptions[message.relation_id] = Description(self._arrivals, (*types, raw))

    def record_replayed(self, relations: Mapping[int, Description]) -> None:
        """Record the descriptions of a streamed or prepared transaction that is now in the output.

        The description of a relation that arrived last is valid, even if the output has another one after it.
        """
        for relation_id, description in relations.items():
            last_description = self._descriptions.get(relation_id)
            if last_description is None or last_description.arrival < description.arrival:
                self._descriptions[relation_id] = description
        self._stale.update(relations)

    def insert_missing(self, data: pa.Array) -> Iterator[pa.Array]:
        """Yield messages of transactions that are not streamed or prepared, with all descriptions."""
        octets = Octets(data)
        kind = octets.kinds()
        is_description = (kind == _RELATION) | (kind == _TYPE)
        first_uses = self._first_uses(octets, kind, data) if self._stale else {}
        begin = 0
        for index in sorted({*map(int, np.flatnonzero(is_description)), *first_uses}):
            missing = [i for i in first_uses.get(index, ()) if i in self._stale]
            if missing:
                yield data.slice(begin, index - begin)
                begin = index
                yield pa.array([m for i in missing for m in self._descriptions[i].messages], data.type)
                self._stale.difference_update(missing)
            if is_description[index]:
                descriptions: dict[int, Description] = {}
                self._read_description(data[index].as_py(), descriptions)
                self._descriptions.update(descriptions)
                self._stale.difference_update(descriptions)
        yield data.slice(begin) if begin else data

    def _first_uses(self, octets: Octets, kind: Marks, data: pa.Array) -> dict[int, list[int]]:
        """By position of a message, the stale relations that it changes or truncates first."""
        uses: dict[int, list[int]] = {}
        changes: Positions = np.flatnonzero(np.isin(kind, _CHANGES))
        if (octets.ends[changes] - octets.starts[changes] < _SHORTEST_CHANGE).any():
            raise ProtocolError("a change ends before its relation", sqlstate="08P01")
        relation_ids = octets.words(octets.starts[changes]) >> 24 & 0xFFFFFFFF
        changed_ids, first = np.unique(relation_ids, return_index=True)
        for relation_id, index in zip(changed_ids.tolist(), changes[first].tolist(), strict=True):
            if relation_id in self._stale:
                uses.setdefault(index, []).append(relation_id)
        for index in map(int, np.flatnonzero(kind == _TRUNCATE)):
            message = decode(data[index].as_py())
            assert isinstance(message, Truncate)
            uses.setdefault(index, []).extend(i for i in message.relation_ids if i in self._stale)
        return uses
