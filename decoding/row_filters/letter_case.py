"""The results of lower, upper and initcap under one collation, character by character (section 9.4).

In: the server's result for each character. Out: a `CaseMapping`, by which row filters change the case of
letters as the server does. Raises nothing.

libc's collations and the builtin ones map each character by itself (formatting.c, pg_locale_libc.c,
pg_locale_builtin.c). For initcap it matters whether the character before belongs to a word. Where the server
does more, the mapping has the reason in `refusal`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

CaseFunction: TypeAlias = Literal["lower", "upper", "initcap"]
#: Characters that change, and their results in the same places.
Changes: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Words:
    """The rules of initcap: `first` applies to a character at the beginning of a word, `rest` to others.

    `members` are the word characters, as ranges: the first and the last of each.
    """

    first: Changes
    rest: Changes
    members: str


@dataclass(frozen=True, slots=True)
class CaseMapping:
    """The case of letters under one collation; characters that do not change are not listed.

    `words` is None if initcap was not requested. `refusal` says why there is no mapping; it is '' if there is
    one.
    """

    lower: Changes = ("", "")
    upper: Changes = ("", "")
    words: Words | None = None
    refusal: str = ""

    def changed(self, function: CaseFunction, text: str) -> str:
        """The result of the function for the text."""
        if function == "initcap":
            return _capitalized(self.words, text) if self.words is not None else text
        return text.translate(_table(self.lower if function == "lower" else self.upper))

    def variants(self, character: str) -> str:
        """The characters that a character of a regular expression matches when case is ignored.

        A character that is neither lower nor upper, such as a title case letter, does not match itself
        (allcases() in src/backend/regex/regc_locale.c).
        """
        return "".join(dict.fromkeys((self.changed("lower", character), self.changed("upper", character))))

    def variants_of_range(self, first: str, last: str) -> str:
        """The characters that a range matches beyond itself (range() in the same file)."""
        both = (dict(zip(*changes, strict=True)) for changes in (self.lower, self.upper))
        variants = {
            changed for each in both for character, changed in each.items() if first <= character <= last
        }
        return "".join(sorted(variant for variant in variants if not first <= variant <= last))

    def is_plain_in_ascii(self) -> bool:
        """Whether ASCII letters have the case of English; in Turkish they do not."""
        text = "".join(map(chr, range(1, 128)))
        return (self.changed("lower", text), self.changed("upper", text)) == (text.lower(), text.upper())


ASCII: Final = CaseMapping(
    (ascii_uppercase, ascii_lowercase),
    (ascii_lowercase, ascii_uppercase),
    Words((ascii_lowercase, ascii_uppercase), (ascii_uppercase, ascii_lowercase), "09AZaz"),
)
"""The mapping of the collations C and POSIX, which know letters of ASCII only."""

#: The mapping of a collation of pg_catalog for a function; None where the server was not asked for it.
CaseMappings: TypeAlias = Callable[[str, CaseFunction], CaseMapping | None]


def only_ascii(collation: str, _function: CaseFunction) -> CaseMapping | None:
    """The mappings that need no server."""
    return ASCII if collation in ("C", "POSIX") else None


def of_server(recorded: Mapping[str, CaseMapping]) -> CaseMappings:
    """The mappings that the server returned, by collation, and those that need no server."""

    def mapping(collation: str, function: CaseFunction) -> CaseMapping | None:
        answer = recorded.get(collation)
        if answer is not None and (answer.words is not None or answer.refusal or function != "initcap"):
            return answer
        return only_ascii(collation, function)

    return mapping


class NeededMappings:
    """Records the requested mappings: for each collation, whether initcap is among them."""

    def __init__(self) -> None:
        self.collations: dict[str, bool] = {}

    def __call__(self, collation: str, function: CaseFunction) -> CaseMapping:
        """Record the request, and return a mapping in place of the server's."""
        if only_ascii(collation, function) is None:
            self.collations[collation] = self.collations.get(collation, False) or function == "initcap"
        return ASCII


def ranges(characters: str) -> str:
    """Return ascending characters as ranges, the first and the last of each."""
    ends: list[str] = []
    for character in characters:
        if ends and ord(ends[-1]) == ord(character) - 1:
            ends[-1] = character
        else:
            ends += (character, character)
    return "".join(ends)


#: Not cached by functools.cache: such a function would be sent to executors by name, and they may lack
#: pgsieve.
_TABLES: Final[dict[Changes, Mapping[int, str]]] = {}


def _table(changes: Changes) -> Mapping[int, str]:
    if changes not in _TABLES:
        table = {ord(before): after for before, after in zip(*changes, strict=True)}
        _TABLES[changes] = MappingProxyType(table)
    return _TABLES[changes]


def _capitalized(words: Words, text: str) -> str:
    first, rest = _table(words.first), _table(words.rest)
    changed, inside = [], False
    for character in text:
        changed.append((rest if inside else first).get(ord(character), character))
        inside = _is_within(words.members, character)
    return "".join(changed)


def _is_within(ranges_: str, character: str) -> bool:
    place = bisect_left(ranges_, character)
    return place % 2 == 1 or ranges_[place : place + 1] == character
