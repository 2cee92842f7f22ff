"""The functions chr, gcd and lcm, and LIKE with a pattern that is a value of the row.

In: values of one row, none of them NULL. Out: the result that the function has in PostgreSQL. The mappings at the end have
the functions by their `prosrc` in pg_proc. Raises FilterValueError with PostgreSQL's message and SQLSTATE if the server
raises an error. No message contains a value of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from math import gcd
from types import MappingProxyType
from typing import Final

from pgsieve.decoding.errors import PgsieveError


class FilterValueError(PgsieveError):
    """A function raises an error for the values of a row, as it does in PostgreSQL."""


# --- LIKE --------------------------------------------------------------------------------


class _Match(Enum):
    """The result of a match (like_match.c).

    ABORT means that the pattern does not match here, and would not match at any later start in the string.
    """

    TRUE = 1
    FALSE = 0
    ABORT = -1


def _read_literal(pattern: str, index: int) -> str:
    """Return the literal character at an index of the pattern. If it is escaped, the index is that of the backslash."""
    if pattern[index] != "\\":
        return pattern[index]
    if index + 1 == len(pattern):
        raise FilterValueError("LIKE pattern must not end with escape character", sqlstate="22025")
    return pattern[index + 1]


def _match_from(text: str, text_index: int, pattern: str, pattern_index: int) -> _Match:
    while text_index < len(text) and pattern_index < len(pattern):
        if pattern[pattern_index] == "%":
            return _match_after_percent(text, text_index, pattern, pattern_index)
        if pattern[pattern_index] != "_":
            if _read_literal(pattern, pattern_index) != text[text_index]:
                return _Match.FALSE
            pattern_index += pattern[pattern_index] == "\\"
        text_index, pattern_index = text_index + 1, pattern_index + 1
    if text_index < len(text):
        return _Match.FALSE
    return _Match.ABORT if pattern[pattern_index:].strip("%") else _Match.TRUE


def _match_after_percent(text: str, text_index: int, pattern: str, pattern_index: int) -> _Match:
    """Match a pattern that begins with % at `pattern_index`: try each start in the text from `text_index` on."""
    while pattern_index < len(pattern) and pattern[pattern_index] in "%_":
        if pattern[pattern_index] == "_":
            if text_index == len(text):
                return _Match.ABORT
            text_index += 1
        pattern_index += 1
    if pattern_index == len(pattern):
        return _Match.TRUE
    first_literal = _read_literal(pattern, pattern_index)
    for start in range(text_index, len(text)):
        if text[start] == first_literal:
            verdict = _match_from(text, start, pattern, pattern_index)
            if verdict is not _Match.FALSE:
                return verdict
    return _Match.ABORT


def _like(text: str, pattern: str) -> bool:
    """Return `text LIKE pattern`.

    Raises FilterValueError if the pattern ends with a backslash and the match reaches it.
    """
    return _match_from(text, 0, pattern, 0) is _Match.TRUE


# --- strings -----------------------------------------------------------------------------

_SURROGATES: Final = range(0xD800, 0xE000)


def _chr(code: int) -> str:
    if code < 0:
        raise FilterValueError("character number must be positive", sqlstate="22023")
    if code == 0:
        raise FilterValueError("null character not permitted", sqlstate="54000")
    if code > 0x10FFFF or code in _SURROGATES:
        raise FilterValueError("requested character too large or not valid for encoding", sqlstate="54000")
    return chr(code)


# --- integers ----------------------------------------------------------------------------


def _add_range_check(bits: int, compute: Callable[[int, int], int]) -> Callable[[int, int], int]:
    name = "integer" if bits == 32 else "bigint"

    def compute_checked(left: int, right: int) -> int:
        result = compute(left, right)
        if result >= 1 << bits - 1:
            raise FilterValueError(f"{name} out of range", sqlstate="22003")
        return result

    return compute_checked


def _lcm(left: int, right: int) -> int:
    return abs(left // gcd(left, right) * right) if left and right else 0


INTEGER_FUNCTIONS: Final[Mapping[str, Callable[..., object]]] = MappingProxyType(
    {
        "int4gcd": _add_range_check(32, gcd),
        "int8gcd": _add_range_check(64, gcd),
        "int4lcm": _add_range_check(32, _lcm),
        "int8lcm": _add_range_check(64, _lcm),
    }
)

STRING_FUNCTIONS: Final[Mapping[str, Callable[..., object]]] = MappingProxyType(
    {"chr": _chr, "textlike": _like}
)
