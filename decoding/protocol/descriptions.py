"""Inserts the descriptions of relations that are missing before a change.

In: the messages of one session. Out: these messages, and the inserted descriptions.

A description is a Relation message with the Type messages of its columns. A publisher describes a relation once
per session. But pgsieve divides a session into slices, and each slice is read without the earlier slices. pgsieve
also moves the messages of streamed and prepared transactions to the position of their commit. So a change could
follow no description of its relation, or a wrong one. `RelationDescriptions` inserts the valid description before
such a change. Raises ProtocolError.

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
    """The Type messages of a relation's columns, followed by its Relation message.

    `arrival` numbers the descriptions of a session in the order in which they arrived.
    """

    arrival: int
    messages: tuple[bytes, ...]


@dataclass(slots=True)
class RelationDescriptions:
    """The last description of each relation, and the stale relations: those that must be described again.

    A relation is stale if the output of this slice does not have its last description. It is also stale if the
    output has an older description of the relation after the last one.
    """

    _descriptions: dict[int, Description] = field(default_factory=dict)
    _types: dict[int, bytes] = field(default_factory=dict)
    _stale: set[int] = field(default_factory=set)
    _arrivals: int = 0

    def begin_slice(self) -> None:
        """Mark all relations as stale, so that each relation is described again before its next change."""
        self._stale = set(self._descriptions)

    def read_descriptions(self, data: pa.Array) -> dict[int, Description]:
        """Read the Relation and Type messages in a binary array of messages.

        Stores the Type messages, and returns the descriptions by relation id.
        """
        kind = Octets(data).first_bytes()
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
        """Record the descriptions in a streamed or prepared transaction that has just been written to the output.

        Such a transaction is written later than it arrived. So the output may now have an older description after
        the valid one. The description that arrived last is valid.
        """
        for relation_id, description in relations.items():
            last_description = self._descriptions.get(relation_id)
            if last_description is None or last_description.arrival < description.arrival:
                self._descriptions[relation_id] = description
        self._stale.update(relations)

    def insert_missing(self, data: pa.Array) -> Iterator[pa.Array]:
        """Yield messages of ordinary transactions (not streamed or prepared), and insert missing descriptions."""
        octets = Octets(data)
        kind = octets.first_bytes()
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
        """Find the first message that changes a stale relation.

        Maps the position of a message to the stale relations that it changes or truncates. A TRUNCATE counts even
        if an earlier message changes the relation.
        """
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
