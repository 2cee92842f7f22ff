"""PostgreSQL's functions of strings and bytes, for row filters.

In: Python values, none of them NULL. Out: the value that PostgreSQL's function returns. Raises FilterValueError where
the server would raise an error (varlena.c, oracle_compat.c, like_match.c).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import md5, sha256, sha512
from types import MappingProxyType
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.row_filters.nodes import BOOL, BPCHAR, STRINGS, VARCHAR
from pgsieve.decoding.row_filters.strings import STRING_FUNCTIONS, FilterValueError

_MIN_INTEGER: Final = -(1 << 31)
_StringOrBytes = TypeVar("_StringOrBytes", str, bytes)

# --- parts -------------------------------------------------------------------------------


def _substring(value: _StringOrBytes, start: int, length: int | None = None) -> _StringOrBytes:
    """Return `length` characters or bytes from position `start` on (text_substring).

    Positions count from 1. `start` may be less than 1, and the positions before 1 count as part of `length`.
    """
    start_index = max(start, 1) - 1
    if length is None:
        return value[start_index:]
    if length < 0:
        raise FilterValueError("negative substring length not allowed", sqlstate="22011")
    return value[start_index : max(start + length - 1, 0)]


def _take_left(text: str, count: int) -> str:
    """Return the first `count` characters; for a negative count all but the last `-count` characters."""
    return text[:count]


def _take_right(text: str, count: int) -> str:
    """Return the last `count` characters; for a negative count all but the first `-count` characters."""
    return text[max(len(text) - count, 0) :] if count >= 0 else text[-count:]


def _take_right_before_19(text: str, count: int) -> str:
    # Servers before 19 negate the count. The negation of the least integer overflows to the same integer. So the
    # result is the whole text.
    return text if count == _MIN_INTEGER else _take_right(text, count)


def _split_part(text: str, delimiter: str, field_position: int) -> str:
    if field_position == 0:
        raise FilterValueError("field position must not be zero", sqlstate="22023")
    fields = text.split(delimiter) if delimiter else [text]
    index = field_position - 1 if field_position > 0 else len(fields) + field_position
    return fields[index] if 0 <= index < len(fields) else ""


def _find_position(text: str, sought_text: str) -> int:
    return text.find(sought_text) + 1


# --- changes -----------------------------------------------------------------------------


def _replace(text: str, sought_text: str, replacement: str) -> str:
    return text.replace(sought_text, replacement) if sought_text else text


def _translate(text: str, characters: str, replacements: str) -> str:
    """Replace each of `characters` by the replacement at the same position, or remove it if there is none."""
    table: dict[int, str] = {}
    for index, character in enumerate(characters):
        table.setdefault(ord(character), replacements[index : index + 1])
    return text.translate(table)


def _make_padding(text: str, length: int, fill: str) -> str:
    missing_count = length - len(text)
    return (fill * (missing_count // len(fill) + 1))[:missing_count] if fill and missing_count > 0 else ""


def _pad_left(text: str, length: int, fill: str = " ") -> str:
    return _make_padding(text, length, fill) + text[: max(length, 0)]


def _pad_right(text: str, length: int, fill: str = " ") -> str:
    return text[: max(length, 0)] + _make_padding(text, length, fill)


def _concatenate(left: _StringOrBytes, right: _StringOrBytes) -> _StringOrBytes:
    return left + right


def _repeat(text: str, count: int) -> str:
    return text * count


def _reverse(text: str) -> str:
    return text[::-1]


# --- numbers of a string -----------------------------------------------------------------


def _count_octets(text: str) -> int:
    return len(text.encode())


def _count_unpadded_characters(text: str) -> int:
    return len(text.rstrip(" "))


def _find_first_code(text: str) -> int:
    return ord(text[0]) if text else 0


def _md5(value: bytes) -> str:
    return md5(value, usedforsecurity=False).hexdigest()


# --- conversions -------------------------------------------------------------------------


def conversion_function(source_oid: int, target_oid: int) -> Callable[[str], str] | None:
    """Return the cast from one string type to another, or None if it changes nothing."""
    if not {source_oid, target_oid} <= set(STRINGS):
        return None
    return (lambda text: text.rstrip(" ")) if source_oid == BPCHAR != target_oid else None


def _print_boolean(value: bool) -> str:
    return "true" if value else "false"


STRING_CONVERSIONS: Final = MappingProxyType({(BOOL, target): _print_boolean for target in STRINGS})
"""The casts to strings, by the type oids of source and target."""


def modifier_cast_function(type_oid: int, length: int) -> Callable[[str], str]:
    """Return the explicit cast to `varchar(length)` or `character(length)`.

    Both casts cut longer texts. The cast to character also pads shorter texts with blanks.
    """
    if type_oid == VARCHAR:
        return lambda text: text[:length]
    return lambda text: text[:length].ljust(length)


# --- patterns ----------------------------------------------------------------------------


def _translate_like_parts(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern that percent signs separate, as regular expressions."""
    part: list[str] = []
    characters = iter(pattern)
    for character in characters:
        if character == "%":
            yield "".join(part)
            part = []
        else:
            part.append(
                "." if character == "_" else re.escape(next(characters) if character == "\\" else character)
            )
    yield "".join(part)


