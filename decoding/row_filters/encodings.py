"""Checks that a row filter gives the same result over UTF-8 text as over text in the database's encoding.

In: a filter's tree, and the name of the database's encoding. Out: nothing. Raises RefusedError if the filter
depends on bytes or codes of characters, or if its comparisons can have another result in UTF-8.

The publisher evaluates a filter over text in the database's encoding. pgsieve receives the text in UTF-8 and
evaluates the filter over UTF-8. In most encodings each character has exactly one counterpart in Unicode (PostgreSQL
documentation, Supported Character Sets; src/backend/utils/mb/Unicode). `ENCODINGS` says which encodings differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pgsieve.decoding.row_filters.constants import RefusedError
from pgsieve.decoding.row_filters.nodes import (
    STRINGS,
    ColumnValue,
    Comparison,
    Constant,
    Element,
    Extreme,
    FunctionCall,
    Like,
    Node,
    NotDistinct,
    NullIf,
    Regex,
    children,
)
from pgsieve.decoding.values.builtin_types import ELEMENT_OIDS

UTF8: Final = "UTF8"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The properties of text in an encoding, compared with the same text in UTF-8.

    - `has_same_characters`: each character of the encoding is one character of Unicode.
    - `has_same_bytes`: the text has the same bytes.
    - `has_same_codes`: characters have the same numbers as in Unicode.
    - `has_same_order`: texts have the same order under the collation C.
    - `ambiguous_characters`: the characters of Unicode that stand for several characters of the encoding. Texts that are
      different in the encoding can be equal in Unicode because of them. None means that any character beyond ASCII
      may be ambiguous.
    """

    has_same_characters: bool = False
    has_same_bytes: bool = False
    has_same_codes: bool = False
    has_same_order: bool = False
    ambiguous_characters: frozenset[str] | None = frozenset()


_ONE_TO_ONE: Final = Encoding(has_same_characters=True)
_UNKNOWN_ENCODING: Final = Encoding(ambiguous_characters=None)
ENCODINGS: Final = MappingProxyType(
    {
        UTF8: Encoding(has_same_characters=True, has_same_bytes=True, has_same_codes=True, has_same_order=True),
        "LATIN1": Encoding(has_same_characters=True, has_same_codes=True, has_same_order=True),
        # The server does not convert this encoding, and counts each byte as a character. So one character of UTF-8
        # may count as several characters.
        "SQL_ASCII": Encoding(has_same_bytes=True, has_same_order=True),
        "EUC_JP": Encoding(has_same_characters=True, ambiguous_characters=frozenset("№℡ⅠⅡⅢⅣⅤⅥⅦⅧⅨⅩ√∠∩∪∫∵≒≡⊥㈱")),
        "EUC_TW": Encoding(has_same_characters=True, ambiguous_characters=None),
        # Some characters of this encoding become two characters of Unicode.
        "EUC_JIS_2004": _UNKNOWN_ENCODING,
        **dict.fromkeys(
            (
                "EUC_CN", "EUC_KR", "ISO_8859_5", "ISO_8859_6", "ISO_8859_7", "ISO_8859_8", "KOI8R", "KOI8U", "LATIN10",
                "LATIN2", "LATIN3", "LATIN4", "LATIN5", "LATIN6", "LATIN7", "LATIN8", "LATIN9", "WIN1250", "WIN1251",
                "WIN1252", "WIN1253", "WIN1254", "WIN1255", "WIN1256", "WIN1257", "WIN1258", "WIN866", "WIN874",
            ),
            _ONE_TO_ONE,
        ),
    }
)  # fmt: skip

#: The functions whose results depend on the bytes, on the codes, or on the number of characters of a text
#: (varlena.c, oracle_compat.c).
_BYTE_FUNCTIONS: Final = frozenset(("textoctetlen", "bpcharoctetlen", "textbitlen", "md5_text"))
_CODE_FUNCTIONS: Final = frozenset(("ascii", "chr"))
_CHARACTER_FUNCTIONS: Final = frozenset((
    "textlen", "bpcharlen", "text_substr", "text_left", "text_right", "text_reverse", "lpad", "rpad", "textpos", "translate",
    "btrim", "ltrim", "rtrim", "textlike",
))  # fmt: skip
#: The functions that search their first operand for the second operand, or for the characters of the second operand.
_SEARCH_FUNCTIONS: Final = frozenset((
    "textpos", "translate", "btrim", "ltrim", "rtrim", "textlike", "replace_text", "split_part", "text_starts_with",
    "arraycontains", "arraycontained", "arrayoverlap", "array_position",
))  # fmt: skip
#: The functions whose operands or result are text, and whose result does not depend on the encoding.
_INDEPENDENT_FUNCTIONS: Final = frozenset((
    "textcat", "repeat", "to_hex32", "to_hex64", "btrim1", "ltrim1", "rtrim1", "md5_bytea", "array_cardinality", "array_length",
    "array_lower", "array_ndims", "extract_date", "date_part_date", "extract_timestamp", "timestamp_part", "timestamp_trunc",
))  # fmt: skip

