"""Regular expressions and LIKE patterns: their form for the evaluator, and patterns that have none."""

from __future__ import annotations

import string

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from pgsieve.decoding.row_filters.constants import InvalidConstantError, RefusedError
from pgsieve.decoding.row_filters.letter_case import ASCII
from pgsieve.decoding.row_filters.nodes import BOOL, TEXT, ColumnValue, Constant, FunctionCall, Like
from pgsieve.decoding.row_filters.patterns import make_like
from pgsieve.decoding.row_filters.regex import similar_to_escape, translate_pattern

COLUMN = ColumnValue("c", "C", type_oid=TEXT)


@pytest.mark.parametrize(
    ("pattern", "re2"),
    [
        ("ab", "(?s)ab"),
        ("^a.b$", r"(?s)\Aa.b\z"),
        ("a|b(c|d)", "(?s)a|b(?:c|d)"),
        ("a{2,3}?b*", "(?s)a{2,3}b*"),  # which of several matches is chosen makes no difference
        ("[^a-c]", "(?s)[^a-c]"),
        ("[]a]", r"(?s)[\x{5d}a\x00]"),
        (r"\.\t", r"(?s)\x{2e}\x{9}"),
        (r"\d[[:alpha:]]", r"(?s)[0-9][A-Za-z\x00]"),
        ("é", r"(?s)\x{e9}"),
        (r"\W[^\s]", r"(?s)[^0-9A-Za-z_][^\t-\r ]"),
        ("((a|b)*c){2,}", "(?s)(?:(?:a|b)*c){2,}"),
    ],
)
def test_a_pattern_that_re2_matches_in_the_same_way(pattern: str, re2: str) -> None:
    assert translate_pattern(pattern, None, has_ascii_classes=True) == re2


def test_without_case_each_letter_is_matched_with_its_variants() -> None:
    assert translate_pattern("a[b-d]1", ASCII, has_ascii_classes=True) == r"(?s)[aA\x00][b-dBCD\x00]1"


@pytest.mark.parametrize(
    "form", ["[{0}{1}]", "a|[{0}{1}]|b", "[{0}{1}]|[zZ]", "(?:[{0}{1}])|a", "x|[{0}{1}]+"]
)
def test_letters_of_a_set_match_no_other_letter_that_unicode_folds_to_them(form: str) -> None:
    texts = pa.array([character for character in map(chr, range(0x80, 0x3000)) if character.isalpha()])
    for letter in string.ascii_lowercase:
        pattern = translate_pattern(form.format(letter, letter.upper()), None, has_ascii_classes=True)
        assert not pc.any(pc.match_substring_regex(texts, pattern)).as_py(), (letter, pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("((a{100}){100})", "repeat too often"),
        ("a**", "a quantifier follows a quantifier"),
        ("*a", "nothing to repeat"),
        ("^*", "follows an anchor"),
        ("a{256}", "bounds"),
        ("a{3,2}", "bounds"),
        ("a{1", "bounds"),
        ("a{1000}", "bounds"),
        (r"(a)\1", "not supported"),
        ("(?=a)", r"with \(\?"),
        ("***=a", "begins with"),
        ("[b-a]", "range"),
        ("[a-b-c]", "range"),
        ("[[.a.]]", r"\[\. or \[="),
        ("[a-[:alpha:]]", r"\[\. or \[="),
        ("(a", "parentheses|too early"),
        ("a)", "parentheses"),
        ("[a", "too early"),
    ],
)
def test_a_pattern_that_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        translate_pattern(pattern, None, has_ascii_classes=True)


@pytest.mark.parametrize("pattern", [r"\w", "[[:alpha:]]"])
def test_classes_of_letters_depend_on_the_collation(pattern: str) -> None:
    with pytest.raises(RefusedError, match="depends on the collation"):
        translate_pattern(pattern, None, has_ascii_classes=False)


@pytest.mark.parametrize(
    ("pattern", "regular"),
    [
        ("a%_", "^(?:a.*.)$"),
        ("a.b", r"^(?:a\.b)$"),
        (r"\%", r"^(?:\%)$"),
        ("[%_]", "^(?:[%_])$"),
        ("[[:alpha:]]_[^]", "^(?:[[:alpha:]].[^])$"),
        ("(a|b)", "^(?:(?:a|b))$"),
    ],
)
def test_similar_to_is_a_regular_expression_over_the_whole_string(pattern: str, regular: str) -> None:
    assert similar_to_escape(pattern, "\\") == regular


@pytest.mark.parametrize("pattern", ["[[:alpha:]%]", "[a[b]_", "[]_]", "[^]%]"])
def test_servers_end_these_sets_of_similar_to_at_different_places(pattern: str) -> None:
    with pytest.raises(RefusedError, match="minor version"):
        similar_to_escape(pattern, "\\")


def test_an_escape_is_one_character() -> None:
    with pytest.raises(InvalidConstantError, match="invalid escape string"):
        similar_to_escape("a", "##")
    with pytest.raises(InvalidConstantError, match="invalid escape string"):
        make_like(COLUMN, Constant("a", type_oid=TEXT), "##")


@pytest.mark.parametrize(
    ("pattern", "escape", "canonical"),
    [
        ("a%_", "\\", "a%_"),
        ("a#%", "#", r"a\%"),
        ("a\\b", "#", r"a\\b"),
        ("#a##", "#", "a#"),
        ("a\\%", "", r"a\\%"),
    ],
)
def test_a_like_pattern_escapes_by_backslash_whatever_its_escape(
    pattern: str, escape: str, canonical: str
) -> None:
    assert make_like(COLUMN, Constant(pattern, type_oid=TEXT), escape) == Like(COLUMN, canonical)


def test_a_like_pattern_that_ends_with_its_escape_fails_only_for_rows_that_reach_its_end() -> None:
    computed = make_like(COLUMN, Constant("a\\", type_oid=TEXT))
    assert computed == FunctionCall(
        "textlike", (COLUMN, Constant("a\\", type_oid=TEXT)), can_fail=True, type_oid=BOOL
    )
