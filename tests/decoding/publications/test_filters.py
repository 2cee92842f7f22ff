"""Row filters that are refused before any row is read."""

from __future__ import annotations

from pgsieve.decoding.errors import UnsupportedFilterError
from pgsieve.decoding.publications.catalog import Attribute, Table
from pgsieve.decoding.publications.filters import parse_table_filter

TABLE = Table(
    1, "public", "t", "r", "d", (Attribute("n", 1700, -1, "numeric"), Attribute("a", 23, -1, "integer"))
)


def refusal(text: str) -> str:
    try:
        parse_table_filter(TABLE, text)
    except UnsupportedFilterError as refused:
        return refused.message
    return ""


def test_a_filter_that_nests_too_deeply_is_refused_when_it_is_parsed() -> None:
    # From expressions that are evaluated, to expressions that are parsed but not evaluated, to expressions that are not even parsed.
    messages = [refusal(f"n{' + 1' * terms} > 2") for terms in range(100, 500, 20)]
    assert not messages[0]
    assert {message.rpartition(": ")[2] for message in messages} == {"", "it is nested too deeply"}


def test_a_long_sum_that_may_fail_is_parsed_quickly() -> None:
    assert parse_table_filter(TABLE, f"a{' + 1' * 60} > 2").columns == {"a"}
    assert parse_table_filter(TABLE, f"{'nullif(' * 20}a{', 1)' * 20} / a > 2").columns == {"a"}
