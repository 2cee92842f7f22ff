"""Row filters that are refused before any row is read."""

from __future__ import annotations

import re
import sys

import pytest

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


def count_calls(text: str) -> int:
    """The calls of Python's functions that parsing takes, when all caches are filled."""
    parse_table_filter(TABLE, text)
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        parse_table_filter(TABLE, text)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "text",
    [
        "n{ + 1} > 2",
        "n / 2{ + n / 2} > 2",
        "n / 2{ + 1 / 3} > 2",
        "n{ * nullif(n, 1) / a} > 2",
        "n{ - abs(n) / 3} > 2",
        "{abs(}a / 2{)} > 2",
        "{- (}a / 2{)} > 2",
        "{coalesce(a / 2, }a{)} > 2",
        "{CASE WHEN a / 2 > 1 THEN 1 ELSE }a{ END} > 2",
        "a > 1{ AND n / 2 > 1}",
    ],
)
def test_the_work_of_parsing_grows_at_most_with_the_square_of_the_length(text: str) -> None:
    # The parts in braces are repeated.
    short, long = (
        "".join(part * (count if i % 2 else 1) for i, part in enumerate(re.split("[{}]", text)))
        for count in (15, 30)
    )
    assert count_calls(long) <= 4 * count_calls(short)


def test_a_long_sum_that_may_fail_is_parsed_quickly() -> None:
    assert parse_table_filter(TABLE, f"a{' + 1' * 60} > 2").columns == {"a"}
    assert parse_table_filter(TABLE, f"{'nullif(' * 20}a{', 1)' * 20} / a > 2").columns == {"a"}
