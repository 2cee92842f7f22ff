"""Patterns, and positions beyond the ends of strings. tests/properties compares every function with the server's."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from pgsieve.decoding.row_filters import regex as filter_regex
from pgsieve.decoding.row_filters.evaluation.strings import (
    STRING_FUNCTIONS_BY_SOURCE,
    conversion_function,
    like_matcher,
    modifier_cast_function,
    regex_matcher,
)
from pgsieve.decoding.row_filters.nodes import BPCHAR, INT4, TEXT, VARCHAR
from pgsieve.decoding.row_filters.strings import FilterValueError


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a%", ["a", "a\nb"], ["", "ba"]),
        ("%b", ["b", "abab"], ["ba"]),
        ("a%b%c", ["abc", "axbxbc", "abcc"], ["acb", "abcx"]),
        ("_%_", ["ab", "😀😀"], ["a", ""]),
        (r"\%\\", ["%\\"], ["x\\"]),
        ("", [""], ["a"]),
        ("%", ["", "a"], []),
        ("a.c", ["a.c"], ["abc"]),
    ],
)
def test_like(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [text for text in [*matching, *others] if like_matcher(pattern)(text)] == matching


def test_like_takes_linear_time() -> None:
    start = time.process_time()
    assert not like_matcher("%a%a%a%a%a%a%a%a%a%b")("a" * 3000)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^a.$", ["ab", "a\n"], ["ab\n", "xab"]),
        ("[[:punct:]]", ["!", "~", "]", "\\", "^", "[", "`"], ["a", " ", "é"]),
        ("[[:space:][:digit:]]", ["\v", "7"], ["x", "\u00a0"]),
        (r"^\w+$", ["a_1"], ["é", "a "]),
        ("[^😀]", ["a"], ["😀", ""]),
        ("a|b$", ["ax", "xb"], ["bx"]),
        ("[]^-]", ["]", "^", "-"], ["a"]),
    ],
)
def test_regex(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = regex_matcher(filter_regex.translate_pattern(pattern, None, has_ascii_classes=True))
    assert [text for text in [*matching, *others] if matches(text)] == matching


def test_parts() -> None:
    call: Callable[..., object] = lambda name, *operands: STRING_FUNCTIONS_BY_SOURCE[name](*operands)  # noqa: E731
    assert [call("text_substr", "abc", *at) for at in ((0, 2), (-1,), (2, 2**31 - 1), (-5, 3))] == [
        "a", "abc", "bc", "",
    ]  # fmt: skip
    assert [call("text_left", "abc", count) for count in (2, -1, -9, 0)] == ["ab", "ab", "", ""]
    assert [call("text_right", "abc", count) for count in (2, -1, 0, 9, -(1 << 31))] == [
        "bc",
        "bc",
        "",
        "abc",
        "",
    ]
    assert call("text_right_before_19", "abc", -(1 << 31)) == "abc"
    assert [call("split_part", "a,b", ",", place) for place in (1, -1, 3)] == ["a", "b", ""]
    assert [call(name, "ab", 5, "xy") for name in ("lpad", "rpad")] == ["xyxab", "abxyx"]
    assert [call(name, "ab", count) for name, count in (("lpad", 1), ("rpad", -1), ("lpad", 3))] == [
        "a",
        "",
        " ab",
    ]
    assert call("translate", "abca", "aba", "x") == "xcx"
    assert call("replace_text", "ab", "", "x") == "ab"


@pytest.mark.parametrize(
    ("sqlstate", "fails"),
    [
        ("22011", partial(STRING_FUNCTIONS_BY_SOURCE["bytea_substr"], b"abc", 1, -1)),
        ("22023", partial(STRING_FUNCTIONS_BY_SOURCE["split_part"], "a", ",", 0)),
        ("54000", partial(STRING_FUNCTIONS_BY_SOURCE["chr"], 0)),
        ("22025", partial(STRING_FUNCTIONS_BY_SOURCE["textlike"], "a", "\\")),
    ],
)
def test_an_error_has_postgresqls_sqlstate(sqlstate: str, fails: Callable[[], object]) -> None:
    with pytest.raises(FilterValueError) as raised:
        fails()
    assert raised.value.sqlstate == sqlstate


def test_conversions() -> None:
    unpadded = conversion_function(BPCHAR, TEXT)
    assert unpadded is not None
    assert unpadded(" a  ") == " a"
    assert [conversion_function(*pair) for pair in ((VARCHAR, TEXT), (BPCHAR, BPCHAR), (INT4, TEXT))] == [
        None,
        None,
        None,
    ]
    assert [modifier_cast_function(oid, 2)(text) for oid in (VARCHAR, BPCHAR) for text in ("a", "abc")] == [
        "a",
        "ab",
        "a ",
        "ab",
    ]
