"""Missing Relation messages are inserted before the first change that needs them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.change_messages import RelationColumn
from pgsieve.decoding.protocol.descriptions import RelationDescriptions
from pgsieve.decoding.protocol.messages import Insert, Message, Relation, Truncate, Type, encode
from pgsieve.decoding.protocol.tuple_data import Null

MOOD = Type(50_000, "public", "mood")


def relation(relation_id: int, name: str, type_oid: int = 23) -> Relation:
    return Relation(relation_id, "public", name, "d", (RelationColumn(False, "c", type_oid, -1),))


def insert(relation_id: int) -> Insert:
    return Insert(relation_id, (Null(),))


def truncate(*relation_ids: int) -> Truncate:
    return Truncate(relation_ids, cascade=False, restart_identity=False)


def binary(*messages: Message) -> pa.Array:
    return pa.array([encode(message) for message in messages], pa.binary())


def passed(descriptions: RelationDescriptions, *messages: Message) -> list[bytes]:
    return [
        value
        for part in descriptions.insert_missing_descriptions(binary(*messages))
        for value in part.to_pylist()
    ]


def raw(*messages: Message) -> list[bytes]:
    return [encode(message) for message in messages]


A, B = relation(1, "a"), relation(2, "b", MOOD.type_oid)


def test_a_session_passes_unchanged() -> None:
    descriptions = RelationDescriptions()
    assert passed(descriptions, A, insert(1), insert(1)) == raw(A, insert(1), insert(1))


def test_in_a_new_slice_each_relation_is_described_again_with_its_types_before_its_first_change() -> None:
    descriptions = RelationDescriptions()
    passed(descriptions, A, MOOD, B, insert(1), insert(2))
    descriptions.begin_slice()
    changes = (insert(2), insert(1), insert(2))
    assert passed(descriptions, *changes) == raw(MOOD, B, insert(2), A, insert(1), insert(2))
    assert passed(descriptions, *changes) == raw(*changes)


def test_a_truncate_needs_its_relations_described_too() -> None:
    descriptions = RelationDescriptions()
    passed(descriptions, A, MOOD, B)
    descriptions.begin_slice()
    assert passed(descriptions, truncate(1, 2)) == raw(A, MOOD, B, truncate(1, 2))


def test_a_relation_that_the_publisher_describes_is_not_described_twice() -> None:
    descriptions = RelationDescriptions()
    passed(descriptions, A)
    descriptions.begin_slice()
    renamed = relation(1, "renamed")
    assert passed(descriptions, renamed, insert(1)) == raw(renamed, insert(1))


def test_after_a_delayed_transaction_the_last_description_is_repeated() -> None:
    descriptions = RelationDescriptions()
    kept_apart = descriptions.read_descriptions(binary(A))
    renamed = relation(1, "renamed")
    passed(descriptions, renamed, insert(1))
    descriptions.record_replayed_descriptions(
        kept_apart
    )  # its description is older than the last one that was passed on
    assert passed(descriptions, insert(1)) == raw(renamed, insert(1))


def test_a_truncated_change_is_an_error() -> None:
    descriptions = RelationDescriptions()
    passed(descriptions, A)
    descriptions.begin_slice()
    with pytest.raises(ProtocolError, match="ends before its relation"):
        list(descriptions.insert_missing_descriptions(pa.array([b"I\0\0"], pa.binary())))
