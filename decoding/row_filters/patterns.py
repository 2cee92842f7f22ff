"""LIKE, ILIKE and regular expressions of a row filter (section 9.7).

In: nodes, a string and its pattern. Out: nodes. Raises RefusedError for a pattern without an exact
counterpart.
"""

from __future__ import annotations

from collections.abc import Iterator

from pgsieve.decoding.row_filters import collations
from pgsieve.decoding.row_filters import regex as filter_regex
from pgsieve.decoding.row_filters.constants import InvalidConstantError, RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseMappings
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
from pgsieve.decoding.row_filters.type_rules import coerce, known


def _operands(name: str, operand: Node, pattern: Node) -> tuple[Node, Node]:
    operand = known(operand)
    if operand.type_oid not in STRINGS or pattern.type_oid not in (*STRINGS, UNKNOWN):
        raise RefusedError(f"{name} is supported on strings only")
    pattern = coerce(pattern, TEXT)
    collations.require_collation((operand, pattern), ordering=False)
    return coerce(operand, TEXT) if operand.type_oid == VARCHAR else operand, pattern


def like(
    operand: Node, pattern: Node, escape: str = "\\", *, ignore_case: CaseMappings | None = None
) -> Node:
    """`operand LIKE pattern ESCAPE escape`, or ILIKE, which PostgreSQL evaluates in lower case on both sides.

    It does so in every multi-byte encoding. In others it converts one character after the other, with the
    same result (Generic_Text_IC_like() in src/backend/utils/adt/like.c).
    """
    operand, pattern = _operands("LIKE", operand, pattern)
    mapping = None
    if ignore_case is not None:
        mapping = collations.case_mapping((operand, pattern), "lower", ignore_case)
        # Unlike a call of lower(): that takes text, and here the padding of character(n) counts
        # (bpchariclike).
        operand = CaseChange("lower", operand, mapping, type_oid=TEXT)
    if not isinstance(pattern, Constant):
        if escape != "\\":
            raise RefusedError("ESCAPE is supported on a constant pattern only")
        if mapping is not None:
            pattern = CaseChange("lower", pattern, mapping, type_oid=TEXT)
        return _computed(operand, pattern)
    if pattern.value is None:
        return Constant(None, type_oid=BOOL)
    text = str(pattern.value)
    if len(escape) > 1:
        raise InvalidConstantError("invalid escape string", "22025")
    canonical = _canonical(text, escape)
    # The escape is replaced before the case is changed (like_escape).
    final = "".join(_rewritten(text, escape)) if canonical is None else canonical
    if mapping is not None:
        final = mapping.changed("lower", final)
    return _computed(operand, Constant(final, type_oid=TEXT)) if canonical is None else Like(operand, final)


def _computed(operand: Node, pattern: Node) -> FunctionCall:
    """A match whose pattern differs from row to row, or whose pattern's end fails once a row's value reaches it."""
    return FunctionCall("textlike", (operand, pattern), fails=True, type_oid=BOOL)


def _rewritten(pattern: str, escape: str) -> Iterator[str]:
    r"""The pattern with a backslash before every character that `escape` escapes, and before every backslash."""
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            meant = next(characters, "")
            yield f"\\{meant}"
        else:
            yield "\\\\" if character == "\\" else character


def _canonical(pattern: str, escape: str) -> str | None:
    """The pattern with backslashes only before %, _ and themselves.

    None for a pattern that ends with its escape.
    """
    parts = []
    characters = iter(pattern)
    for character in characters:
        escaped = character == escape
        meant = next(characters, None) if escaped else character
        if meant is None:
            return None
        parts.append(f"\\{meant}" if meant == "\\" or (escaped and meant in "%_") else meant)
    return "".join(parts)


def regex(operand: Node, pattern: Node, *, ignore_case: CaseMappings | None = None) -> Node:
    """`operand ~ pattern`, or ~*."""
    operand, pattern = _operands("~", operand, pattern)
    ascii_letters = collations.has_ascii_letters((operand, pattern))
    mapping = None
    if ignore_case is not None:
        mapping = collations.case_mapping((operand, pattern), "lower", ignore_case)
        if not mapping.is_plain_in_ascii():
            # Regular expressions force C's behavior on ASCII, under some collations (regc_pg_locale.c).
            raise RefusedError("its collation has another case of ASCII letters than English")
    if not isinstance(pattern, Constant):
        raise RefusedError("only a constant regular expression is supported")
    if pattern.value is None:
        return Constant(None, type_oid=BOOL)
    text = str(pattern.value)
    return Regex(operand, filter_regex.translated(text, mapping, ascii_classes=ascii_letters))
