"""Translates PostgreSQL's regular expressions into regular expressions of RE2, the library that Arrow uses.

In: a constant pattern. Out: a pattern in RE2's syntax. Raises RefusedError if the pattern has a construct that RE2
lacks, that depends on a locale, or that PostgreSQL would not compile. The error names the construct.

The two engines agree on alternation, groups, sets and bounds. They differ in `.`, in the anchors `^` and `$`, in
classes, and in quantifiers of quantifiers. A filter only asks whether a string matches. So greedy and non-greedy
quantifiers have the same result. Neither engine backtracks, so both take time in proportion to the string's length.

PostgreSQL documentation, Regular Expression Details (ARE).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pgsieve.decoding.row_filters.constants import InvalidConstantError, RefusedError
from pgsieve.decoding.row_filters.letter_case import CaseMapping

_MAX_REPETITIONS: Final = 255  # DUPMAX in regex/regguts.h
_DIGITS: Final = frozenset("0123456789")
_QUANTIFIER: Final = re.compile(r"[*+?]|\{(\d{1,3})(,(\d{1,3})?)?\}", re.ASCII)
_CLASS: Final = re.compile(r"\[:([a-z]+):\]", re.ASCII)
#: An element of a set that begins like this is refused, unless `_CLASS` matches it.
_ELEMENT_OPENINGS: Final = ("[.", "[=", "[:")
# The ASCII characters of each class. If a collation has letters beyond ASCII, classes are refused.
_CHARACTERS_BY_CLASS: Final = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "blank": r" \t", "cntrl": r"\x00-\x1f\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t-\r ",
    "upper": "A-Z", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
_CHARACTERS_BY_CLASS_ESCAPE: Final = {
    "d": _CHARACTERS_BY_CLASS["digit"],
    "w": f"{_CHARACTERS_BY_CLASS['alnum']}_",
    "s": _CHARACTERS_BY_CLASS["space"],
}
_CONTROL_CHARACTER_BY_ESCAPE: Final = {
    "a": "\a",
    "b": "\b",
    "e": "\x1b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
}


def _write_literal(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def _write_set_with_nul(members: str) -> str:
    """Return a set with these members and NUL. A text of PostgreSQL never contains NUL.

    Without NUL, RE2 rewrites a set such as [kK] as "k, ignoring case". If such a set is part of an alternation (a|b), RE2
    then also matches the Kelvin sign, whose lower case is k.
    """
    return f"[{members}\\x00]"


class _Translation:
    """The translation of one pattern, which is read from the left."""

    def __init__(self, pattern: str, mapping: CaseMapping | None, *, has_ascii_classes: bool) -> None:
        self._pattern = pattern
        self._position = 0
        self._mapping = mapping
        self._has_ascii_classes = has_ascii_classes

    def translate(self) -> str:
        """Return the translation of the pattern."""
        if self._pattern.startswith("***"):
            raise RefusedError("a regular expression that begins with *** is not supported")
        body = "".join(self._translate_alternatives())
        if self._position < len(self._pattern):
            raise RefusedError("the parentheses of a regular expression are not balanced")
        return f"(?s){body}"

    def _write_variants(self, character: str) -> str:
        """Return all characters that a character of the pattern matches, written as members of a set."""
        return "".join(
            map(
                _write_literal, character if self._mapping is None else self._mapping.list_variants(character)
            )
        )

    def _translate_character(self, character: str) -> str:
        """Translate a character that is not in a set."""
        variants = self._write_variants(character)
        return variants if variants == _write_literal(character) else _write_set_with_nul(variants)

    def _peek(self) -> str:
        """Return the next character without moving on; '' at the end of the pattern."""
        return self._pattern[self._position : self._position + 1]

    def _is_next(self, *texts: str) -> bool:
        """Whether the rest of the pattern begins with one of these texts."""
        return self._pattern.startswith(texts, self._position)

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise RefusedError("the regular expression ends too early")
        self._position += 1
        return character

    def _translate_alternatives(self) -> Iterator[str]:
        while self._peek() not in ("", ")"):
            if self._peek() == "|":
                yield self._take()
                continue
            yield from self._translate_piece()

    def _translate_piece(self) -> Iterator[str]:
        """Translate an atom with its quantifier, or an anchor, which can have no quantifier."""
        if _QUANTIFIER.match(self._pattern, self._position):
            raise RefusedError("a quantifier has nothing to repeat")
        first_character = self._take()
        if first_character == "{" and self._peek() in _DIGITS:
            raise RefusedError("the bounds of a quantifier are not valid")
        anchor = {"^": r"\A", "$": r"\z"}.get(first_character)
        if first_character == "\\" and self._peek() in ("A", "Z"):
            anchor = {"A": r"\A", "Z": r"\z"}[self._take()]
        if anchor is not None:
            if _QUANTIFIER.match(self._pattern, self._position):
                raise RefusedError("a quantifier follows an anchor")
            yield anchor
            return
        yield self._translate_atom(first_character)
        yield self._translate_quantifier()

    def _translate_atom(self, first_character: str) -> str:
        match first_character:
            case "(":
                return self._translate_group()
            case "[":
                return self._translate_set()
            case ".":
                return "."
            case "\\":
                escape = self._read_escape(is_in_set=False)
                if not _is_class(escape):
                    return self._translate_character(escape)
                return (
                    f"[{'^' if escape[1].isupper() else ''}{_CHARACTERS_BY_CLASS_ESCAPE[escape[1].lower()]}]"
                )
            case _:
                return self._translate_character(first_character)

    def _translate_group(self) -> str:
        if self._peek() == "?":
            if not self._is_next("?:"):
                raise RefusedError("a regular expression with (? is not supported, except (?:")
            self._position += 2
        body = "".join(self._translate_alternatives())
        if self._take() != ")":
            raise RefusedError("the parentheses of a regular expression are not balanced")
        return f"(?:{body})"

    def _translate_quantifier(self) -> str:
        match = _QUANTIFIER.match(self._pattern, self._position)
        if match is None:
            return ""
        self._position = match.end()
        if self._peek() == "?":
            self._position += 1
        if _QUANTIFIER.match(self._pattern, self._position):
            raise RefusedError("a quantifier follows a quantifier")
        text = match[0]
        if text[0] != "{":
            return text
        minimum, maximum = int(match[1]), int(match[3] or match[1])
        if max(minimum, maximum) > _MAX_REPETITIONS or maximum < minimum:
            raise RefusedError("the bounds of a quantifier are not valid")
        return text

    def _read_escape(self, *, is_in_set: bool) -> str:
        r"""Read an escape, and return its character; for a class such as \d, the backslash and the letter."""
        character = self._take()
        if character in _CONTROL_CHARACTER_BY_ESCAPE:
            return _CONTROL_CHARACTER_BY_ESCAPE[character]
        if character in "dws" or (character in "DWS" and not is_in_set):
            self._require_ascii_classes(f"\\{character}")
            return f"\\{character}"
        if character.isalnum():
            raise RefusedError(f"\\{character} in a regular expression is not supported")
        return character

    def _require_ascii_classes(self, construct: str) -> None:
        if not self._has_ascii_classes:
            raise RefusedError(f"{construct} in a regular expression depends on the collation")

    def _translate_set(self) -> str:
        is_negated = self._peek() == "^"
        self._position += is_negated
        members = [
            self._translate_member()
        ]  # A ] directly after the [ does not end the set, but is a member.
        while self._peek() != "]":
            if self._peek() == "-" and not self._is_next("-]"):
                raise RefusedError("a range of a set is not valid")
            members.append(self._translate_member())
        self._position += 1
        return f"[^{''.join(members)}]" if is_negated else _write_set_with_nul("".join(members))

    def _translate_member(self) -> str:
        match = _CLASS.match(self._pattern, self._position)
        if match is not None:
            return self._translate_named_class(match)
        first_character = self._read_endpoint()
        if self._peek() != "-" or self._is_next("-]"):
            return (
                _CHARACTERS_BY_CLASS_ESCAPE[first_character[1]]
                if _is_class(first_character)
                else self._write_variants(first_character)
            )
        self._position += 1
        last_character = self._read_endpoint()
        if _is_class(first_character) or _is_class(last_character) or first_character > last_character:
            raise RefusedError("a range of a set is not valid")
        variants_outside = (
            ""
            if self._mapping is None
            else self._mapping.list_range_variants(first_character, last_character)
        )
        return f"{_write_literal(first_character)}-{_write_literal(last_character)}{''.join(map(_write_literal, variants_outside))}"

    def _translate_named_class(self, match: re.Match[str]) -> str:
        name = match[1]
        if name not in _CHARACTERS_BY_CLASS or (self._mapping is not None and name in ("lower", "upper")):
            raise RefusedError(f"[:{name}:] is not supported here")
        self._require_ascii_classes(f"[:{name}:]")
        self._position = match.end()
        return _CHARACTERS_BY_CLASS[name]

    def _read_endpoint(self) -> str:
        if self._is_next(*_ELEMENT_OPENINGS):
            raise RefusedError("a set with [. or [= or an unknown [: is not supported")
        character = self._take()
        return self._read_escape(is_in_set=True) if character == "\\" else character


def _is_class(escape: str) -> bool:
    return len(escape) > 1


def translate_pattern(pattern: str, mapping: CaseMapping | None, *, has_ascii_classes: bool) -> str:
    """Translate a pattern into RE2's syntax.

    `mapping` is the collation's case mapping if the match ignores case, otherwise None. The translation lists the
    lower and upper case of each character, because RE2's own rules of case are different. `has_ascii_classes` says that
    classes such as [:alpha:] have only ASCII characters under the collation.
    """
    translation = _Translation(pattern, mapping, has_ascii_classes=has_ascii_classes).translate()
    try:
        pc.match_substring_regex(pa.scalar(""), translation)
    except pa.ArrowInvalid:
        # The only reason for which RE2 refuses a translated pattern is too many repetitions.
        raise RefusedError("nested quantifiers repeat too often") from None
    return translation


def similar_to_escape(pattern: str, escape: str) -> str:
    """Return the regular expression to which PostgreSQL converts a pattern of SIMILAR TO.

    Raises RefusedError for a set that servers of different minor versions convert differently, and InvalidConstantError
    if `escape` has several characters.

    PostgreSQL documentation, SIMILAR TO Regular Expressions.
    """
    if len(escape) > 1:
        raise InvalidConstantError("invalid escape string", "22025")
    earlier_body, later_body = (
        "".join(_translate_similar(pattern, escape, has_nested_brackets=has_nested_brackets))
        for has_nested_brackets in (False, True)
    )
    if earlier_body != later_body:
        raise RefusedError("the end of a set depends on the server's minor version")
    return f"^(?:{earlier_body})$"


def _translate_similar(pattern: str, escape: str, *, has_nested_brackets: bool) -> Iterator[str]:
    """Yield the parts of the regular expression.

    Earlier servers end a set at the first ]. Later servers count the brackets in a set, and do not end it at a ] that is
    its first member (similar_escape_internal() in src/backend/utils/adt/regexp.c). `has_nested_brackets` chooses the
    rule of later servers.
    """
    characters, depth = iter(pattern), 0
    # Within a set, this is 1 after the [, 2 after a ^ that follows it, and at least 3 after any other character.
    place_in_set = 0
    for character in characters:
        if escape and character == escape:
            escaped_character = next(characters, None)
            if escaped_character is None or escaped_character == '"' or depth:
                raise RefusedError("an escape at the end, in a set, or before a quote is not supported")
            yield f"\\{escaped_character}"
        elif depth:
            yield "\\\\" if character == "\\" else character
            if character == "]" and (place_in_set > 2 or not has_nested_brackets):
                depth -= 1
            depth += character == "[" and has_nested_brackets
            place_in_set = place_in_set + 1 if character == "^" else 3
        elif character == "[":
            depth, place_in_set = 1, 1
            yield character
        else:
            yield {"%": ".*", "_": ".", "(": "(?:"}.get(character) or (
                f"\\{character}" if character in ".^$\\" else character
            )
