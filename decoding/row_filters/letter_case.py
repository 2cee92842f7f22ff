"""The results of lower, upper and initcap under one collation, character by character.

In: the server's result for each character. Out: a `CaseMapping`, with which row filters change the case of
letters as the server does. Raises nothing.

libc's and the builtin collations map each character by itself (formatting.c, pg_locale_libc.c,
pg_locale_builtin.c). initcap also depends on whether the previous character belongs to a word. A collation
with other rules has no mapping, but a reason in `refusal`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

CaseFunction: TypeAlias = Literal["lower", "upper", "initcap"]
#: The characters that change, and a string of their results in the same order.
Changes: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Words:
    """The rules of initcap: `first` applies to the first character of a word, `rest` to all others.

    `members` has the ranges of word characters: the first and the last character of each range.
    """

    first: Changes
    rest: Changes
    members: str


@dataclass(frozen=True, slots=True)
class CaseMapping:
    """The case of letters under one collation; it lists only characters that change.

    `words` is None if the server was not asked for initcap. `refusal` is the reason why there is no mapping,
    or ''.
    """

    lower: Changes = ("", "")
    upper: Changes = ("", "")
    words: Words | None = None
    refusal: str = ""

    def change(self, function: CaseFunction, text: str) -> str:
        """Return the text as lower, upper or initcap changes it."""
        if function == "initcap":
            return _capitalize(self.words, text) if self.words is not None else text
        return text.translate(_translation_table(self.lower if function == "lower" else self.upper))

    def variants(self, character: str) -> str:
        """The characters that a character of a regular expression matches if case is ignored.

        A title case letter, which is neither lower nor upper, does not match itself (allcases() in
        src/backend/regex/regc_locale.c).
        """
        return "".join(dict.fromkeys((self.change("lower", character), self.change("upper", character))))

    def variants_of_range(self, first: str, last: str) -> str:
        """The characters outside a range that match a variant in it (range() in regc_locale.c)."""
        mappings = (dict(zip(*changes, strict=True)) for changes in (self.lower, self.upper))
        variants = {
            mapped_character
            for each in mappings
            for character, mapped_character in each.items()
            if first <= character <= last
        }
        return "".join(sorted(variant for variant in variants if not first <= variant <= last))

    def has_english_ascii_case(self) -> bool:
        """Whether ASCII letters change case as in English; in Turkish they do not."""
        text = "".join(map(chr, range(1, 128)))
        return (self.change("lower", text), self.change("upper", text)) == (text.lower(), text.upper())


ASCII: Final = CaseMapping(
    (ascii_uppercase, ascii_lowercase),
    (ascii_lowercase, ascii_uppercase),
    Words((ascii_lowercase, ascii_uppercase), (ascii_uppercase, ascii_lowercase), "09AZaz"),
)
"""The mapping of the collations C and POSIX, which have no letters beyond ASCII."""

#: Returns the mapping of a collation of pg_catalog for a function; None if the server was not asked for it.
CaseMappings: TypeAlias = Callable[[str, CaseFunction], CaseMapping | None]


def ascii_only_mappings(collation: str, _function: CaseFunction) -> CaseMapping | None:
    """Return the mapping of C and POSIX, which need no server; None for other collations."""
    return ASCII if collation in ("C", "POSIX") else None


def server_mappings(recorded: Mapping[str, CaseMapping]) -> CaseMappings:
    """Return the mappings that the server returned, by collation, and those of C and POSIX."""

    def mapping(collation: str, function: CaseFunction) -> CaseMapping | None:
        answer = recorded.get(collation)
        if answer is not None and (answer.words is not None or answer.refusal or function != "initcap"):
            return answer
        return ascii_only_mappings(collation, function)

    return mapping


class MappingRequests:
    """Records requests for mappings: `collations` says of each collation whether initcap was requested."""

    def __init__(self) -> None:
        self.collations: dict[str, bool] = {}

    def __call__(self, collation: str, function: CaseFunction) -> CaseMapping:
        """Record the request, and return a mapping in place of the server's."""
        if ascii_only_mappings(collation, function) is None:
            self.collations[collation] = self.collations.get(collation, False) or function == "initcap"
        return ASCII


def character_ranges(characters: str) -> str:
    """Return ascending characters as ranges: the first and the last character of each range."""
    bounds: list[str] = []
    for character in characters:
        if bounds and ord(bounds[-1]) == ord(character) - 1:
            bounds[-1] = character
        else:
            bounds += (character, character)
    return "".join(bounds)


#: Replaces functools.cache. Spark would send a cached function to the executors by name, and they may lack
#: pgsieve.
_TRANSLATION_TABLES: Final[dict[Changes, Mapping[int, str]]] = {}


def _translation_table(changes: Changes) -> Mapping[int, str]:
    if changes not in _TRANSLATION_TABLES:
        table = {
            ord(character): mapped_character for character, mapped_character in zip(*changes, strict=True)
        }
        _TRANSLATION_TABLES[changes] = MappingProxyType(table)
    return _TRANSLATION_TABLES[changes]


def _capitalize(words: Words, text: str) -> str:
    first, rest = _translation_table(words.first), _translation_table(words.rest)
    parts, inside = [], False
    for character in text:
        parts.append((rest if inside else first).get(ord(character), character))
        inside = _is_within(words.members, character)
    return "".join(parts)


def _is_within(word_ranges: str, character: str) -> bool:
    place = bisect_left(word_ranges, character)
    return place % 2 == 1 or word_ranges[place : place + 1] == character
