"""Reads how the publisher converts letters to upper and lower case, for row filters that depend on it.

For example, the row filter `lower(name) = 'straße'` can be evaluated by pgsieve only if pgsieve maps each letter
as the server does.

In: - a connection
    - the catalog
    - the names of publications
Out: the catalog, in which each table has a `CaseMapping` for each collation under which one of its row filters
     changes or ignores case (`add_case_mappings`). If a mapping cannot be represented, the `CaseMapping` has the
     reason, and the parser of the filter then refuses the filter.

Raises psycopg's error if the connection fails.

A few queries read the mappings of all characters. Collations of libc and of the builtin provider map each character
independently of its neighbours (pg_locale_libc.c, pg_locale_builtin.c). The only exception is the builtin collation
PG_UNICODE_FAST. This module checks the independence in two ways. The mapping of a block of characters must be the
mappings of its characters, one after the other. The mapping of a character must be the same between, before and after
letters. Collations of ICU depend on the language and the neighbours of a character, so they are refused.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import psycopg

from pgsieve.decoding.publications.catalog import Catalog
from pgsieve.decoding.publications.filters import find_needed_case_mappings
from pgsieve.decoding.row_filters.letter_case import (
    CaseMapping,
    CharacterReplacements,
    InitcapRules,
    find_character_ranges,
)
from pgsieve.resources.postgres.errors import is_transient
from pgsieve.resources.postgres.source import quote

#: The provider of a collation. Before version 15, the provider of a database's collation is always libc.
_PROVIDER_QUERY: Final = """
select coalesce(nullif(l.collprovider, 'd'), {database})::text
  from pg_database d left join pg_collation l
    on l.collname = %s and l.collnamespace = 'pg_catalog'::regnamespace and l.collencoding in (-1, d.encoding)
 where d.datname = current_database()
"""
#: The providers whose collations can be represented: libc and builtin.
_SUPPORTED_PROVIDERS: Final = ("c", "b")
#: All characters are divided into blocks of 4096. These are the blocks with at least one character that changes.
_BLOCKS_QUERY: Final = """
select block, characters, lower(characters {collate}), upper(characters {collate}), initcap(characters {collate})
  from (select n / 4096 as block, string_agg(chr(n), '' order by n) as characters
          from generate_series(1, 1114111) n where n not between 55296 and 57343 group by 1 offset 0) blocks
 where lower(characters {collate}) <> characters or upper(characters {collate}) <> characters
"""
#: The characters of given blocks whose case changes, each with its mappings alone and next to letters.
_CHARACTERS_QUERY: Final = """
select *
  from (select c, array[lower(c {collate}), lower('a' || c || 'a' {collate}), lower('a' || c || ' ' {collate}),
                        lower(' ' || c || 'a' {collate})] as lowered,
               array[upper(c {collate}), upper('A' || c || 'A' {collate}), upper('A' || c || ' ' {collate}),
                     upper(' ' || c || 'A' {collate})] as uppered
          from (select chr(n) as c
                  from unnest(%s::int[]) block, generate_series(greatest(block * 4096, 1), block * 4096 + 4095) n
                 where n not between 55296 and 57343) each) changed
 where lowered <> array[c, 'a' || c || 'a', 'a' || c || ' ', ' ' || c || 'a']
    or uppered <> array[c, 'A' || c || 'A', 'A' || c || ' ', ' ' || c || 'A']
"""
#: One row about initcap. Its first column has the characters after which initcap continues a word. The second has the
#: number of characters that `InitcapRules` cannot represent. The third has an array for each character that initcap
#: changes: the character, its form at the start of a word, and its form within a word.
_INITCAP_QUERY: Final = """
select string_agg(c, '' order by n) filter (where right(outside, 1) = 'a'),
       count(*) filter (where right(outside, 1) <> right(inside, 1) or left(outside, -1) <> ' ' || alone),
       array_agg(array[c, alone, substr(inside, 2, length(inside) - 2)])
         filter (where alone <> c or left(inside, -1) <> 'A' || c)
  from (select n, chr(n) as c, initcap(chr(n) {collate}) as alone, initcap(' ' || chr(n) || 'a' {collate}) as outside,
               initcap('a' || chr(n) || 'a' {collate}) as inside
          from generate_series(1, 1114111) n where n not between 55296 and 57343 offset 0) each