def like_matcher(pattern: str) -> Callable[[str], bool]:
    r"""Return a function that matches a LIKE pattern; the pattern has a backslash before each literal %, _ and \."""
    expression, *later_parts = _translate_like_parts(pattern)
    if later_parts:
        *middle_parts, last_part = later_parts
        # For a part between two percent signs it is enough to take its first occurrence, without backtracking.
        expression += "".join(f"(?>.*?{part})" for part in middle_parts) + f".*{last_part}"
    match_whole = re.compile(expression, re.DOTALL).fullmatch
    return lambda text: match_whole(text) is not None


def like_expression(pattern: str) -> str:
    """Return a LIKE pattern as a regular expression of RE2."""
    return rf"(?s)\A{'.*'.join(_translate_like_parts(pattern))}\z"


def regex_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that searches a text for a match of a regular expression in RE2's syntax."""
    return lambda text: bool(pc.match_substring_regex(pa.scalar(text), pattern).as_py())


STRING_FUNCTIONS_BY_SOURCE: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        **STRING_FUNCTIONS,
        **dict.fromkeys(("textcat", "byteacat"), _concatenate),
        **dict.fromkeys(("textlen", "byteaoctetlen"), len),
        "bpcharlen": _count_unpadded_characters,
        **dict.fromkeys(("textoctetlen", "bpcharoctetlen"), _count_octets),
        "textbitlen": lambda text: 8 * _count_octets(text),
        "byteabitlen": lambda value: 8 * len(value),
        **dict.fromkeys(("text_substr", "bytea_substr"), _substring),
        "text_left": _take_left,
        "text_right": _take_right,
        "text_right_before_19": _take_right_before_19,
        "textpos": _find_position,
        "text_starts_with": str.startswith,
        **dict.fromkeys(("btrim", "btrim1"), lambda text, characters=" ": text.strip(characters)),
        **dict.fromkeys(("ltrim", "ltrim1"), lambda text, characters=" ": text.lstrip(characters)),
        **dict.fromkeys(("rtrim", "rtrim1"), lambda text, characters=" ": text.rstrip(characters)),
        "replace_text": _replace,
        "translate": _translate,
        "repeat": _repeat,
        "text_reverse": _reverse,
        "split_part": _split_part,
        "lpad": _pad_left,
        "rpad": _pad_right,
        "ascii": _find_first_code,
        "md5_text": lambda text: _md5(text.encode()),
        "md5_bytea": _md5,
        "sha256_bytea": lambda value: sha256(value).digest(),
        "sha512_bytea": lambda value: sha512(value).digest(),
    }
)
"""The functions of strings and bytes.

The keys are `prosrc`. If older servers implement a function in another way, that implementation has a name of pgsieve's
own (`pgsieve.decoding.row_filters.simplification`).
"""
