"""Relation and Type messages: when a description is valid, and the names of types that are not built in."""

from __future__ import annotations

import pytest

from pgsieve.decoding.errors import ProtocolError
from pgsieve.decoding.protocol.change_messages import RelationColumn
from pgsieve.decoding.protocol.messages import Insert, Relation, Type
from pgsieve.decoding.protocol.relations import RelationCache
from pgsieve.decoding.protocol.tuple_data import Null

INTEGER, MOOD = 23, 50_000


def relation(name: str, *type_oids: int) -> Relation:
    columns = tuple(RelationColumn(False, f"c{i}", oid, -1) for i, oid in enumerate(type_oids))
    return Relation(1, "public", name, "d", columns)


def test_the_last_description_counts() -> None:
    cache = RelationCache()
    cache.add(relation("before", INTEGER))
    cache.add(relation("after", INTEGER))
    assert cache.get(1).message.name == "after"


@pytest.mark.parametrize(("committed", "name"), [(True, "streamed"), (False, "session")])
def test_a_description_within_a_streamed_transaction_is_only_its_own_until_it_commits(
    committed: bool,
    name: str,
) -> None:
    cache = RelationCache()
    cache.add(relation("session", INTEGER))
    cache.add(relation("streamed", INTEGER), xid=7)
    assert (cache.get(1).message.name, cache.get(1, xid=7).message.name) == ("session", "streamed")
    assert cache.get(1, xid=8).message.name == "session"
    cache.end_stream(7, committed=committed)
    assert cache.get(1).message.name == name


@pytest.mark.parametrize(
    ("described", "name"),
    [
        (Type(MOOD, "public", "mood"), "public.mood"),
        (Type(MOOD, "public", "_mood"), "public.mood[]"),
        (Type(MOOD, "My Schema", "Mood"), '"My Schema"."Mood"'),
        (Type(MOOD, "", "int4"), "int4"),  # a domain over integer
    ],
)
def test_a_type_that_is_not_built_in_is_named_by_its_message(described: Type, name: str) -> None:
    cache = RelationCache()
    cache.add(described)
    cache.add(relation("t", INTEGER, MOOD))
    assert cache.get(1).type_names == ("integer", name)
    assert cache.get(1).type_messages == (described,)


def test_the_name_from_the_server_has_precedence() -> None:
    cache = RelationCache({MOOD: "mood[]"})
    cache.add(Type(MOOD, "public", "_mood"))
    cache.add(relation("t", MOOD))
    assert cache.get(1).type_names == ("mood[]",)


def test_an_undescribed_relation_is_an_error() -> None:
    cache = RelationCache()
    with pytest.raises(ProtocolError, match="no Relation message has described relation 1"):
        cache.get(1)
    with pytest.raises(ProtocolError, match=f"no Type message has described type {MOOD}"):
        cache.add(relation("t", MOOD))


def test_a_row_has_as_many_values_as_its_relation_has_columns() -> None:
    cache = RelationCache()
    cache.add(relation("t", INTEGER))
    cache.get(1).check_row_widths(Insert(1, (Null(),)))
    with pytest.raises(ProtocolError, match=r"has 2 values for 1 column\b"):
        cache.get(1).check_row_widths(Insert(1, (Null(), Null())))
