"""PostgreSQL's names in Dagster: valid names stay, no name is refused, and no two names become the same."""

from __future__ import annotations

import dagster as dg
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pgsieve.assets.encoded_names import (
    decode_identifier,
    decode_partition_key,
    encode_identifier,
    encode_partition_key,
    group_by_distinct_names,
    name_outputs,
)

#: Characters that PostgreSQL allows in a name: all except NUL. A name has at most 63 bytes.
names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: len(text.encode()) <= 63
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("orders", "orders"),
        ("order_lines_2", "order_lines_2"),
        ("User", "User"),
        ("_prisma_migrations", "_prisma_migrations"),
        ("order items", "order-20-items"),
        ("v1.2", "v1-2E-2"),
        ("a-b", "a-2D-b"),
        ("Größe", "Gr-F6--DF-e"),
        ('say "hi"', "say-20--22-hi-22-"),
    ],
)
def test_names_of_assets_in_dagster(name: str, text: str) -> None:
    assert encode_identifier(name) == text
    assert decode_identifier(text) == name


@given(st.tuples(names, names))
@example(("a.b", "c"))
@example(("a", "b.c"))
@example(("-41-", "41"))
@example(("...", ",[a...b]\n"))
def test_a_table_is_read_back_from_its_dagster_partition(name: tuple[str, str]) -> None:
    key = encode_partition_key(name)
    assert decode_partition_key(key) == name
    assert not set(key) & set(",/\\\n\t \"'[]")
    assert "..." not in key


@given(
    st.sets(
        st.tuples(
            names | st.text("aA_-.", min_size=1, max_size=4), names | st.text("aA_-.", min_size=1, max_size=4)
        )
    )
)
@example({("a__b", "c"), ("a", "b__c"), ("a_", "b"), ("a", "_b"), ("a_b", "c"), ("a", "b_c")})
def test_no_two_tables_have_the_same_op_name(tables: set[tuple[str, str]]) -> None:
    keys = {dg.AssetKey(["sales", *map(encode_identifier, name)]): name for name in tables}
    assert len(keys) == len(tables)
    outputs = name_outputs(keys)
    assert len(set(outputs.values())) == len(tables)
    groups = group_by_distinct_names(keys)
    assert {key: name for group in groups for key, name in group.items()} == keys
    for group in groups:
        for named in (dg.AssetKey.to_python_identifier, lambda key: "_".join(key.path).replace("-", "_")):
            assert len({named(key) for key in group}) == len(group)
