"""The results of lower, upper and initcap under one collation, character by character.

In: the server's result for each character. Out: a `CaseMapping`, with which row filters change the case of
letters as the server does. Raises nothing.

The collations of libc and the builtin collations change each character by itself (formatting.c, pg_locale_libc.c,
pg_locale_builtin.c). Only initcap also depends on the character before: it treats the first character of a word in
another way. pgsieve refuses a collation with other rules: its `CaseMapping` has only the reason, in `refusal`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

CaseFunction: TypeAlias = Literal["lower", "upper", "initcap"]
#: Two strings of the same length: the characters that change, and the characters that they become.
CharacterReplacements: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class InitcapRules:
    """The rules of initcap: `rest` applies to a character that follows a character of a word, `first` to all others.

    `members` has the ranges of the characters that belong to words: the first and the last character of each range.
    """

    first: CharacterReplacements
    rest: CharacterReplacements
    members: str


@dataclass(frozen=True, slots=True)
class CaseMapping:
    """How the case of letters changes under one collation. Characters that do not change are not listed.

    - `lower` and `upper` are the characters that lower and upper change.
    - `words` has the rules of initcap. It is None if the server was not asked for initcap.
    - `refusal` is the reason why pgsieve cannot change letters under this collation, or '' if it can.
    """

    lower: CharacterReplacements = ("", "")
    upper: CharacterReplacements = ("", "")
    words: InitcapRules | None = None
    refusal: str = ""

    def change(self, function: CaseFunction, text: str) -> str:
        """Return the result of lower, upper or initcap for a text."""
        if function == "initcap":
            return _capitalize(self.words, text) if self.words is not None else text
        return text.translate(_find_translation_table(self.lower if function == "lower" else self.upper))

    def list_variants(self, character: str) -> str:
        """Return the characters that a character of a regular expression matches if case is ignored.

        These are its lower case and its upper case. A title case letter is neither, so it does not even match itself
        (allcases() in src/backend/regex/regc_locale.c).
        """
        return "".join(dict.fromkeys((self.change("lower", character), self.change("upper", character))))

    def list_range_variants(self, first: str, last: str) -> str:
        """Return the characters that a range matches only because case is ignored.

        These are the lower and upper case of the characters in the range (range() in regc_locale.c).
        """
        mappings = (dict(zip(*changes, strict=True)) for changes in (self.lower, self.upper))
        variants = {
            mapped_character
            for mapping in mappings
            for character, mapped_character in mapping.items()
            if first <= character <= last
        }
        return "".join(sorted(variant for variant in variants if not first <= variant <= last))

    def has_english_ascii_case(self) -> bool:
        """Whether ASCII letters change case as in English. In Turkish, for example, they do not."""
        text = "".join(map(chr, range(1, 128)))
        return (self.change("lower", text), self.change("upper", text)) == (text.lower(), text.upper())


ASCII: Final = CaseMapping(
    (ascii_uppercase, ascii_lowercase),
    (ascii_lowercase, ascii_uppercase),
    InitcapRules((ascii_lowercase, ascii_uppercase), (ascii_uppercase, ascii_lowercase), "09AZaz"),
)
"""The mapping of the collations C and POSIX, which have no letters beyond ASCII."""

#: A function that returns how a case function (lower, upper or initcap) maps letters under a collation of pg_catalog.
#: It returns None if the server was not asked for this mapping.
CaseMappingFinder: TypeAlias = Callable[[str, CaseFunction], CaseMapping | None]


def find_ascii_mapping(collation: str, _function: CaseFunction) -> CaseMapping | None:
    """Return the mapping of C and POSIX, for which no server must be asked; None for other collations."""
    return ASCII if collation in ("C", "POSIX") else None


def make_mapping_finder(mapping_by_collation: Mapping[str, CaseMapping]) -> CaseMappingFinder:
    """Return a function that finds a collation's mapping among those from the server, or that of C and POSIX.

    `mapping_by_collation` has the mappings that the server returned, by collation.
    """

    def find_mapping(collation: str, function: CaseFunction) -> CaseMapping | None:
        server_mapping = mapping_by_collation.get(collation)
        if server_mapping is not None and (
            server_mapping.words is not None or server_mapping.refusal or function != "initcap"
        ):
            return server_mapping
        return find_ascii_mapping(collation, function)

    return find_mapping


class MappingRequests:
    """Records which mappings a filter asks for.

    `collations` maps each requested collation to whether the filter also asked for initcap.
    """

    def __init__(self) -> None:
        self.collations: dict[str, bool] = {}

    def __call__(self, collation: str, function: CaseFunction) -> CaseMapping:
        """Record the request, and return the mapping of C, because the server's mapping is not known yet."""
        if find_ascii_mapping(collation, function) is None:
            self.collations[collation] = self.collations.get(collation, False) or function == "initcap"
        return ASCII


def find_character_ranges(characters: str) -> str:
    """Convert ascending characters to ranges: a string of the first and the last character of each range."""
    bounds: list[str] = []
    for character in characters:
        if bounds and ord(bounds[-1]) == ord(character) - 1:
            bounds[-1] = character
        else:
            bounds += (character, character)
    return "".join(bounds)


#: This dictionary does what functools.cache would do. But Spark sends a function with functools.cache to the executors
#: by its name, and an executor may not have pgsieve.
_TRANSLATION_TABLES: Final[dict[CharacterReplacements, Mapping[int, str]]] = {}


def _find_translation_table(changes: CharacterReplacements) -> Mapping[int, str]:
    if changes not in _TRANSLATION_TABLES:
        table = {
            ord(character): mapped_character for character, mapped_character in zip(*changes, strict=True)
        }
        _TRANSLATION_TABLES[changes] = MappingProxyType(table)
    return _TRANSLATION_TABLES[changes]


def _capitalize(rules: InitcapRules, text: str) -> str:
    first_table, rest_table = _find_translation_table(rules.first), _find_translation_table(rules.rest)
    parts, is_inside_word = [], False
    for character in text:
        parts.append((rest_table if is_inside_word else first_table).get(ord(character), character))
        is_inside_word = _is_word_character(rules.members, character)
    return "".join(parts)


def _is_word_character(word_ranges: str, character: str) -> bool:
    index = bisect_left(word_ranges, character)
    return index % 2 == 1 or word_ranges[index : index + 1] == character
