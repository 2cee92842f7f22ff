"""Names in the configuration file, as SQL writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgsieve.pipelines.config.identifiers import parse_qualified_name, quote_name


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("public.orders", ("public", "orders")),
        ("Public.ORDERS", ("public", "orders")),
        ('"Public"."a.b"', ("Public", "a.b")),
        ('a."b""c"', ("a", 'b"c')),
        ("größe.ÄÖ", ("größe", "ÄÖ")),
        ("a$1._b", ("a$1", "_b")),
    ],
)
def test_qualified_names_are_read_as_sql_reads_them(text, parts):
    assert parse_qualified_name(text, 2) == parts


@pytest.mark.parametrize(
    "text", ["", ".", "a.", ".a", "a..b", 'a."b', 'a"b".c', "a.b c", "a.1b", "a. b", '"a""', "a;b"]
)
def test_invalid_names_are_refused(text):
    with pytest.raises(ValueError, match="is not a name as SQL writes it"):
        parse_qualified_name(text, 2)


def test_an_empty_and_a_long_name_are_refused():
    with pytest.raises(ValueError, match="has an empty name between double quotes"):
        parse_qualified_name('a.""', 2)
    with pytest.raises(ValueError, match="has a name longer than 63 bytes"):
        parse_qualified_name(f"a.{'b' * 64}", 2)


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=15), min_size=1, max_size=3
    )
)
def test_a_quoted_name_is_read_back(parts):
    assert parse_qualified_name(quote_name(*parts), len(parts)) == tuple(parts)
