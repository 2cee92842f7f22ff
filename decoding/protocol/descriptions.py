"""Inserts the description of a relation before a change of the relation, if the description is missing there.

In: the messages of one session. Out: these messages, and the inserted descriptions.

A description is a Relation message with the Type messages of its columns. A publisher describes a relation once
per session. But pgsieve divides the messages of a session into slices, and each slice is read without the earlier
slices. pgsieve also moves the messages of streamed and prepared transactions to the position of their commit. So the
last description before a change may be missing or outdated. In that case `RelationDescriptions` inserts the valid
description before the change. Raises ProtocolError for a malformed message.

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
_MIN_CHANGE_BYTES = 5  # bytes: type byte, relation id

MessageKinds: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Description:
    """The Type messages of a relation's columns, followed by its Relation message.

    `arrival_number` numbers the descriptions of a session in the order in which they arrived.
    """

    arrival_number: int
    messages: tuple[bytes, ...]


@dataclass(slots=True)
class RelationDescriptions:
    """The last description of each relation, and the stale relations: those that must be described again.

    A relation is stale if its last description in the output of this slice is not the valid one, or if the output has
    no description of it.
    """

    _descriptions: dict[int, Description] = field(default_factory=dict)
    _type_messages: dict[int, bytes] = field(default_factory=dict)
    _stale_ids: set[int] = field(default_factory=set)
    _arrival_count: int = 0

    def begin_slice(self) -> None:
        """Mark all relations as stale, so that each relation is described again before its next change."""
        self._stale_ids = set(self._descriptions)

    def read_descriptions(self, data: pa.Array) -> dict[int, Description]:
        """Read the Relation and Type messages in a binary array of messages.

        Stores the Type messages, and returns the descriptions by relation id.
        """
        kind = Octets(data).first_bytes()
        descriptions: dict[int, Description] = {}
        for index in np.flatnonzero((kind == _RELATION) | (kind == _TYPE)):
            self._read_description(data[int(index)].as_py(), descriptions)
        return descriptions

    def _read_description(self, message_bytes: bytes, descriptions: dict[int, Description]) -> None:
        message = decode(message_bytes)
        if isinstance(message, Type):
            self._type_messages[message.type_oid] = message_bytes
        elif isinstance(message, Relation):
            type_oids = dict.fromkeys(c.type_oid for c in message.columns)
            type_messages = (self._type_messages[oid] for oid in type_oids if oid in self._type_messages)
            self._arrival_count += 1
            descriptions[message.relation_id] = Description(
                self._arrival_count, (*type_messages, message_bytes)
            )

    def record_replayed_descriptions(self, description_by_relation: Mapping[int, Description]) -> None:
        """Record the descriptions in a streamed or prepared transaction.

        The valid description is the one that arrived last. But such a transaction is written to the output later than
        it arrived: now, or when it commits. So the last description in the output may be outdated, and the relations
        of the transaction become stale.
        """
        for relation_id, description in description_by_relation.items():
            last_description = self._descriptions.get(relation_id)
            if last_description is None or last_description.arrival_number < description.arrival_number:
                self._descriptions[relation_id] = description
        self._stale_ids.update(description_by_relation)

    def insert_missing_descriptions(self, data: pa.Array) -> Iterator[pa.Array]:
        """Yield the messages of `data` with the missing descriptions inserted. `data` has no streamed blocks."""
        octets = Octets(data)
        kind = octets.first_bytes()
        is_description = (kind == _RELATION) | (kind == _TYPE)
        first_uses = self._find_first_uses(octets, kind, data) if self._stale_ids else {}
        begin = 0
        for index in sorted({*map(int, np.flatnonzero(is_description)), *first_uses}):
            missing_ids = [
                relation_id for relation_id in first_uses.get(index, ()) if relation_id in self._stale_ids
            ]
            if missing_ids:
                yield data.slice(begin, index - begin)
                begin = index
                messages = [
                    message
                    for relation_id in missing_ids
                    for message in self._descriptions[relation_id].messages
                ]
                yield pa.array(messages, data.type)
                self._stale_ids.difference_update(missing_ids)
            if is_description[index]:
                descriptions: dict[int, Description] = {}
                self._read_description(data[index].as_py(), descriptions)
                self._descriptions.update(descriptions)
                self._stale_ids.difference_update(descriptions)
        yield data.slice(begin) if begin else data

    def _find_first_uses(self, octets: Octets, kind: MessageKinds, data: pa.Array) -> dict[int, list[int]]:
        """Find the messages before which the description of a stale relation may have to be inserted.

        These are the first change of each stale relation, and all of its TRUNCATEs, because one can come before that
        change. Maps the index of each such message to the stale relations that it changes or truncates.
        """
        used_ids_by_index: dict[int, list[int]] = {}
        changes: Positions = np.flatnonzero(np.isin(kind, _CHANGES))
        if (octets.ends[changes] - octets.starts[changes] < _MIN_CHANGE_BYTES).any():
            raise ProtocolError("a change ends before its relation", sqlstate="08P01")
        relation_ids = octets.read_integers(octets.starts[changes]) >> 24 & 0xFFFFFFFF
        changed_ids, first_indexes = np.unique(relation_ids, return_index=True)
        for relation_id, index in zip(changed_ids.tolist(), changes[first_indexes].tolist(), strict=True):
            if relation_id in self._stale_ids:
                used_ids_by_index.setdefault(index, []).append(relation_id)
        for index in map(int, np.flatnonzero(kind == _TRUNCATE)):
            message = decode(data[index].as_py())
            assert isinstance(message, Truncate)
            used_ids_by_index.setdefault(index, []).extend(
                relation_id for relation_id in message.relation_ids if relation_id in self._stale_ids
            )
        return used_ids_by_index