_RANGE_BEYOND_ASCII: Final = re.compile(r"-\\x\{[0-9a-f]{3,}\}|-\\x\{[89a-f][0-9a-f]\}")
_ESCAPED_CHARACTER: Final = re.compile(r"\\x\{([0-9a-f]+)\}")


def require_same_result(tree: Node, encoding: str) -> None:
    """Raise RefusedError if a filter's result can differ between UTF-8 and the database's encoding."""
    if encoding == UTF8:
        return
    traits = ENCODINGS.get(encoding, _UNKNOWN_ENCODING)
    for construct in (_find_dependent_construct(node, traits) for node in _iterate_nodes(tree)):
        if construct is not None:
            raise _make_encoding_error(construct, encoding)


def require_characters(encoding: str) -> None:
    """Raise RefusedError if the encoding does not count characters as Unicode does.

    The caller is about to cut a text at a number of characters.
    """
    if not ENCODINGS.get(encoding, _UNKNOWN_ENCODING).has_same_characters:
        raise _make_encoding_error("its length", encoding)


def _make_encoding_error(construct: str, encoding: str) -> RefusedError:
    return RefusedError(f"{construct} depends on the database's encoding, which is {encoding}, not {UTF8}")


def _iterate_nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from _iterate_nodes(child)


def _find_dependent_construct(node: Node, traits: Encoding) -> str | None:
    """Return the name of a construct, for the message, if this node depends on the encoding; otherwise None."""
    match node:
        case Comparison(operator="=" | "<>", left=left, right=right):
            is_independent = _has_same_equality(traits, left, right)
        case NotDistinct(left=left, right=right) | NullIf(left=left, right=right):
            is_independent = _has_same_equality(traits, left, right)
        case Comparison(left=left):
            is_independent = traits.has_same_order or not _is_text(left)
        case Extreme():
            is_independent = traits.has_same_order or not _is_text(node)
        case FunctionCall():
            return None if _is_function_independent(node, traits) else node.name
        case Like(pattern=pattern):
            is_independent = (traits.has_same_characters or "_" not in pattern) and not _is_ambiguous(
                traits, pattern
            )
        case Regex(pattern=pattern):
            is_independent = _is_regex_independent(pattern, traits)
        case _:
            return None
    return None if is_independent else _CONSTRUCT_NAMES.get(type(node), "the comparison of text")


_CONSTRUCT_NAMES: Final[dict[type[Node], str]] = {Like: "LIKE", Regex: "the regular expression"}


def _is_function_independent(call: FunctionCall, traits: Encoding) -> bool:
    name = call.name
    if not any(map(_is_text, (call, *call.operands))):
        return True
    if name in _BYTE_FUNCTIONS:
        return traits.has_same_bytes
    if name in _CODE_FUNCTIONS:
        return False
    if name in _CHARACTER_FUNCTIONS and not traits.has_same_characters:
        return False
    if name in _SEARCH_FUNCTIONS:
        return _has_same_equality(traits, *call.operands[:2])
    return name in _CHARACTER_FUNCTIONS or name in _INDEPENDENT_FUNCTIONS


def _is_regex_independent(pattern: str, traits: Encoding) -> bool:
    """Whether a pattern in RE2's syntax matches the same texts in the encoding as in UTF-8.

    A range such as [à-é] depends on the codes of characters.
    """
    if not traits.has_same_characters or (_RANGE_BEYOND_ASCII.search(pattern) and not traits.has_same_codes):
        return False
    return not any(_is_ambiguous(traits, chr(int(code, 16))) for code in _ESCAPED_CHARACTER.findall(pattern))


def _has_same_equality(traits: Encoding, left: Node, right: Node) -> bool:
    """Whether two values are equal in the encoding if, and only if, they are equal in UTF-8.

    This is so if one of the values has no ambiguous character.
    """
    return not (_is_text(left) and _is_text(right)) or any(_is_unambiguous(n, traits) for n in (left, right))


def _is_unambiguous(node: Node, traits: Encoding) -> bool:
    if traits.ambiguous_characters == frozenset():
        return True
    match node:
        case ColumnValue() | Element():
            return not _is_text(node)
        case Constant(value=str() as value):
            return not _is_ambiguous(traits, value)
        case _:
            return all(_is_unambiguous(child, traits) for child in children(node))


def _is_ambiguous(traits: Encoding, text: str) -> bool:
    if traits.ambiguous_characters is None:
        return not text.isascii()
    return not traits.ambiguous_characters.isdisjoint(text)


def _is_text(node: Node) -> bool:
    return node.type_oid in STRINGS or ELEMENT_OIDS.get(node.type_oid) in STRINGS