"""
_CONTEXT_REASON: Final = "it depends on the characters around a character"

#: The mappings that this process has read. The key has the start time of the server, because a server may have
#: another library after a restart. The key also has the database, the collation, and whether the mapping is for
#: initcap.
_MAPPINGS: dict[tuple[Any, ...], CaseMapping] = {}


def add_case_mappings(
    connection: psycopg.Connection[Any], catalog: Catalog, publications: Collection[str]
) -> Catalog:
    """The catalog, in which each table has the case mappings that its row filters in these publications need."""
    collations_by_table: dict[int, dict[str, bool]] = {}
    for publication in (catalog.publications[n] for n in publications if n in catalog.publications):
        for entry in publication.tables:
            if entry.where is not None and entry.oid in catalog.tables:
                for collation, needs_initcap in find_needed_case_mappings(
                    catalog.tables[entry.oid], entry.where
                ).items():
                    needs_initcap_by_collation = collations_by_table.setdefault(entry.oid, {})
                    needs_initcap_by_collation[collation] = (
                        needs_initcap_by_collation.get(collation, False) or needs_initcap
                    )
    if not collations_by_table:
        return catalog
    tables = dict(catalog.tables)
    for oid, collations in collations_by_table.items():
        mappings = [
            (name, read_case_mapping(connection, name, with_initcap=needs_initcap))
            for name, needs_initcap in sorted(collations.items())
        ]
        tables[oid] = replace(tables[oid], case_mappings=tuple(mappings))
    return replace(catalog, tables=tables)


def read_case_mapping(
    connection: psycopg.Connection[Any], collation: str, *, with_initcap: bool
) -> CaseMapping:
    """The mapping of a collation of pg_catalog for the functions lower and upper, and with `with_initcap` also for initcap.

    The server needs about a second for a mapping, so a process reads each mapping only once.
    """
    version = connection.info.server_version
    row = connection.execute(
        "select pg_postmaster_start_time(), oid, datname from pg_database where datname = current_database()"
    ).fetchone()
    assert row is not None
    key = (connection.info.host, connection.info.port, *row, collation, with_initcap)
    if key not in _MAPPINGS:
        try:
            with connection.transaction():
                _MAPPINGS[key] = _read_mapping(
                    connection, collation, with_initcap=with_initcap, version=version
                )
        except psycopg.Error as error:
            if error.sqlstate is None or is_transient(error):
                raise
            # `collations.case_mapping` makes of it: the case of letters depends on the collation NAME, and the server …
            return CaseMapping(refusal=f"the server does not say how (SQLSTATE {error.sqlstate})")
    return _MAPPINGS[key]


def _read_mapping(
    connection: psycopg.Connection[Any], collation: str, *, with_initcap: bool, version: int
) -> CaseMapping:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        return CaseMapping(refusal=f"the database's encoding is {encoding}, not UTF8")
    query = _PROVIDER_QUERY.format(database="d.datlocprovider" if version >= 150000 else "'c'")
    row = connection.execute(query, [collation]).fetchone()
    assert row is not None
    if row[0] not in _SUPPORTED_PROVIDERS:
        return CaseMapping(refusal="that is ICU's, which depends on languages and contexts")
    collate = f"collate {quote('pg_catalog', collation)}"
    blocks = connection.execute(_BLOCKS_QUERY.format(collate=collate)).fetchall()
    character_rows = connection.execute(
        _CHARACTERS_QUERY.format(collate=collate), [[row[0] for row in blocks]]
    ).fetchall()
    lower_by_character = {c: low[0] for c, low, _ in character_rows if low[0] != c}
    upper_by_character = {c: up[0] for c, _, up in character_rows if up[0] != c}
    if any(len(changed) != 1 for changed in (*lower_by_character.values(), *upper_by_character.values())):
        return CaseMapping(refusal="it makes several characters of one")
    mapping = CaseMapping(_to_replacements(lower_by_character), _to_replacements(upper_by_character))
    for _, lower_forms, upper_forms in character_rows:
        is_independent = list(lower_forms) == list(_make_expected_forms(lower_forms[0], "a")) and list(
            upper_forms
        ) == list(_make_expected_forms(upper_forms[0], "A"))
        if not is_independent:
            return CaseMapping(refusal=_CONTEXT_REASON)
    if with_initcap:
        initcap_rules = _read_initcap_rules(connection, collate)
        if initcap_rules is None:
            return CaseMapping(refusal=_CONTEXT_REASON)
        mapping = replace(mapping, words=initcap_rules)
    return mapping if _agrees_with_server(mapping, blocks) else CaseMapping(refusal=_CONTEXT_REASON)


def _make_expected_forms(character: str, letter: str) -> Iterator[str]:
    """A character alone and next to a letter, in the order of the arrays that the query `_CHARACTERS_QUERY` returns."""
    yield character
    yield f"{letter}{character}{letter}"
    yield f"{letter}{character} "
    yield f" {character}{letter}"


def _agrees_with_server(mapping: CaseMapping, blocks: Sequence[tuple[Any, ...]]) -> bool:
    """True if the mapping changes each block of characters exactly as the server does."""
    for _, characters, lowered, uppered, capitalized in blocks:
        if (mapping.change("lower", characters), mapping.change("upper", characters)) != (lowered, uppered):
            return False
        if mapping.words is not None and mapping.change("initcap", characters) != capitalized:
            return False
    return True


def _read_initcap_rules(connection: psycopg.Connection[Any], collate: str) -> InitcapRules | None:
    """The rules by which initcap capitalizes words; None if `InitcapRules` cannot represent these rules."""
    row = connection.execute(_INITCAP_QUERY.format(collate=collate)).fetchone()
    assert row is not None
    word_characters, unrepresentable_count, changes = row
    if unrepresentable_count or any(len(part) != 1 for change in changes for part in change):
        return None
    first_letters = {c: alone for c, alone, _ in changes if alone != c}
    other_letters = {c: inside for c, _, inside in changes if inside != c}
    return InitcapRules(
        _to_replacements(first_letters),
        _to_replacements(other_letters),
        find_character_ranges(word_characters),
    )


def _to_replacements(replacement_by_character: dict[str, str]) -> CharacterReplacements:
    """The characters that change and their replacements, as two texts of the same length in the order of the characters."""
    characters = sorted(replacement_by_character)
    return "".join(characters), "".join(replacement_by_character[c] for c in characters)
