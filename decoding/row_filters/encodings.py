"""Whether a row filter gives the same result over UTF-8 text as over text in the database's own encoding.

In: a typed tree, and the name of the server's encoding. Out: nothing. Raises RefusedError for a filter that
depends on bytes or codes of characters, or whose comparisons have another result in UTF-8.

pgsieve evaluates filters over UTF-8. In most encodings each character has its own counterpart in Unicode
(section 23.3.1, and the maps of src/backend/utils/mb/Unicode). `ENCODINGS` lists the differences.
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
from pgsieve.decoding.values.builtin_types import ELEMENTS

UTF8: Final = "UTF8"


@dataclass(frozen=True, slots=True)
class Encoding:
    """The properties of text in an encoding, compared with the same text in UTF-8.

    - `characters`: each character is one character of Unicode.
    - `bytes`: the text has the same bytes.
    - `codes`: characters have the same numbers as in Unicode.
    - `order`: texts have the same order under the collation C.
    - `doubled`: the characters of Unicode that stand for several characters of the encoding. None: any
      character beyond ASCII may.
    """

    characters: bool = False
    bytes: bool = False
    codes: bool = False
    order: bool = False
    doubled: frozenset[str] | None = frozenset()


_ONE_TO_ONE: Final = Encoding(characters=True)
_UNKNOWN: Final = Encoding(doubled=None)
ENCODINGS: Final = MappingProxyType(
    {
        UTF8: Encoding(characters=True, bytes=True, codes=True, order=True),
        "LATIN1": Encoding(characters=True, codes=True, order=True),
        # No conversion: each byte is a character, so a character of UTF-8 may be several.
        "SQL_ASCII": Encoding(bytes=True, order=True),
        "EUC_JP": Encoding(characters=True, doubled=frozenset("№℡ⅠⅡⅢⅣⅤⅥⅦⅧⅨⅩ√∠∩∪∫∵≒≡⊥㈱")),
        "EUC_TW": Encoding(characters=True, doubled=None),
        # Some of its characters are two characters of Unicode.
        "EUC_JIS_2004": _UNKNOWN,
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

#: Functions by the property of the encoding that they need (varlena.c, oracle_compat.c).
_OF_BYTES: Final = frozenset(("textoctetlen", "bpcharoctetlen", "textbitlen", "md5_text"))
_OF_CODES: Final = frozenset(("ascii", "chr"))
_OF_CHARACTERS: Final = frozenset((
    "textlen", "bpcharlen", "text_substr", "text_left", "text_right", "text_reverse", "lpad", "rpad", "textpos", "translate",
    "btrim", "ltrim", "rtrim", "textlike",
))  # fmt: skip
#: Functions that look for their second operand, or its characters, in the first.
_SEARCHES: Final = frozenset((
    "textpos", "translate", "btrim", "ltrim", "rtrim", "textlike", "replace_text", "split_part", "text_starts_with",
    "arraycontains", "arraycontained", "arrayoverlap", "array_position",
))  # fmt: skip
#: Functions of text, or with text as their result, that do not depend on the encoding.
_ALIKE: Final = frozenset((
    "textcat", "repeat", "to_hex32", "to_hex64", "btrim1", "ltrim1", "rtrim1", "md5_bytea", "array_cardinality", "array_length",
    "array_lower", "array_ndims", "extract_date", "date_part_date", "extract_timestamp", "timestamp_part", "timestamp_trunc",
))  # fmt: skip

_RANGE_BEYOND_ASCII: Final = re.compile(r"-\\x\{[0-9a-f]{3,}\}|-\\x\{[89a-f][0-9a-f]\}")
_ESCAPED: Final = re.compile(r"\\x\{([0-9a-f]+)\}")


def require_alike(tree: Node, encoding: str) -> None:
    """Refuse a filter whose result may differ between UTF-8 and this encoding of the server."""
    if encoding == UTF8:
        return
    traits = ENCODINGS.get(encoding, _UNKNOWN)
    for construct in (_difference(node, traits) for node in _nodes(tree)):
        if construct is not None:
            raise _refused(construct, encoding)


def require_characters(encoding: str) -> None:
    """Refuse to cut a constant to a number of characters if the encoding's are not Unicode's."""
    if not ENCODINGS.get(encoding, _UNKNOWN).characters:
        raise _refused("its length", encoding)


def _refused(construct: str, encoding: str) -> RefusedError:
    return RefusedError(f"{construct} depends on the database's encoding, which is {encoding}, not {UTF8}")


def _nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in children(node):
        yield from _nodes(child)


def _difference(node: Node, traits: Encoding) -> str | None:
    """The name of the construct that makes this node depend on the encoding, or None."""
    match node:
        case Comparison(operator="=" | "<>", left=left, right=right):
            alike = _is_same(traits, left, right)
        case NotDistinct(left=left, right=right) | NullIf(left=left, right=right):
            alike = _is_same(traits, left, right)
        case Comparison(left=left):
            alike = traits.order or not _is_text(left)
        case Extreme():
            alike = traits.order or not _is_text(node)
        case FunctionCall():
            return None if _is_alike(node, traits) else node.name
        case Like(pattern=pattern):
            alike = (traits.characters or "_" not in pattern) and not _is_doubled(traits, pattern)
        case Regex(pattern=pattern):
            alike = _is_regex_alike(pattern, traits)
        case _:
            return None
    return None if alike else _NAMES.get(type(node), "the comparison of text")


_NAMES: Final[dict[type[Node], str]] = {Like: "LIKE", Regex: "the regular expression"}


def _is_alike(call: FunctionCall, traits: Encoding) -> bool:
    name = call.name
    if not any(map(_is_text, (call, *call.operands))):
        return True
    if name in _OF_BYTES:
        return traits.bytes
    if name in _OF_CODES:
        return False
    if name in _OF_CHARACTERS and not traits.characters:
        return False
    if name in _SEARCHES:
        return _is_same(traits, *call.operands[:2])
    return name in _OF_CHARACTERS or name in _ALIKE


def _is_regex_alike(pattern: str, traits: Encoding) -> bool:
    """Whether a pattern that `pgsieve.decoding.row_filters.regex` translated matches the same text.

    Ranges of a pattern depend on the codes of characters.
    """
    if not traits.characters or (_RANGE_BEYOND_ASCII.search(pattern) and not traits.codes):
        return False
    return not any(_is_doubled(traits, chr(int(code, 16))) for code in _ESCAPED.findall(pattern))


def _is_same(traits: Encoding, left: Node, right: Node) -> bool:
    """Whether two values are equal in the encoding if, and only if, they are equal in UTF-8.

    This holds if one of them has no doubled character.
    """
    return not (_is_text(left) and _is_text(right)) or any(
        _has_one_spelling(n, traits) for n in (left, right)
    )


def _has_one_spelling(node: Node, traits: Encoding) -> bool:
    if traits.doubled == frozenset():
        return True
    match node:
        case ColumnValue() | Element():
            return not _is_text(node)
        case Constant(value=str() as value):
            return not _is_doubled(traits, value)
        case _:
            return all(_has_one_spelling(child, traits) for child in children(node))


def _is_doubled(traits: Encoding, text: str) -> bool:
    if traits.doubled is None:
        return not text.isascii()
    return not traits.doubled.isdisjoint(text)


def _is_text(node: Node) -> bool:
    return node.type_oid in STRINGS or ELEMENTS.get(node.type_oid) in STRINGS
