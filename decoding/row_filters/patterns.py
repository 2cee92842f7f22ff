"""LIKE, ILIKE and regular expressions of a row filter.

In: the nodes of a string and of the pattern. Out: the node of the match. Raises RefusedError for a pattern that
pgsieve cannot match exactly as PostgreSQL does, and InvalidConstantError for an ESCAPE of several characters.

PostgreSQL documentation, Pattern Matching.
"""

from __future__ import annotations

from collections.abc import Iterator

from pgsieve.decoding.row_filters import collations
from pgsieve.decoding.row_filters import regex as filter_regex
from pgsieve.decoding.row_filters.constants import InvalidConstantError, RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseMappingFinder
from pgsieve.decoding.row_filters.nodes import (
    BOOL,
    STRINGS,
    TEXT,
    UNKNOWN,
    VARCHAR,
    CaseChange,
    Constant,
    FunctionCall,
    Like,
    Node,
    Regex,
)
from pgsieve.decoding.row_filters.type_rules import coerce, resolve_unknown_as_text


def _convert_operands(name: str, operand: Node, pattern: Node) -> tuple[Node, Node]:
    operand = resolve_unknown_as_text(operand)
    if operand.type_oid not in STRINGS or pattern.type_oid not in (*STRINGS, UNKNOWN):
        raise RefusedError(f"{name} is supported on strings only")
    pattern = coerce(pattern, TEXT)
    collations.require_collation((operand, pattern), needs_order=False)
    return coerce(operand, TEXT) if operand.type_oid == VARCHAR else operand, pattern


def make_like(
    operand: Node, pattern: Node, escape: str = "\\", *, case_mappings: CaseMappingFinder | None = None
) -> Node:
    """Return `operand LIKE pattern ESCAPE escape`; or ILIKE if `case_mappings` has the case mappings of collations.

    For ILIKE, PostgreSQL changes both sides to lower case. In single-byte encodings it changes one character after
    the other while it matches, with the same result (Generic_Text_IC_like() in src/backend/utils/adt/like.c).
    """
    operand, pattern = _convert_operands("LIKE", operand, pattern)
    mapping = None
    if case_mappings is not None:
        mapping = collations.case_mapping((operand, pattern), "lower", case_mappings)
    pattern = collations.strip_collation(pattern)
    if mapping is not None:
        # A call of lower() would remove the padding of character(n). ILIKE keeps the padding (bpchariclike).
        operand = CaseChange("lower", operand, mapping, type_oid=TEXT)
    if not isinstance(pattern, Constant):
        if escape != "\\":
            raise RefusedError("ESCAPE is supported on a constant pattern only")
        if mapping is not None:
            pattern = CaseChange("lower", pattern, mapping, type_oid=TEXT)
        return _make_textlike_call(operand, pattern)
    if pattern.value is None:
        return Constant(None, type_oid=BOOL)
    text = str(pattern.value)
    if len(escape) > 1:
        raise InvalidConstantError("invalid escape string", "22025")
    canonical_text = _make_canonical_pattern(text, escape)
    # PostgreSQL replaces the escape character by a backslash (like_escape) before it changes the case.
    final_text = "".join(_escape_with_backslash(text, escape)) if canonical_text is None else canonical_text
    if mapping is not None:
        final_text = mapping.change("lower", final_text)
    if canonical_text is None:
        return _make_textlike_call(operand, Constant(final_text, type_oid=TEXT))
    return Like(operand, final_text)


def _make_textlike_call(operand: Node, pattern: Node) -> FunctionCall:
    """Return a match that may raise an error: its pattern depends on the row, or ends with the escape character."""
    return FunctionCall("textlike", (operand, pattern), can_fail=True, type_oid=BOOL)


def _escape_with_backslash(pattern: str, escape: str) -> Iterator[str]:
    """Rewrite a pattern with the backslash as its escape character; yields the parts of the new pattern."""
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            yield f"\\{next(characters, '')}"
        else:
            yield "\\\\" if character == "\\" else character


def _make_canonical_pattern(pattern: str, escape: str) -> str | None:
    """Return the same pattern with a backslash only before a literal %, _ or backslash.

    Returns None if the pattern ends with its escape character.
    """
    parts = []
    characters = iter(pattern)
    for character in characters:
        is_escaped = character == escape
        symbol = next(characters, None) if is_escaped else character
        if symbol is None:
            return None
        parts.append(f"\\{symbol}" if symbol == "\\" or (is_escaped and symbol in "%_") else symbol)
    return "".join(parts)


def make_regex(operand: Node, pattern: Node, *, case_mappings: CaseMappingFinder | None = None) -> Node:
    """Return `operand ~ pattern`; or `operand ~* pattern` if `case_mappings` has the case mappings of collations."""
    operand, pattern = _convert_operands("~", operand, pattern)
    has_only_ascii_letters = collations.has_only_ascii_letters((operand, pattern))
    mapping = None
    if case_mappings is not None:
        mapping = collations.case_mapping((operand, pattern), "lower", case_mappings)
        if not mapping.has_english_ascii_case():
            # Under some of the collations that fail this test, regular expressions change ASCII letters as the collation
            # C does (regc_pg_locale.c). pgsieve does not know which collations these are.
            raise RefusedError("its collation does not change the case of ASCII letters as English does")
    pattern = collations.strip_collation(pattern)
    if not isinstance(pattern, Constant):
        raise RefusedError("only a constant regular expression is supported")
    if pattern.value is None:
        return Constant(None, type_oid=BOOL)
    text = str(pattern.value)
    return Regex(
        operand, filter_regex.translate_pattern(text, mapping, has_ascii_classes=has_only_ascii_letters)
    )
